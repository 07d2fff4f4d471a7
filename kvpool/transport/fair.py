"""Whose blocks move next: shares the windows of the links and of the process between reads.  (pure)

Reads take turns. A turn belongs to the most urgent read, the one whose request is nearest to its first token; every
`OLDEST_EVERY`-th belongs to the one that was asked for longest ago. So an urgent read leaves a quarter of the
bandwidth to others at most, and no read starves, however many urgent ones come: the oldest always gets its quarter.
Links take turns in the process's window by the same rule.

Windows bound what is in flight; a run longer than a window goes when nothing else is in it. Whoever has the turn and
does not fit keeps it: nobody overtakes, or long runs would wait for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

OLDEST_EVERY = 4
TURN_BYTES = 8 << 20


class Ranked(Protocol):
    """Something that waits for its turn."""

    @property
    def urgency_ns(self) -> int:
        """Lower goes first."""

    @property
    def sequence(self) -> int:
        """Order of arrival; unique."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A part of a read that has runs to move.

    Attributes:
        lane: the link they go over.
        run_bytes: lengths of all its runs, in order.
        first: the first one that has not moved yet.
    """

    lane: int
    urgency_ns: int
    sequence: int
    run_bytes: Sequence[int]
    first: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """What a window may still take.

    Attributes:
        free_bytes, free_runs: until it is full.
        empty: nothing is in it; then any one run fits.
        turns: taken in it so far, from `Shares`.
    """

    free_bytes: int
    free_runs: int
    empty: bool
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Shares:
    """What moves now.

    Attributes:
        turns: index of the claim and how many more of its runs, in the order in which they go.
        lanes, process: the windows afterwards.
    """

    turns: tuple[tuple[int, int], ...]
    lanes: Mapping[int, Room]
    process: Room


def pick(waiting: Sequence[Ranked], turn: int) -> int:
    """Index of the one that has this turn."""
    if turn % OLDEST_EVERY == OLDEST_EVERY - 1:
        return min(range(len(waiting)), key=lambda index: waiting[index].sequence)
    return min(range(len(waiting)), key=lambda index: (waiting[index].urgency_ns, waiting[index].sequence))


def share(claims: Sequence[Claim], lanes: Mapping[int, Room], process: Room) -> Shares:
    """Give out turns until whoever has the turn fits no more."""
    lanes = dict(lanes)
    waiting: dict[int, list[int]] = {}
    for index, claim in enumerate(claims):
        waiting.setdefault(claim.lane, []).append(index)
    first = [claim.first for claim in claims]
    turns: list[tuple[int, int]] = []
    while waiting:
        heads = [members[pick([claims[at] for at in members], lanes[lane].turns)] for lane, members in waiting.items()]
        index = heads[pick([claims[head] for head in heads], process.turns)]
        lane, run_bytes = claims[index].lane, claims[index].run_bytes
        runs = _fitting(run_bytes, first[index], lanes[lane], process)
        if not runs and not _fitting(run_bytes, first[index], process, process):
            break
        if not runs:
            del waiting[lane]
            continue
        size = sum(run_bytes[first[index] : first[index] + runs])
        lanes[lane], process = _filled(lanes[lane], runs, size), _filled(process, runs, size)
        turns.append((index, runs))
        first[index] += runs
        if first[index] == len(run_bytes):
            waiting[lane].remove(index)
            if not waiting[lane]:
                del waiting[lane]
    return Shares(tuple(turns), lanes, process)


def _fitting(run_bytes: Sequence[int], first: int, lane: Room, process: Room) -> int:
    """How many runs, from ``first`` on, may move in one turn."""
    room_bytes = min(lane.free_bytes, process.free_bytes, TURN_BYTES)
    stop = min(len(run_bytes), first + lane.free_runs, first + process.free_runs)
    size = 0
    for at in range(first, stop):
        size += run_bytes[at]
        if size > room_bytes:
            # One run may be longer than a turn, and longer than a window that is empty.
            alone = at == first and all(room.empty or size <= room.free_bytes for room in (lane, process))
            return 1 if alone else at - first
    return max(0, stop - first)


def _filled(room: Room, runs: int, size_bytes: int) -> Room:
    return Room(room.free_bytes - size_bytes, room.free_runs - runs, False, room.turns + 1)
