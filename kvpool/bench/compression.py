"""Compressed frames against raw runs: goodput over a slow link, where they must pay, and a fast one, where they must be
off.

Three processes: a holder of bf16 blocks that look like KV, a reader with the switch and one without; reads interleave.
The links are a veth pair into a network namespace whose rate is limited, and the loopback.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvpool.bench import namespace
from kvpool.bench.peer import PeerOptions, PeerProcess
from kvpool.bench.report import Row, interleave, skipped, spread
from kvpool.errors import TransferError
from kvpool.transport.ucx.settings import Compression

BLOCK_BYTES = 256 << 10
BATCH_BYTES = 32 << 20
RATES_MBIT = {1000: 1.2, 2000: None, 5000: 0.97}
"""Links, and what the switch must reach of raw: on the last one frames would lose."""

LOOPBACK = {"TLS": "tcp,self"}


def run(*, quick: bool, peers: bool) -> list[Row]:
    """Measure; about 20 s, with ``quick`` about 10 s."""
    del peers
    runs = 5 if quick else 9
    rows: list[Row] = []
    if namespace.available():
        with namespace.second_host(), _readers(namespace.OURS, namespace.THEIRS, namespace.INSIDE) as readers:
            for rate_mbit, bar in RATES_MBIT.items():
                with namespace.slowed(rate_mbit, burst_kb=1024):
                    rows += _compare(f"{rate_mbit / 1000:g} Gbit/s link", readers, runs, bar)
    else:
        rows += [
            skipped(f"{rate / 1000:g} Gbit/s link: frames by switch", "raw", namespace.WHY_NOT) for rate in RATES_MBIT
        ]
    with _readers(LOOPBACK, LOOPBACK) as readers:
        rows += _compare("tcp loopback", readers, 5 * runs, None)  # as fast as it happens to be: no bar
    return rows


@contextlib.contextmanager
def _readers(
    ours: Mapping[str, str], theirs: Mapping[str, str], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[_Reader, _Reader]]:
    """A reader with the switch, and one without."""
    holder = PeerOptions("holder", 1, BATCH_BYTES // BLOCK_BYTES, BLOCK_BYTES, settings=theirs, kv_like=True)
    mine = replace(holder, worker_id="switch", filled=False, settings=ours)
    raw = replace(mine, worker_id="raw", compression=Compression.OFF.value)
    with PeerProcess(holder, prefix) as source, PeerProcess(mine) as first, PeerProcess(raw) as second:
        yield _Reader(first, source), _Reader(second, source)


class _Reader:
    """A reader process that loads everything from the holder, again and again."""

    def __init__(self, process: PeerProcess, holder: PeerProcess) -> None:
        self._process = process
        key = holder.options.key
        self._read = {"holder": key.worker_id, "epoch": key.worker_epoch, "address": holder.address.hex()}
        self._numbers = list(range(holder.options.blocks))

    def load(self) -> None:
        """One verified batch."""
        answer = self._process.ask("read", **self._read, numbers=self._numbers, wait=True)
        if answer["bytes"] != BATCH_BYTES:
            raise TransferError("a benchmark load did not arrive whole", state=answer["state"])

    def stats(self) -> dict[str, Any]:
        """Counters of its transport."""
        return self._process.ask("stats")


def _compare(link: str, readers: tuple[_Reader, _Reader], runs: int, bar: float | None) -> list[Row]:
    switched, raw = readers
    before = switched.stats()
    ours_s, theirs_s = interleave([switched.load, raw.load], runs=runs)
    after = switched.stats()
    ours, theirs = _rates(ours_s), _rates(theirs_s)
    speed = Row(
        f"{link}, bf16 blocks: frames by switch",
        statistics.median(ours),
        statistics.median(theirs),
        "GB/s",
        "raw",
        bar,
        True,
        runs,
        spread(ours),
    )
    moved = BATCH_BYTES * (runs + 1)
    saved, unpacking = ((after[name] - before[name]) / moved for name in ("bytes_saved", "decode_ns"))
    return [
        speed,
        Row(f"{link}: bytes not sent", saved, None, "of all", runs=runs),
        Row(f"{link}: unpacking at the reader", unpacking, None, "s/GB", runs=runs),
    ]


def _rates(seconds: list[float]) -> list[float]:
    return [BATCH_BYTES / taken / 1e9 for taken in seconds]
