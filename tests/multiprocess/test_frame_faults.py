"""Compressed frames between real processes: a holder that dies, stops or sends wrong data costs a typed error, no late
byte, no wrong byte, and no staging."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.bench.peer import POISON, GeneratedStore, PeerOptions, PeerProcess, fill_block, read_request
from kvpool.errors import PeerGoneError, StallError, TransferError
from kvpool.transport.base import BlockStatus, ReadHandle, ReadProgress, ReadState
from kvpool.transport.ucx.frames import LANE_BYTES
from kvpool.transport.ucx.settings import Compression
from tests.contract.transport_rig import MS, S, eventually

BLOCK = 256 * 1024
BLOCKS = 256
OPTIONS = {"blocks": BLOCKS, "block_bytes": BLOCK, "settings": {"TLS": "tcp,self"}}
ALWAYS = Compression.ALWAYS.value


class Reader:
    """This process's end; wants frames of everything."""

    def __init__(self) -> None:
        options = PeerOptions("reader", filled=False, compression=ALWAYS, **OPTIONS)  # type: ignore[arg-type]
        self.store = GeneratedStore(options)
        self.transport = options.transport()
        self.transport.start(options.key, self.store.arena.memory, BLOCK, self.store)

    def read(self, holder: PeerProcess, *, stall_ns: int = 300 * MS) -> ReadHandle:
        return self.transport.read(read_request(holder.peer, range(BLOCKS), BLOCK, 10 * S, stall_ns))

    def assert_right(self, progress: ReadProgress) -> None:
        expected = np.empty(BLOCK, dtype=np.uint8)
        for number, status in enumerate(progress.statuses):
            if status is BlockStatus.ARRIVED:
                fill_block(expected, number)
                assert np.array_equal(self.store.page(number), expected), f"block {number} is wrong"


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    eventually(lambda: reader.transport.stats().staging_bytes == 0, "all staging is back")
    reader.transport.close()


def holder(epoch: int = 1) -> PeerProcess:
    return PeerProcess(PeerOptions("holder", epoch, **OPTIONS))  # type: ignore[arg-type]


def test_a_holder_killed_at_random_points_leaves_no_late_byte_and_its_successor_serves(reader: Reader) -> None:
    rng = random.Random(5)
    for epoch in range(1, 6):
        with holder(epoch) as victim:
            handle = reader.read(victim, stall_ns=S)
            eventually(  # on a busy machine it may stall before
                lambda handle=handle: handle.done() or handle.progress().bytes_arrived > 0,  # type: ignore[misc]
                "the first blocks arrive",
            )
            if rng.random() < 0.7:
                limit = rng.randrange(BLOCKS * BLOCK)
                eventually(
                    lambda handle=handle, limit=limit: (  # type: ignore[misc]
                        handle.progress().bytes_arrived > limit or handle.done()
                    ),
                    "some blocks arrive",
                )
            victim.kill()
            progress = handle.wait(20 * S)
            assert progress.state is ReadState.DONE or isinstance(progress.error, PeerGoneError | StallError)
            reader.assert_right(progress)
            reader.store.segment[:] = POISON
        eventually(lambda: reader.transport.stats().staging_bytes == 0, "all staging is back")
        assert (reader.store.segment == POISON).all(), "a byte landed after the read was terminal"


def test_a_stopped_holder_costs_the_stall_bound_and_serves_again_when_it_goes_on(reader: Reader) -> None:
    with holder() as sleeper:
        assert reader.read(sleeper).wait(20 * S).state is ReadState.DONE
        sleeper.signal(signal.SIGSTOP)
        progress = reader.read(sleeper).wait(20 * S)
        assert isinstance(progress.error, StallError)
        reader.store.segment[:] = POISON
        sleeper.signal(signal.SIGCONT)
        sleeper.ask("stats")  # it runs again, and had time to send
        assert (reader.store.segment == POISON).all(), "a byte landed after the read was terminal"
        progress = reader.read(sleeper, stall_ns=5 * S).wait(20 * S)
        assert progress.state is ReadState.DONE, progress.error
        reader.assert_right(progress)
        eventually(lambda: sleeper.ask("stats")["staging_bytes"] == 0, "the holder has its staging back")
        eventually(lambda: sleeper.ask("stats")["leases"] == 0, "every read lease is released")


def test_frames_that_are_cut_or_sent_twice_are_never_accepted_as_something_else(reader: Reader) -> None:
    for epoch, how in enumerate(("data cut", "twice"), start=1):
        with holder(epoch) as liar:
            liar.ask("mangle", how=how)
            progress = reader.read(liar).wait(20 * S)
            assert progress.state is ReadState.DONE or isinstance(progress.error, TransferError), how
            if how == "data cut":
                assert progress.state is not ReadState.DONE
            reader.assert_right(progress)
            reader.store.segment[:] = POISON
            liar.ask("mangle", how="none")
            progress = reader.read(liar, stall_ns=5 * S).wait(20 * S)
            assert progress.state is ReadState.DONE, progress.error
            reader.assert_right(progress)


def test_readers_that_stopped_do_not_keep_frames_from_others() -> None:
    """Each of the stopped ones holds its staging for as long as its lease runs."""
    victims = [
        PeerProcess(PeerOptions(f"sleeper-{number}", filled=False, compression=ALWAYS, **OPTIONS))  # type: ignore[arg-type]
        for number in range(5)
    ]
    reader = Reader()
    try:
        with holder() as source:
            read = {"holder": "holder", "epoch": 1, "address": source.address.hex()}
            for victim in victims:  # the first read wires the link up
                assert victim.ask("read", **read, numbers=[0], wait=True)["state"] == "done"
            for victim in victims:
                before = source.ask("stats")["bytes_served"]
                victim.tell("read", **read, numbers=list(range(BLOCKS)), wait=True)
                eventually(lambda before=before: source.ask("stats")["bytes_served"] > before, "runs are granted")  # type: ignore[misc]
                victim.signal(signal.SIGSTOP)
            assert source.ask("stats")["staging_bytes"] > 0
            progress = reader.read(source, stall_ns=5 * S).wait(20 * S)
            assert progress.state is ReadState.DONE, progress.error
            reader.assert_right(progress)
            stats = source.ask("stats")
            assert stats["staging_bytes"] <= 5 * LANE_BYTES
    finally:
        reader.transport.close()
        for victim in victims:
            victim.kill()
