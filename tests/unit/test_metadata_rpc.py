"""Every gRPC status and every error of ours is mapped, both ways."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvpool import errors
from kvpool.errors import CapacityError, KVPoolError, StaleError, UnavailableError
from kvpool.metadata.rpc import MAX_ERROR_BYTES, STATUS_ERRORS, error_from_rpc, error_metadata, status_of

OURS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KVPoolError)]


class FakeRpcError(grpc.RpcError):
    """What a failed call raises, as far as the mapping looks."""

    def __init__(self, status: grpc.StatusCode, trailing: Any = ()) -> None:
        self._status, self._trailing = status, trailing

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return "because"

    def trailing_metadata(self) -> Any:
        return self._trailing


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_every_grpc_status_becomes_an_error_that_names_the_address(status: grpc.StatusCode) -> None:
    assert status in STATUS_ERRORS, f"map {status} in kvpool.metadata.rpc"
    error = error_from_rpc(FakeRpcError(status), "host:1")
    assert type(error) is STATUS_ERRORS[status]
    assert "host:1" in str(error)


@pytest.mark.parametrize("kind", OURS)
def test_every_error_of_ours_arrives_as_it_was_raised(kind: type[KVPoolError]) -> None:
    sent = kind("what is wrong", worker="w0@1", elapsed_ns=5)
    arrived = error_from_rpc(FakeRpcError(status_of(sent), error_metadata(sent)), "host:1")
    assert type(arrived) is kind
    assert isinstance(arrived, KVPoolError)
    assert (arrived.message, arrived.details) == (sent.message, sent.details)


@pytest.mark.parametrize("kind", [kind for kind in OURS if kind is not KVPoolError])
def test_a_client_without_our_metadata_still_learns_what_to_do(kind: type[KVPoolError]) -> None:
    arrived = error_from_rpc(FakeRpcError(status_of(kind("x"))), "host:1")
    assert isinstance(arrived, KVPoolError)
    assert issubclass(kind, type(arrived))


def test_a_large_error_is_cut_to_what_headers_carry() -> None:
    ((_, raw),) = error_metadata(CapacityError("m" * 10_000, extra="x" * 10_000))
    assert len(raw) <= MAX_ERROR_BYTES


def test_a_malformed_error_is_an_unavailable_service() -> None:
    for raw in (b"not json", b"{}", b'{"code": "nonsense", "message": "", "details": {}}'):
        error = error_from_rpc(FakeRpcError(grpc.StatusCode.ABORTED, (("kvpool-error-bin", raw),)), "host:1")
        assert type(error) is UnavailableError
    assert type(error_from_rpc(FakeRpcError(grpc.StatusCode.ABORTED), "host:1")) is StaleError
