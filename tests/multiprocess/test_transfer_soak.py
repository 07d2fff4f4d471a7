"""Hours of random faults in minutes of attention: nothing may grow.

``KVPOOL_SOAK_SECONDS`` sets the length (an hour without it); run with ``pytest -m soak``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvpool.bench.peer import POISON, GeneratedStore, PeerOptions, PeerProcess, read_request
from kvpool.transport.base import BlockStatus, Peer, ReadState
from kvpool.types import WorkerEpoch, WorkerKey
from tests.contract.transport_rig import MS, S

BLOCK = 64 * 1024
BLOCKS = 256
WARM_ROUNDS = 50
SECONDS = float(os.environ.get("KVPOOL_SOAK_SECONDS", "3600"))
GROWTH_MIB = 96  # eight UCX workers of 4 MiB may come after the baseline, and what the allocator keeps
GROWTH_FDS = 128  # and a dozen descriptors each


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def counts() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("settings", [{}, {"TLS": "tcp,self"}], ids=["shm", "tcp"])
def test_random_faults_for_an_hour_leak_nothing(settings: dict[str, str]) -> None:
    rng = random.Random(20240501)
    options = PeerOptions("reader", blocks=BLOCKS, block_bytes=BLOCK, filled=False, settings=settings)
    theirs = PeerOptions("holder", blocks=BLOCKS, block_bytes=BLOCK, settings=settings)
    store, transport = GeneratedStore(options), options.transport()
    transport.start(options.key, store.arena.memory, BLOCK, store)
    end = time.monotonic() + SECONDS / 2
    blocks_read = rounds = 0
    baseline: tuple[float, tuple[int, int]] | None = None
    epoch = 1
    peer = PeerProcess(theirs)
    try:
        while time.monotonic() < end or rounds <= WARM_ROUNDS:
            rounds += 1
            who = (
                peer.peer
                if rng.random() < 0.95
                else Peer(WorkerKey(peer.options.key.worker_id, WorkerEpoch(0)), peer.address)
            )
            numbers = rng.sample(range(BLOCKS), rng.randint(1, BLOCKS))
            handle = transport.read(read_request(who, sorted(numbers), BLOCK, 3 * S, 300 * MS))
            roll = rng.random()
            if roll < 0.05:
                handle.cancel()
            elif roll < 0.07:
                transport.forget(peer.options.key)
            elif roll < 0.08:
                peer.signal(signal.SIGSTOP)
            elif roll < 0.09:
                peer.kill()
            progress = handle.wait(20 * S)
            assert progress.state.terminal, progress.state
            blocks_read += progress.statuses.count(BlockStatus.ARRIVED)
            store.segment[:] = POISON
            if roll >= 0.08 and roll < 0.09:
                epoch += 1
                peer = PeerProcess(PeerOptions("holder", epoch, BLOCKS, BLOCK, settings=settings))
            elif roll >= 0.07:
                peer.signal(signal.SIGCONT)
            assert (store.segment == POISON).all(), "a byte landed after hand-back"
            if rounds == WARM_ROUNDS:
                baseline = (rss_mib(), counts())
        assert baseline is not None
        assert transport.read(read_request(peer.peer, range(4), BLOCK, 3 * S, S)).wait(20 * S).state is ReadState.DONE
        memory_mib, (fds, threads) = baseline
        now_fds, now_threads = counts()
        assert rss_mib() - memory_mib < GROWTH_MIB, (
            f"memory grew from {memory_mib} to {rss_mib()} MiB in {rounds} rounds"
        )
        assert now_fds <= fds + GROWTH_FDS, f"file descriptors grew from {fds} to {now_fds}"
        assert now_threads <= threads
        assert transport.stats().quarantined_reads == 0
        print(f"{rounds} rounds, {blocks_read} blocks, {memory_mib:.0f} → {rss_mib():.0f} MiB, fds {fds} → {now_fds}")
    finally:
        peer.kill()
        transport.close()


def test_faults_across_two_network_namespaces_hold_their_bounds() -> None:
    """In a process of its own, because UCX reads the routes once per process."""
    code = (
        "from kvpool.bench import faults as f\n"
        "import sys\n"
        "if not f._can_make_namespaces(): sys.exit(77)\n"
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
