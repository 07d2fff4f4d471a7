"""Two million blocks and random faults for an hour: nothing may grow, here or at the holders.

``KVPOOL_SOAK_SECONDS`` sets the length (an hour without it) and thereby the pace; run with ``pytest -m soak -s``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvpool.bench.peer import POISON, GeneratedStore, PeerOptions, PeerProcess, read_request
from kvpool.transport.base import BlockStatus, Peer, ReadState
from kvpool.transport.ucx import UcxTransport
from kvpool.types import WorkerEpoch, WorkerKey
from tests.contract.transport_rig import MS, S, eventually

BLOCK = 16 * 1024
BLOCKS = 256
WARM_ROUNDS = 200
SECONDS = float(os.environ.get("KVPOOL_SOAK_SECONDS", "3600"))
PACE_BLOCKS_PER_S = 2_200_000 / SECONDS  # what fails does not count
REPORT_S = 60.0
RECONNECTIONS = 12  # until the reader has every UCX worker it will ever have, each of 4 MiB and 30 descriptors
GROWTH_MIB = 64  # what the allocator keeps
GROWTH_FDS = 48


@dataclass(frozen=True, slots=True)
class Counts:
    """What a process holds."""

    memory_mib: float
    fds: int
    threads: int

    def refuse_growth_since(self, before: Counts, who: str) -> None:
        said = f"{who}: {before} → {self}"
        print(said, flush=True)
        assert self.memory_mib - before.memory_mib < GROWTH_MIB, said
        assert self.fds - before.fds <= GROWTH_FDS, said
        assert self.threads <= before.threads, said


def counts_of(pid: int) -> Counts:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    tasks, fds = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("task", "fd"))
    return Counts(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, fds, tasks)


@dataclass(slots=True)
class Soak:
    """A reader here, a holder that is killed now and then, and one that only suffers."""

    settings: dict[str, str]
    rng: random.Random = field(default_factory=lambda: random.Random(20240501))
    rounds: int = 0
    blocks_read: int = 0
    fences_waited: int = 0
    epoch: int = 1
    store: GeneratedStore = field(init=False)
    transport: UcxTransport = field(init=False)
    mortal: PeerProcess = field(init=False)
    steady: PeerProcess = field(init=False)

    def __post_init__(self) -> None:
        options = PeerOptions("reader", blocks=BLOCKS, block_bytes=BLOCK, filled=False, settings=self.settings)
        self.store, self.transport = GeneratedStore(options), options.transport()
        self.transport.start(options.key, self.store.arena.memory, BLOCK, self.store)
        self.mortal, self.steady = self.holder("mortal"), self.holder("steady")

    def holder(self, name: str) -> PeerProcess:
        return PeerProcess(PeerOptions(name, self.epoch, BLOCKS, BLOCK, settings=self.settings))

    def round(self) -> None:
        """One read, one fault perhaps, and a look at the pages afterwards."""
        self.rounds += 1
        rng = self.rng
        holder = rng.choice((self.mortal, self.steady))
        stale = Peer(WorkerKey(holder.options.key.worker_id, WorkerEpoch(0)), holder.address)
        numbers = rng.sample(range(BLOCKS), rng.randint(1, BLOCKS))
        if rng.random() < 0.7:
            numbers.sort()
        who = stale if rng.random() < 0.05 else holder.peer
        handle = self.transport.read(read_request(who, numbers, BLOCK, 3 * S, 300 * MS))
        roll = rng.random()
        if roll < 0.05:
            handle.cancel()
        elif roll < 0.07:
            self.transport.forget(holder.options.key)
        elif roll < 0.08:
            holder.signal(signal.SIGSTOP)
        elif roll < 0.085:
            self.mortal.kill()
        stopped = 0.07 <= roll < 0.08
        progress = handle.wait(5 * S if stopped else 20 * S)
        if stopped and not progress.state.terminal:  # may be, until the holder goes on: see `fabric.PortSet`
            self.fences_waited += 1
            assert self.transport.stats().quarantined_reads == 1
            holder.signal(signal.SIGCONT)
            progress = handle.wait(20 * S)
        assert progress.state.terminal, progress.state
        self.blocks_read += progress.statuses.count(BlockStatus.ARRIVED)
        self.store.segment[:] = POISON
        if stopped:
            holder.signal(signal.SIGCONT)
        elif 0.08 <= roll < 0.085:
            self.epoch += 1
            self.mortal = self.holder("mortal")
        assert (self.store.segment == POISON).all(), "a byte landed after hand-back"

    def whole_read(self) -> None:
        """Everything still works, and nothing is left open."""
        for holder in (self.mortal, self.steady):
            handle = self.transport.read(read_request(holder.peer, range(4), BLOCK, 20 * S, 15 * S))
            assert handle.wait(30 * S).state is ReadState.DONE
            eventually(lambda holder=holder: holder.ask("stats")["leases"] == 0, "no lease is left", 30)
        stats = self.transport.stats()
        assert stats.quarantined_reads == stats.in_flight_bytes == 0
        eventually(lambda: self.transport.stats().endpoints <= 4, "no endpoint is left", 30)


@contextmanager
def soaking(settings: dict[str, str]) -> Iterator[Soak]:
    soak = Soak(settings)
    try:
        yield soak
    finally:
        soak.mortal.kill()
        soak.steady.kill()
        soak.transport.close()


FABRICS = {"shm": {"NET_DEVICES": "lo"}, "tcp": {"TLS": "tcp,self", "NET_DEVICES": "lo"}}
"""Loopback only: what happens to this machine's interfaces in an hour is none of the soak's business."""


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("settings", FABRICS.values(), ids=FABRICS)
def test_random_faults_for_an_hour_leak_nothing(settings: dict[str, str]) -> None:
    with soaking(settings) as soak:
        for _ in range(RECONNECTIONS):
            soak.whole_read()
            soak.transport.forget(soak.steady.options.key)
        for _ in range(WARM_ROUNDS):
            soak.round()
        here, there = counts_of(os.getpid()), counts_of(soak.steady.pid)
        start = reported = time.monotonic()
        while (now := time.monotonic()) < start + SECONDS / 2:
            soak.round()
            if now - reported > REPORT_S:
                reported = now
                print(f"{now - start:.0f} s, {soak.rounds} rounds, {soak.blocks_read} blocks, {soak.epoch} epochs, "
                      f"{soak.fences_waited} fences waited for a stopped holder: ",
                      counts_of(os.getpid()), counts_of(soak.steady.pid), flush=True)  # fmt: skip
            time.sleep(max(0.0, start + soak.blocks_read / PACE_BLOCKS_PER_S - time.monotonic()))
        soak.whole_read()
        counts_of(os.getpid()).refuse_growth_since(here, "reader")
        counts_of(soak.steady.pid).refuse_growth_since(there, "holder")


def test_faults_across_two_network_namespaces_hold_their_bounds() -> None:
    """In a process of its own, because UCX reads the routes once per process."""
    code = (
        "from kvpool.bench import faults as f\n"
        "import sys\n"
        "if not f.namespace.available(): sys.exit(77)\n"
        "with f._namespace() as world:\n"
        "    rows = [f._measure(world, fault, 1) for fault in f.FAULTS if fault.name in "
        "('holder SIGKILL', 'holder SIGSTOP', 'link down without a reset')]\n"
        "bad = [row.name for row in rows if not row.holds]\n"
        "sys.exit('\\n'.join(bad) if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77:
        pytest.skip("needs root, iproute2 and the right to make network namespaces")
    assert done.returncode == 0, done.stderr
