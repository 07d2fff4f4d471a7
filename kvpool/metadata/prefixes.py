"""What a lookup answers: how long a prefix of a chain every worker holds.  (pure)

A prefix that hundreds of workers hold is answered as runs of workers that hold equally much of it: an entry for each of
them would take longer than everything else in a decision. Who needs entries reads the runs as a mapping all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

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
MOST_MEETINGS = 512
"""Of runs of different tiers: with more, most workers differ, and entries are made one by one."""

TierSteps = tuple[Tier, Sequence[tuple[int, int]]]
"""A tier, and the workers, as bits, whose prefix in it or in a faster tier ends behind so many blocks."""


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


def by_tiers(found: Sequence[TierSteps], keys_of: Callable[[int], tuple[WorkerKey, ...]]) -> Prefixes:
    """Prefixes from what was found in each tier, fastest first.

    Args:
        found: of each tier; a worker is in one step of a tier at most.
        keys_of: the workers of some bits.
    """
    meetings = 1
    for _, steps in found:
        meetings *= max(1, len(steps))
    if meetings > MOST_MEETINGS:
        return _one_by_one(found, keys_of)
    runs: list[tuple[dict[Tier, int], int]] = []
    for tier, steps in found:
        runs = _refined(runs, tier, steps)
    return joined([(held, keys_of(bits)) for held, bits in runs])


def _refined(
    runs: Sequence[tuple[dict[Tier, int], int]], tier: Tier, steps: Sequence[tuple[int, int]]
) -> list[tuple[dict[Tier, int], int]]:
    """Runs, told apart by one more tier, which is left out where it adds nothing."""
    made, rest = [], list(runs)
    for blocks, bits in steps:
        missing, left = bits, []
        for held, others in rest:
            both = others & missing
            if both:
                made.append(({**held, tier: blocks} if blocks > max(held.values()) else held, both))
                missing ^= both
            if others != both:
                left.append((held, others ^ both))
        if missing:
            made.append(({tier: blocks}, missing))
        rest = left
    return made + rest


def _one_by_one(
    found: Sequence[TierSteps], keys_of: Callable[[int], tuple[WorkerKey, ...]]
) -> dict[WorkerKey, dict[Tier, int]]:
    result: dict[WorkerKey, dict[Tier, int]] = {}
    for tier, steps in found:
        for blocks, bits in steps:
            for key in keys_of(bits):
                known = result.setdefault(key, {})
                if blocks > max(known.values(), default=0):
                    known[tier] = blocks
    return result


def _entries(runs: Sequence[Run]) -> dict[WorkerKey, dict[Tier, int]]:
    return {key: held for held, keys in runs for key in keys}
