"""A transport whose own thread breaks says so: a worker that goes on would offer blocks that nobody can read."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvpool.errors import PeerGoneError, StallError, TransferError
from kvpool.transport import create_transport
from kvpool.transport.base import BlockWant, Peer, ReadRequest, ReadState
from kvpool.transport.ucx import UcxTransport
from kvpool.transport.ucx.direct import DirectMemory
from kvpool.types import BlockHash, WorkerEpoch, WorkerId, WorkerKey
from tests.contract.transport_rig import MS, POISON, RigStore, request, start_end

WAIT_S = 20.0


def test_a_broken_progress_thread_is_told_once_and_refuses_reads_as_a_failure() -> None:
    told: list[BaseException] = []
    happened = threading.Event()

    def on_failure(error: BaseException) -> None:
        told.append(error)
        happened.set()

    store = RigStore(4, 4096, filled=True)
    transport = create_transport("ucx", on_failure=on_failure)
    assert isinstance(transport, UcxTransport)
    key = WorkerKey(WorkerId("w"), WorkerEpoch(1))
    transport.start(key, memoryview(np.zeros(4 * 4096, dtype=np.uint8)), 4096, store)
    try:
        running = transport._running
        assert running is not None

        def bug(_: int) -> None:
            raise ZeroDivisionError("a bug")

        running.loop.post(bug)
        assert happened.wait(WAIT_S)
        peer = Peer(WorkerKey(WorkerId("p"), WorkerEpoch(1)), transport.address)
        request = ReadRequest(peer, (BlockWant(BlockHash(bytes(16)), 0),), 1_000_000_000, 1_000_000_000)
        with pytest.raises(TransferError, match="a bug") as caught:
            transport.read(request)
        assert type(caught.value) is TransferError  # not "cancelled", which is nobody's failure
    finally:
        transport.close()
    assert [type(error) for error in told] == [ZeroDivisionError]


def test_a_bug_on_a_helper_thread_is_told_too_and_its_pages_stay_out_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = threading.Event()
    reader = create_transport("ucx", on_failure=lambda _: happened.set())
    holder = start_end(create_transport("ucx"), "holder", blocks=4, block_bytes=4096, filled=True)
    mine = start_end(reader, "reader", blocks=4, block_bytes=4096, filled=False)

    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(DirectMemory, "fetch", bug)
    try:
        handle = reader.read(request(holder.peer, range(4), 4096))
        assert happened.wait(WAIT_S)
        assert not handle.done()
        assert handle.progress().bytes_arrived == 0
        assert (mine.store.segment == POISON).all()
    finally:
        reader.close()
        holder.transport.close()


def _damaged(address: bytes) -> dict[str, bytes]:
    flipped = bytearray(address)
    flipped[len(address) // 2] ^= 1
    return {
        "empty": b"",
        "cut": address[:-1],
        "longer": address + b"x",
        "flipped": bytes(flipped),
        "nonsense": b"nonsense that is long enough to be an address",
        "bare": address[15:],  # what UCX made, without the seal
    }


def test_a_malformed_address_fails_its_read_alone_and_never_reaches_ucx() -> None:
    """Each of them would end the process or the transport, or be taken for another address."""
    holder = start_end(create_transport("ucx"), "holder", blocks=4, block_bytes=4096, filled=True)
    mine = start_end(create_transport("ucx"), "reader", blocks=4, block_bytes=4096, filled=False)
    try:
        for what, address in _damaged(holder.transport.address).items():
            forged = Peer(holder.key, address)
            progress = mine.transport.read(request(forged, range(4), 4096)).wait(int(WAIT_S * 1e9))
            assert type(progress.error) is PeerGoneError, what
            assert "UCX address of holder@1 cannot be used" in str(progress.error)
        progress = mine.transport.read(request(holder.peer, range(4), 4096)).wait(int(WAIT_S * 1e9))
        assert progress.state is ReadState.DONE
    finally:
        mine.transport.close()
        holder.transport.close()


def test_a_holder_refuses_a_reader_whose_address_is_malformed_and_goes_on_serving() -> None:
    holder = start_end(create_transport("ucx"), "holder", blocks=4, block_bytes=4096, filled=True)
    mine = start_end(create_transport("ucx"), "reader", blocks=4, block_bytes=4096, filled=False)
    assert isinstance(mine.transport, UcxTransport)
    assert mine.transport._running is not None
    try:
        fabric = mine.transport._fabric
        right, fabric.readers.ports[0].address = fabric.readers.ports[0].address, b"nonsense" * 8
        progress = mine.transport.read(request(holder.peer, range(4), 4096, stall_ns=200 * MS)).wait(int(WAIT_S * 1e9))
        assert isinstance(progress.error, StallError)
        fabric.readers.ports[0].address = right
        mine.transport.forget(holder.key)
        progress = mine.transport.read(request(holder.peer, range(4), 4096)).wait(int(WAIT_S * 1e9))
        assert progress.state is ReadState.DONE
    finally:
        mine.transport.close()
        holder.transport.close()
