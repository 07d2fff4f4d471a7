"""NIXL between processes: what happens to a read when its holder dies, stops or comes back, and that nothing leaks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.errors import PeerGoneError, StaleError, StallError, TransferError
from kvpool.transport.base import BlockStatus, Peer, ReadState
from kvpool.transport.nixl import NixlTransport
from kvpool.transport.nixl.agent import MAPPING, installed
from kvpool.types import WorkerEpoch, WorkerId, WorkerKey
from tests.contract.transport_rig import MS, POISON, End, S, eventually, pattern, request, start_end

pytestmark = pytest.mark.skipif(not installed(), reason="NIXL is not installed: pip install 'kvpool[nixl]'")

BLOCK = 256 * 1024
BLOCKS = 64
KILLS = 6


class Holder:
    """A holder process."""

    def __init__(self, epoch: int = 1) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.multiprocess.nixl_holder",
            "holder",
            str(epoch),
            str(BLOCKS),
            str(BLOCK),
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        address = bytes.fromhex(self.process.stdout.readline())
        self.peer = Peer(WorkerKey(WorkerId("holder"), WorkerEpoch(epoch)), address)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def reader() -> Iterator[End]:
    end = start_end(NixlTransport(), "reader", blocks=BLOCKS, block_bytes=BLOCK, filled=False)
    yield end
    end.transport.close()


@pytest.fixture
def holder() -> Iterator[Holder]:
    holder = Holder()
    yield holder
    holder.kill()


def test_every_exception_of_nixl_is_mapped() -> None:
    import importlib

    bindings = importlib.import_module("nixl._api").nixlBind
    assert {name for name in dir(bindings) if name.endswith("Error")} <= set(MAPPING)


def test_blocks_arrive_from_another_process(reader: End, holder: Holder) -> None:
    progress = reader.transport.read(request(holder.peer, list(range(BLOCKS)), BLOCK)).wait(20 * S)
    assert progress.state is ReadState.DONE, progress.error
    for number in range(BLOCKS):
        assert np.array_equal(reader.slot(number), pattern(number, BLOCK))


def test_a_killed_holder_is_a_typed_error_within_a_second_and_its_successor_serves(reader: End) -> None:
    rng = random.Random(7)
    for round_ in range(KILLS):
        holder = Holder(epoch=round_ + 1)
        everything = request(holder.peer, list(range(BLOCKS)), BLOCK, stall_ns=S)
        assert reader.transport.read(everything).wait(20 * S).state is ReadState.DONE
        threading.Timer(rng.uniform(0.0, 0.02), holder.kill).start()
        while True:  # reads until the kill strikes
            reader.store.segment[:] = POISON
            progress = reader.transport.read(everything).wait(20 * S)
            if progress.state is not ReadState.DONE:
                break
        assert isinstance(progress.error, TransferError), progress.error
        assert progress.elapsed_ns < 2 * S
        for number, status in enumerate(progress.statuses):
            if status is BlockStatus.ARRIVED:
                assert np.array_equal(reader.slot(number), pattern(number, BLOCK))
        reader.store.segment[:] = POISON
        assert reader.transport.stats().endpoints == 0
        assert (reader.store.segment == POISON).all()


def test_a_stopped_holder_costs_the_stall_bound_and_another_goes_on(reader: End, holder: Holder) -> None:
    other = start_end(NixlTransport(), "other", blocks=4, block_bytes=BLOCK, filled=True)
    try:
        assert reader.transport.read(request(holder.peer, [1], BLOCK)).wait(20 * S).state is ReadState.DONE
        os.kill(holder.process.pid, signal.SIGSTOP)
        handle = reader.transport.read(request(holder.peer, [2, 3], BLOCK, stall_ns=300 * MS))
        assert reader.transport.read(request(other.peer, [1], BLOCK)).wait(20 * S).state is ReadState.DONE
        progress = handle.wait(20 * S)
        assert isinstance(progress.error, StallError)
        os.kill(holder.process.pid, signal.SIGCONT)
        assert reader.transport.read(request(holder.peer, [2, 3], BLOCK)).wait(20 * S).state is ReadState.DONE
    finally:
        other.transport.close()


def test_a_holder_that_is_gone_or_somebody_else_is_named(reader: End, holder: Holder) -> None:
    stale = Peer(WorkerKey(WorkerId("holder"), WorkerEpoch(9)), holder.peer.address)
    assert isinstance(reader.transport.read(request(stale, [1], BLOCK)).wait(20 * S).error, StaleError)
    holder.kill()
    assert isinstance(reader.transport.read(request(holder.peer, [1], BLOCK)).wait(20 * S).error, PeerGoneError)


def test_descriptors_and_threads_return_to_where_they_were_after_many_failures(reader: End, holder: Holder) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def fail_once() -> None:
        assert reader.transport.read(request(holder.peer, [1], BLOCK)).wait(20 * S).state is ReadState.DONE
        reader.transport.forget(holder.peer.key)
        eventually(lambda: reader.transport.stats().endpoints == 0, "the agent is destroyed")

    for _ in range(3):  # libraries open what they keep
        fail_once()
    before = counts()
    for _ in range(30):
        fail_once()
    eventually(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)), "nothing is left over")
