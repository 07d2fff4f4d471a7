"""The UCX transport between real processes: death, silence, restart, corruption, eviction, and what is left after.

Late bytes: after every failed read its pages are poisoned, and looked at again after the peer was given time to send.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.bench.peer import (
    POISON,
    GeneratedStore,
    PeerOptions,
    PeerProcess,
    block_hash,
    fill_block,
    read_request,
)
from kvpool.errors import IntegrityError, PeerGoneError, StaleError, StallError
from kvpool.transport.base import BlockStatus, Peer, ReadHandle, ReadProgress, ReadState
from kvpool.transport.ucx import UcxTransport
from kvpool.types import WorkerEpoch, WorkerKey
from tests.contract.transport_rig import MS, S, eventually

BLOCK = 256 * 1024
BLOCKS = 512  # 128 MiB: a read takes tens of milliseconds, so a fault lands inside it

PATIENT_NS = 8 * S  # for reads that no fault hits, on a machine that may be busy

FABRICS = {"shm": {}, "tcp": {"TLS": "tcp,self"}}


class Reader:
    """This process's end."""

    def __init__(self, settings: dict[str, str]) -> None:
        options = PeerOptions("reader", blocks=BLOCKS, block_bytes=BLOCK, filled=False, settings=settings)
        self.store = GeneratedStore(options)
        self.transport: UcxTransport = options.transport()
        self.transport.start(options.key, self.store.arena.memory, BLOCK, self.store)

    def read(
        self, peer: Peer, blocks: int = BLOCKS, *, stall_ns: int = 300 * MS, deadline_ns: int = 10 * S
    ) -> ReadHandle:
        return self.transport.read(read_request(peer, range(blocks), BLOCK, deadline_ns, stall_ns))

    def poison(self) -> None:
        self.store.segment[:] = POISON

    def assert_untouched(self) -> None:
        assert (self.store.segment == POISON).all(), "a byte landed after the read was terminal"

    def assert_arrived_blocks_are_right(self, progress: ReadProgress) -> None:
        expected = np.empty(BLOCK, dtype=np.uint8)
        for number, status in enumerate(progress.statuses):
            if status is BlockStatus.ARRIVED:
                fill_block(expected, number)
                assert np.array_equal(self.store.page(number), expected), f"block {number} is wrong"


@pytest.fixture(params=FABRICS)
def settings(request: pytest.FixtureRequest) -> dict[str, str]:
    return dict(FABRICS[request.param])


@pytest.fixture
def reader(settings: dict[str, str]) -> Iterator[Reader]:
    reader = Reader(settings)
    yield reader
    reader.transport.close()


def holder(settings: dict[str, str], worker_id: str = "holder", epoch: int = 1, **more: int) -> PeerProcess:
    return PeerProcess(
        PeerOptions(worker_id, epoch, blocks=BLOCKS, block_bytes=BLOCK, settings=settings, **more)  # type: ignore[arg-type]
    )


def after_first_bytes(handle: ReadHandle, seed: int) -> None:
    """Wait until the read is under way, at a point that differs per seed."""
    limit = random.Random(seed).random() * 0.6 * BLOCKS * BLOCK
    end = time.monotonic() + 5
    while handle.progress().bytes_arrived < limit and not handle.done() and time.monotonic() < end:
        pass


def test_a_read_between_processes_is_whole(settings: dict[str, str], reader: Reader) -> None:
    with holder(settings) as peer:
        progress = reader.read(peer.peer, stall_ns=PATIENT_NS).wait(20 * S)
        assert progress.state is ReadState.DONE
        reader.assert_arrived_blocks_are_right(progress)
        eventually(lambda: peer.ask("stats")["leases"] == 0, "the holder released its leases")


def test_a_killed_holder_is_a_typed_error_soon_and_no_byte_lands_later(
    settings: dict[str, str], reader: Reader
) -> None:
    with holder(settings, "bystander") as bystander:
        for seed in range(3):
            with holder(settings, epoch=seed + 1) as peer:
                assert reader.read(peer.peer, 4, stall_ns=PATIENT_NS).wait(20 * S).state is ReadState.DONE
                reader.poison()
                handle = reader.read(peer.peer, stall_ns=S)
                after_first_bytes(handle, seed)
                peer.signal(signal.SIGKILL)
                progress = handle.wait(20 * S)
                assert progress.state.terminal
                if progress.state is not ReadState.DONE:
                    assert isinstance(progress.error, PeerGoneError | StallError), progress.error
                reader.assert_arrived_blocks_are_right(progress)
                reader.poison()
                peer.kill()
                reader.assert_untouched()
                assert reader.read(bystander.peer, 8, stall_ns=PATIENT_NS).wait(20 * S).state is ReadState.DONE
                reader.poison()


def test_a_stopped_holder_is_dropped_at_the_stall_bound_and_served_again_when_it_wakes(
    settings: dict[str, str], reader: Reader
) -> None:
    with holder(settings) as peer:
        assert reader.read(peer.peer, 4, stall_ns=PATIENT_NS).wait(20 * S).state is ReadState.DONE
        for seed in range(3):
            reader.poison()
            handle = reader.read(peer.peer)
            after_first_bytes(handle, seed)
            peer.signal(signal.SIGSTOP)
            progress = handle.wait(20 * S)
            reader.assert_arrived_blocks_are_right(progress)
            reader.poison()
            if progress.state is not ReadState.DONE:
                assert isinstance(progress.error, StallError | PeerGoneError), progress.error
            peer.signal(signal.SIGCONT)
            eventually(lambda: peer.ask("stats")["leases"] == 0, "the holder released its leases")
            reader.assert_untouched()
            again = reader.read(peer.peer, 16, stall_ns=PATIENT_NS).wait(20 * S)
            assert again.state is ReadState.DONE, again.error
        eventually(lambda: peer.ask("stats")["leases"] == 0, "no lease is left")


