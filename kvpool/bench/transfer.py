"""The data plane against the machine: a verified load between two processes beside memcpy and a plain socket.

Every figure is a batch of 128 MiB of blocks that are neighbours in both segments, as the range allocator lays chains
out, checksum and identity verified; one row shows blocks scattered over both. memcpy copies the same bytes inside one
process; the socket receives them with ``recv_into`` and verifies nothing. Runs are interleaved.
"""

from __future__ import annotations

import random
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvpool.bench import compression
from kvpool.bench.metadata_peers import PeerScript
from kvpool.bench.peer import (
    SOCKET_BUFFER_BYTES,
    BusyLoop,
    GeneratedStore,
    PeerOptions,
    PeerProcess,
    read_request,
)
from kvpool.bench.report import Row, interleave, skipped, spread
from kvpool.errors import TransferError, UnavailableError
from kvpool.store.arena import Arena
from kvpool.transport.base import ReadRequest, ReadState
from kvpool.transport.ucx import UcxTransport

KIB, MIB = 1 << 10, 1 << 20
BATCH_BYTES = 128 * MIB
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
FABRICS = {"same host": {}, "tcp loopback": {"TLS": "tcp,self"}}
MEMCPY_BARS = {64 * KIB: 0.35, MIB: 0.6}
SOCKET_BARS = {MIB: 0.7}
PEERS: tuple[tuple[str, str, str, dict[int, float]], ...] = (
    ("mooncake", "Mooncake Store batch_get_into", "tcp loopback", {64 * KIB: 1.3, MIB: 1.5}),
    ("nixl", "NIXL READ", "same host", {}),
    ("nixl", "NIXL READ", "tcp loopback", {}),
)
"""Package, what of it, fabric, bars by block size."""

PEER_FABRICS = {"same host": "host", "tcp loopback": "tcp"}
PEER_SCRIPT = Path(__file__).with_name("transfer_peer_script.py")
BUSY_BAR = 0.5
IDLE_CORE_SHARE = 0.02
LIMIT_NS = 60_000_000_000


def run(*, quick: bool, peers: bool) -> list[Row]:
    """Measure; about 80 s, with ``quick`` about 30 s."""
    runs = 5 if quick else 9
    sizes = (64 * KIB, MIB) if quick else SIZES
    rows: list[Row] = []
    for fabric in FABRICS:
        for block_bytes in sizes:
            with _pair(fabric, block_bytes) as pair:
                rows += _speed(pair, fabric, runs)
    with _pair("same host", 64 * KIB) as pair:
        rows.append(_scattered(pair, runs))
    for fabric in FABRICS:
        with _pair(fabric, MIB) as pair:
            rows.append(_busy(pair, fabric, runs))
    with _pair("same host", MIB) as pair:
        rows.append(_idle(pair, 2.0 if quick else 5.0))
    rows += compression.run(quick=quick, peers=peers)
    if peers:
        rows += _other_libraries(runs, sizes)
    return rows


@dataclass(slots=True)
class _Pair:
    """A holder process and this process's reader."""

    holder: PeerProcess
    transport: UcxTransport
    store: GeneratedStore
    block_bytes: int
    request: ReadRequest = field(init=False)

    def __post_init__(self) -> None:
        self.request = self.request_into(range(self.blocks))

    def request_into(self, slots: Sequence[int]) -> ReadRequest:
        """All blocks into these pages."""
        numbers = range(self.blocks)
        return read_request(self.holder.peer, numbers, self.block_bytes, LIMIT_NS, LIMIT_NS, slots)

    @property
    def blocks(self) -> int:
        return BATCH_BYTES // self.block_bytes

    def load(self, request: ReadRequest | None = None) -> None:
        """One verified batch. Like the other libraries ours gets its names and places ready-made."""
        progress = self.transport.read(request or self.request).wait(LIMIT_NS)
        if progress.state is not ReadState.DONE or progress.bytes_arrived != BATCH_BYTES:
            raise TransferError("a benchmark load did not arrive whole", state=progress.state.value)


