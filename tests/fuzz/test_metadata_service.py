"""A real metadata server is told nonsense by somebody who speaks its protocol well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import KVPoolError
from kvpool.metadata import wire
from kvpool.metadata.membership import DirectoryLimits
from kvpool.metadata.rpc import CHANNEL_OPTIONS, error_from_rpc
from kvpool.metadata.service import SERVICE_NAME
from kvpool.metadata.v1 import metadata_pb2 as pb
from kvpool.metadata.view import DirectoryView
from tests.contract.metadata_support import ThreadedServer
from tests.fuzz.strategies import fuzzing, messages

TIMEOUT_S = 20.0
FINE = {grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT}  # fmt: skip
"""What a caller may be told; UNKNOWN and INTERNAL would be a bug of the service."""

SMALL = {  # so that calls meet: few workers, epochs and sequences
    "worker_id": st.sampled_from(["w0", "w1", "w2", "", "x" * 300]),
    "worker_epoch": st.sampled_from([0, 1, 2, 2**64 - 1]),
    "sequence": st.sampled_from([0, 1, 2, 3, 2**64 - 1]),
    "directory_epoch": st.sampled_from([0, 1]),  # 1 stands for the real one
    "layout_fingerprint": st.just("layout"),
    "hash_scheme": st.just("scheme"),
    "transport": st.sampled_from(["memory", "memory", "", "x" * 300]),
    "block_tokens": st.sampled_from([16, 16, 16, 0, 2**32 - 1]),
    "block_bytes": st.sampled_from([64, 64, 64, 0, 2**64 - 1]),
    "role": st.sampled_from([1, 1, 2, 0, 9]),
}
CALLS = {
    "Join": (pb.JoinRequest, pb.JoinResponse), "Heartbeat": (pb.HeartbeatRequest, pb.HeartbeatResponse),
    "Report": (pb.ReportRequest, pb.ReportResponse), "Lookup": (pb.LookupRequest, pb.LookupResponse),
    "Suspect": (pb.SuspectRequest, pb.SuspectResponse), "Drain": (pb.DrainRequest, pb.DrainResponse),
    "Leave": (pb.LeaveRequest, pb.LeaveResponse), "Publish": (pb.EventBatch, pb.BatchAck),
    "Tend": (pb.TendRequest, pb.TendResponse), "Pins": (pb.PinsRequest, pb.PinsResponse),
}  # fmt: skip
JOIN = pb.JoinRequest(
    info={"key": {"worker_id": "w0", "worker_epoch": 1}, "role": 1, "transport": "memory", "block_tokens": 16,
          "block_bytes": 64, "layout_fingerprint": "layout", "hash_scheme": "scheme"}
)  # fmt: skip
REQUESTS = st.sampled_from(sorted(CALLS)).flatmap(
    lambda name: st.tuples(st.just(name), messages(CALLS[name][0], SMALL))
)


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    running = ThreadedServer(DirectoryLimits(max_entries=50_000, max_workers=3))
    yield running
    running.stop()


class Stranger:
    """Calls the service without our client, which would not say such things."""

    def __init__(self, server: ThreadedServer) -> None:
        self._server = server
        self._channel = grpc.insecure_channel(server.address, options=CHANNEL_OPTIONS)

    def call(self, name: str, request: Any) -> Any:
        """The answer, None when the service refused with an error of ours."""
        if "directory_epoch" in request.DESCRIPTOR.fields_by_name and request.directory_epoch == 1:
            request.directory_epoch = self._server.server.service.state.directory_epoch
        path, options = f"/{SERVICE_NAME}/{name}", {
            "request_serializer": type(request).SerializeToString, "response_deserializer": CALLS[name][1].FromString
        }  # fmt: skip
        try:
            if name == "Publish":
                return next(iter(self._channel.stream_stream(path, **options)(iter([request]), timeout=TIMEOUT_S)))
            return self._channel.unary_unary(path, **options)(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            status, meant = error.code(), error_from_rpc(error, self._server.address)
        assert status in FINE, f"{name}: {meant}"
        assert isinstance(meant, KVPoolError)
        assert "malformed error" not in str(meant)
        return None

    def watch(self) -> DirectoryView:
        """A whole snapshot, as a router reads it."""
        view = DirectoryView(max_entries=50_000, max_workers=3)
        stream = self._channel.unary_stream(
            f"/{SERVICE_NAME}/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchEvent.FromString,
        )(pb.WatchRequest(name="stranger"), timeout=TIMEOUT_S)
        members: tuple[Any, ...] = ()
        for event in stream:
            match event.WhichOneof("event"):
                case "header":
                    header = wire.header_from_wire(event.header)
                    members = header.members
                    view.begin(header)
                case "part":
                    view.fill(wire.placement_from_wire(item, members) for item in event.part.placements)
                case "end":
                    view.finish()
                    break
        stream.cancel()
        return view

    def close(self) -> None:
        self._channel.close()


def test_the_service_survives_a_stranger_who_speaks_its_protocol(server: ThreadedServer) -> None:
    stranger = Stranger(server)

    @fuzzing
    @given(st.lists(REQUESTS, min_size=1, max_size=12))
    def holds(requests: list[tuple[str, Any]]) -> None:
        stranger.call("Join", JOIN)
        for name, request in requests:
            stranger.call(name, request)
        server.run(server.server.service.state.check)
        assert server.server.service._failure is None
        view = stranger.watch()
        view.index.check()
        assert {item.info.key for item in view.members} == {
            item.info.key for item in server.run(server.server.service.state.members)
        }

    try:
        holds()
    finally:
        stranger.close()


@pytest.mark.parametrize("name", ["Drain", "Leave", "Suspect", "Heartbeat"])
def test_a_name_as_long_as_a_book_is_refused_in_an_error_that_fits_its_headers(
    server: ThreadedServer, name: str
) -> None:
    stranger, book = Stranger(server), "x" * 2_000_000
    request = CALLS[name][0](worker_id=book) if name == "Drain" else CALLS[name][0](key={"worker_id": book})
    try:
        assert stranger.call(name, request) is None
    finally:
        stranger.close()


def test_bytes_that_are_no_message_end_the_call_and_nothing_else(server: ThreadedServer) -> None:
    channel = grpc.insecure_channel(server.address, options=CHANNEL_OPTIONS)
    try:
        for name in (*CALLS, "Describe", "Watch"):
            with pytest.raises(grpc.RpcError):
                list(channel.stream_stream(f"/{SERVICE_NAME}/{name}")(iter([b"\xff" * 20]), timeout=TIMEOUT_S))
    finally:
        channel.close()
    stranger = Stranger(server)
    stranger.watch()
    stranger.close()