def test_a_holder_stopped_before_the_first_byte_is_dropped_too(settings: dict[str, str], reader: Reader) -> None:
    with holder(settings) as peer:
        peer.signal(signal.SIGSTOP)
        reader.poison()
        progress = reader.read(peer.peer).wait(20 * S)
        assert progress.state is ReadState.FAILED
        assert isinstance(progress.error, StallError)
        reader.assert_untouched()
        peer.signal(signal.SIGCONT)


def test_a_killed_reader_costs_the_holder_nothing(settings: dict[str, str], reader: Reader) -> None:
    with holder(settings, lease_slack_ns=200 * MS) as peer:
        for seed in range(3):
            options = PeerOptions("victim", seed + 1, BLOCKS, BLOCK, filled=False, settings=settings)
            with PeerProcess(options) as victim:
                victim.ask(
                    "read",
                    holder="holder",
                    epoch=1,
                    address=peer.address.hex(),
                    numbers=list(range(BLOCKS)),
                    wait=False,
                )
                victim.signal(signal.SIGKILL)
            progress = reader.read(peer.peer, stall_ns=PATIENT_NS).wait(20 * S)
            assert progress.state is ReadState.DONE
        # A reader's death is noticed through its connection; its own budget of 60 s is not waited for.
        eventually(lambda: peer.ask("stats")["leases"] == 0, "leases of dead readers are released", 15)


def test_a_restarted_holder_serves_at_once_and_its_old_epoch_is_refused(
    settings: dict[str, str], reader: Reader
) -> None:
    with holder(settings) as peer:
        assert reader.read(peer.peer, 4, stall_ns=PATIENT_NS).wait(20 * S).state is ReadState.DONE
        fresh = peer.ask("restart")
        address = bytes.fromhex(fresh["address"])
        new = Peer(WorkerKey(peer.options.key.worker_id, WorkerEpoch(fresh["epoch"])), address)
        assert reader.read(new, 4, stall_ns=PATIENT_NS).wait(20 * S).state is ReadState.DONE
        zombie = reader.read(Peer(peer.options.key, address), 4, stall_ns=PATIENT_NS).wait(20 * S)
        assert isinstance(zombie.error, StaleError)


def test_corruption_and_eviction_during_reads_never_pass_for_good_bytes(
    settings: dict[str, str], reader: Reader
) -> None:
    with holder(settings) as peer:
        peer.ask("corrupt", number=5)
        progress = reader.read(peer.peer, 16, stall_ns=PATIENT_NS).wait(20 * S)
        assert isinstance(progress.error, IntegrityError)
        assert progress.statuses[5] is BlockStatus.CORRUPT
        reader.assert_arrived_blocks_are_right(progress)
        handle = reader.read(peer.peer, stall_ns=PATIENT_NS)
        peer.ask("evict", numbers=list(range(100, BLOCKS)))
        handle.wait(20 * S)
        progress = reader.read(peer.peer, 128, stall_ns=PATIENT_NS).wait(20 * S)
        assert progress.statuses[100:] == (BlockStatus.MISSING,) * 28
        assert progress.statuses[:5] == (BlockStatus.ARRIVED,) * 5


def test_a_thousand_failures_leave_counts_at_the_baseline(settings: dict[str, str], reader: Reader) -> None:
    with holder(settings) as peer:
        assert reader.read(peer.peer, 4, stall_ns=PATIENT_NS).wait(20 * S).state is ReadState.DONE
        eventually(lambda: peer.ask("stats")["leases"] == 0, "leases at the baseline")
        before, here = peer.ask("stats"), reader.transport.stats()
        wrong = Peer(WorkerKey(peer.options.key.worker_id, WorkerEpoch(99)), peer.address)
        for round_number in range(100):
            stale = [reader.read(wrong, 2) for _ in range(4)]
            cancelled = [reader.read(peer.peer, 16) for _ in range(3)]
            for handle in cancelled:
                handle.cancel()
            late = [reader.read(peer.peer, 16, deadline_ns=1) for _ in range(3)]
            if round_number % 4 == 0:
                reader.transport.forget(peer.options.key)
            for handle in (*stale, *cancelled, *late):
                assert handle.wait(20 * S).state.terminal
        reader.transport.forget(wrong.key)
        assert reader.read(peer.peer, 4, stall_ns=PATIENT_NS).wait(20 * S).state is ReadState.DONE
        eventually(lambda: reader.transport.stats().endpoints <= here.endpoints, "endpoints at the baseline here")
        assert reader.transport.stats().in_flight_bytes == 0
        assert reader.transport.stats().quarantined_reads == 0
        eventually(lambda: peer.ask("stats")["leases"] == 0, "leases at the baseline")
        after = peer.ask("stats")
        assert after["endpoints"] <= before["endpoints"] + 1
        assert after["threads"] == before["threads"]
        assert after["fds"] <= before["fds"] + 8


def test_generated_blocks_differ() -> None:
    assert len({block_hash(number) for number in range(BLOCKS)}) == BLOCKS
