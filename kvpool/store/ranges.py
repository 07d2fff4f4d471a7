"""Free block ids as maximal runs, so that a chain can get neighbours.  (pure)

Neighbouring blocks travel as one message. Not a pool: it knows only which ids are free. Invariants: runs are
disjoint, never touch each other, and their lengths sum to ``len(self)``. Every operation is O(log distinct lengths)
plus the ids it hands out.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeRanges:
    """The free ids of ``[0, total)``; all are free at first."""

    def __init__(self, total: int) -> None:
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._starts_by_length: dict[int, dict[int, None]] = {}  # a dict keeps insertion order: repeatable choices
        self._lengths: list[int] = []
        self._count = 0
        if total:
            self._add(0, total)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block_id: int) -> bool:
        return any(start <= block_id < stop for start, stop in self._stop_of.items())

    def runs(self) -> list[tuple[int, int]]:
        """All maximal free runs ``[start, stop)``, sorted."""
        return sorted(self._stop_of.items())

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Hand out ``count`` ids, in as few runs as a greedy choice gives.

        Args:
            count: how many; the caller has checked that so many are free.
            after: prefer the ids right behind this one, so that a growing chain stays contiguous.
        """
        taken: list[int] = []
        if after is not None and after + 1 in self._stop_of:
            taken += self._carve(after + 1, count)
        while len(taken) < count:
            taken += self._carve(self._best_start(count - len(taken)), count - len(taken))
        return taken

    def give(self, block_id: int) -> None:
        """Take one id back and join it with its neighbours."""
        start = self._start_of.get(block_id, block_id)
        stop = self._stop_of.get(block_id + 1, block_id + 1)
        if start < block_id:
            self._remove(start)
        if stop > block_id + 1:
            self._remove(block_id + 1)
        self._add(start, stop)

    def _best_start(self, count: int) -> int:
        """The shortest run that fits ``count``, otherwise the longest there is."""
        at = bisect_left(self._lengths, count)
        length = self._lengths[at] if at < len(self._lengths) else self._lengths[-1]
        return next(iter(self._starts_by_length[length]))

    def _carve(self, start: int, count: int) -> list[int]:
        stop = self._stop_of[start]
        end = min(stop, start + count)
        self._remove(start)
        if end < stop:
            self._add(end, stop)
        return list(range(start, end))

    def _add(self, start: int, stop: int) -> None:
        length = stop - start
        self._stop_of[start] = stop
        self._start_of[stop] = start
        if length not in self._starts_by_length:
            self._starts_by_length[length] = {}
            insort(self._lengths, length)
        self._starts_by_length[length][start] = None
        self._count += length

    def _remove(self, start: int) -> None:
        stop = self._stop_of.pop(start)
        del self._start_of[stop]
        length = stop - start
        starts = self._starts_by_length[length]
        del starts[start]
        if not starts:
            del self._starts_by_length[length]
            self._lengths.pop(bisect_left(self._lengths, length))
        self._count -= length
