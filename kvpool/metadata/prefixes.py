"""What a lookup answers: how long a prefix of a chain every worker holds.  (pure)

A prefix that hundreds of workers hold is answered as runs of workers that hold equally much of it: an entry for each of
them would take longer than everything else in a decision. Who needs entries reads the runs as a mapping all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvpool.types import Tier, WorkerKey

Prefixes = Mapping[WorkerKey, dict[Tier, int]]
"""Per worker: leading blocks held in this tier *or a faster one*; tiers that add nothing are left out.

``{DEVICE: 50, HOST: 80}`` is a prefix of 80 blocks of which the first 50 are on the device. The longest prefix is the
largest value. Workers without the first block do not appear. Equal workers may share their value: do not write it.
"""

Run = tuple[dict[Tier, int], tuple[WorkerKey, ...]]
"""What each of these workers holds. A worker is in one run only."""

FEW_HOLDERS = 64
LEAST_RUN = 8
"""Mean length of runs from which on entries are not made."""


class PrefixRuns(Mapping[WorkerKey, dict[Tier, int]]):
    """Prefixes of many workers. Entries are made when somebody asks for one.

    Attributes:
        runs: never written again; the same workers are mostly the same object as in the answer before.
    """

    __slots__ = ("_entries", "runs")

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self._entries: dict[WorkerKey, dict[Tier, int]] | None = None

    def __getitem__(self, key: WorkerKey) -> dict[Tier, int]:
        return self._all()[key]

    def __iter__(self) -> Iterator[WorkerKey]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[WorkerKey, dict[Tier, int]]:
        if self._entries is None:
            self._entries = _entries(self.runs)
        return self._entries


def joined(runs: Sequence[Run]) -> Prefixes:
    """Prefixes from runs, by entries where that is no more work."""
    holders = 0
    for _, keys in runs:
        holders += len(keys)
    return PrefixRuns(runs) if holders > FEW_HOLDERS and holders >= LEAST_RUN * len(runs) else _entries(runs)


def _entries(runs: Sequence[Run]) -> dict[WorkerKey, dict[Tier, int]]:
    return {key: held for held, keys in runs for key in keys}
