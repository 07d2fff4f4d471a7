"""The waiting room against a list that is searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.types import RequestId
from router.waiting import GRACE_NS, Hold, Turn, WaitingRoom, poll_ns

SETTINGS = settings(max_examples=100, deadline=None)
names = st.integers(0, 99).map(lambda number: RequestId(f"r{number}"))
turns = st.builds(Turn, st.integers(-9, 9).map(float), st.integers(0, 9).map(float), st.integers(0, 3))
steps = st.tuples(
    names, st.sampled_from(["enter", "enter", "enter", "leave", "pass"]), st.none() | turns, st.integers()
)
Step = tuple[RequestId, str, Turn | None, int]


@dataclass
class Naive:
    """Everybody's turn, the priority to which others yield, and when it has given up."""

    rows: dict[RequestId, tuple[Turn | None, int | None, int]] = field(default_factory=dict)

    def ahead(self, name: RequestId, turn: Turn) -> tuple[int, float, float]:
        others = [row[0] for other, row in self.rows.items() if other != name and row[0] is not None]
        before = [other for other in others if other.due_ns < turn.due_ns]
        same = sum(other.work_ns for other in before if other.position == turn.position)
        return len(before), sum(other.work_ns for other in before), same


@SETTINGS
@given(st.lists(steps, max_size=200), turns)
def test_the_room_says_of_everybody_what_a_list_would_say(script: list[Step], asked: Turn) -> None:
    room, naive, now_ns = WaitingRoom(), Naive(), 0
    for name, action, turn, number in script:
        if action == "enter":
            blocking = number % 3 if number % 2 else None
            room.enter(name, now_ns, now_ns + number % 7, turn, blocking)
            naive.rows[name] = turn, blocking, now_ns + number % 7 + GRACE_NS
        elif action == "leave":
            room.leave(name)
            naive.rows.pop(name, None)
        else:
            now_ns += GRACE_NS // 2
            room.expire(now_ns)
            naive.rows = {other: row for other, row in naive.rows.items() if row[2] > now_ns}
        assert len(room) == len(naive.rows)
        assert (name in room) == (name in naive.rows)
        assert room.ahead(name, asked) == naive.ahead(name, asked)
        for priority in range(-1, 3):
            assert room.outranks(priority) == any(
                row[1] is not None and row[1] > priority for row in naive.rows.values()
            )


@SETTINGS
@given(st.floats(0, 1e18), st.floats(0, 1e13), st.integers(-100, 100), st.floats(0, 1e18), st.integers(-100, 100))
def test_nobody_is_passed_by_those_who_come_a_minute_and_twice_its_prefill_later(
    arrival_ns: float, prefill_ns: float, priority: int, later_ns: float, other: int
) -> None:
    hold = Hold()
    due_ns = hold.due_ns(arrival_ns, prefill_ns, priority)
    assert due_ns <= hold.due_ns(arrival_ns + 60e9 + hold.age * prefill_ns + later_ns, 0.0, other)


@SETTINGS
@given(st.floats(0, allow_nan=False))
def test_who_waits_comes_back_in_time_however_long_it_is(wait_ns: float) -> None:
    assert 0 < poll_ns(wait_ns) <= max(wait_ns, 1e8)