@contextmanager
def _pair(fabric: str, block_bytes: int) -> Iterator[_Pair]:
    options = PeerOptions(blocks=BATCH_BYTES // block_bytes, block_bytes=block_bytes, settings=FABRICS[fabric])
    mine = PeerOptions("reader", 1, options.blocks, block_bytes, filled=False, settings=options.settings)
    with PeerProcess(options) as holder:
        store, transport = GeneratedStore(mine), mine.transport()
        transport.start(mine.key, store.arena.memory, block_bytes, store)
        try:
            yield _Pair(holder, transport, store, block_bytes)
        finally:
            transport.close()


def _speed(pair: _Pair, fabric: str, runs: int) -> list[Row]:
    label = f"{fabric}, {_size(pair.block_bytes)} blocks"
    reference, bar, name = _reference(pair, fabric)
    cpu_before, holder_before = time.process_time(), pair.holder.ask("stats")["cpu_s"]
    ours_s, theirs_s = interleave([pair.load, reference], runs=runs)
    cpu_s = time.process_time() - cpu_before - sum(theirs_s)
    holder_cpu_s = pair.holder.ask("stats")["cpu_s"] - holder_before
    moved_gb = BATCH_BYTES * (runs + 1) / 1e9
    ours, theirs = _rates(ours_s), _rates(theirs_s)
    speed = Row(label, statistics.median(ours), statistics.median(theirs), "GB/s", name, bar, True, runs, spread(ours))
    if name != "memcpy":
        return [speed]  # the socket's CPU time is in both processes; only the same-host figure is clean
    cost = Row(f"{label}: CPU of both ends", max(cpu_s, 0.0) / moved_gb + holder_cpu_s / moved_gb, None, "s/GB")
    return [speed, cost]


def _reference(pair: _Pair, fabric: str) -> tuple[Callable[[], None], float | None, str]:
    if fabric == "same host":
        return _memcpy(pair.store), MEMCPY_BARS.get(pair.block_bytes), "memcpy"
    return _plain_socket(pair), SOCKET_BARS.get(pair.block_bytes), "plain socket"


def _memcpy(store: GeneratedStore) -> Callable[[], None]:
    source = np.frombuffer(Arena(BATCH_BYTES).memory, dtype=np.uint8)

    def copy() -> None:
        store.segment[:] = source

    return copy


def _plain_socket(pair: _Pair) -> Callable[[], None]:
    port = int(pair.holder.ask("socket")["port"])
    connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_NS / 1e9)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    target = pair.store.arena.memory

    def receive() -> None:
        connection.sendall(BATCH_BYTES.to_bytes(8, "little"))
        at = 0
        while at < BATCH_BYTES:
            at += connection.recv_into(target[at:], min(pair.block_bytes, BATCH_BYTES - at))

    return receive


def _scattered(pair: _Pair, runs: int) -> Row:
    slots = list(range(pair.blocks))
    random.Random(1).shuffle(slots)
    request = pair.request_into(slots)
    ours_s, theirs_s = interleave([lambda: pair.load(request), _memcpy(pair.store)], runs=runs)
    ours, theirs = _rates(ours_s), _rates(theirs_s)
    label = f"same host, {_size(pair.block_bytes)} blocks, scattered"
    return Row(
        label, statistics.median(ours), statistics.median(theirs), "GB/s", "memcpy", None, True, runs, spread(ours)
    )


def _busy(pair: _Pair, fabric: str, runs: int) -> Row:
    """Against its own idle figure, while both processes run a torch loop."""
    mine = BusyLoop()

    def busy(on: bool) -> None:
        mine.set(on)
        pair.holder.ask("busy", on=on)

    pair.load()
    busy_s, idle_s = [], []
    for _ in range(runs):
        busy(True)
        busy_s.append(_timed(pair.load))
        busy(False)
        idle_s.append(_timed(pair.load))
    ours, theirs = _rates(busy_s), _rates(idle_s)
    label = f"{fabric}, {_size(pair.block_bytes)} blocks, torch loop on both sides"
    return Row(
        label,
        statistics.median(ours),
        statistics.median(theirs),
        "GB/s",
        "itself idle",
        BUSY_BAR,
        True,
        runs,
        spread(ours),
    )


def _idle(pair: _Pair, seconds: float) -> Row:
    """CPU of an idle worker that has a connection, as a share of one core."""
    pair.load()
    before = pair.holder.ask("stats")["cpu_s"]
    time.sleep(seconds)
    share = (pair.holder.ask("stats")["cpu_s"] - before) / seconds
    return Row(
        "idle transfer thread", share, IDLE_CORE_SHARE, "of a core", "limit", 1.0, higher_is_better=False, runs=1
    )


def _other_libraries(runs: int, sizes: Sequence[int]) -> list[Row]:
    """Beside the libraries others use, installed elsewhere; see `kvpool.bench.metadata_peers`."""
    rows = []
    for package, name, fabric, bars in PEERS:
        for block_bytes in sizes:
            label = f"{fabric}, {_size(block_bytes)} blocks, beside {name}"
            try:
                rows.append(_beside(package, name, fabric, block_bytes, bars.get(block_bytes), runs, label))
            except UnavailableError as error:
                rows.append(skipped(label, name, str(error)))
    return rows


def _beside(package: str, name: str, fabric: str, block_bytes: int, bar: float | None, runs: int, label: str) -> Row:
    """Half of our runs before the peer's and half after: some peers poll all the time and would take our cores."""
    with _pair(fabric, block_bytes) as pair:
        pair.load()
        ours_s = [_timed(pair.load) for _ in range(runs // 2 + 1)]
        with PeerScript(package, block_bytes, pair.blocks, PEER_FABRICS[fabric], script=PEER_SCRIPT) as peer:
            theirs_s = [peer.ask("load") for _ in range(runs)]
        ours_s += [_timed(pair.load) for _ in range(runs // 2)]
    ours, theirs = _rates(ours_s), _rates(theirs_s)
    return Row(label, statistics.median(ours), statistics.median(theirs), "GB/s", name, bar, True, runs, spread(ours))


def _timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _rates(seconds: Sequence[float]) -> list[float]:
    return [BATCH_BYTES / taken / 1e9 for taken in seconds]


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"
