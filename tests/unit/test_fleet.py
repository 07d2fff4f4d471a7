"""How the router's facts about its workers follow their reports."""

from __future__ import annotations

import math

import pytest

from kvpool.reports import WorkerLoad
from kvpool.types import MemberState, Role, Tier
from router.estimators import LinkEstimators, PrefillCurve
from router.fleet import MAX_PRESSURE, ROW_AGE_NS, Fleet
from router.signals import WorkerView
from tests.unit.router_kit import S, key

CURVE = PrefillCurve(1e6, 1e5, 1.0)


def fleet(*idle_s: float) -> Fleet:
    made = Fleet(LinkEstimators())
    for number, idle in enumerate(idle_s):
        made.put(WorkerView(key(number), Role.MIXED, MemberState.ALIVE, "memory", b"", "", None), CURVE)
        load = WorkerLoad(total_blocks=100, empty_blocks=0 if idle else 10, idle_ns=round(idle * S))
        made.set_load(key(number), load, now_ns=S)
    return made


def test_the_cache_that_turns_over_faster_has_the_higher_pressure() -> None:
    assert fleet(60.0, 240.0).settle().pressure.tolist() == pytest.approx([1.6, 0.4])


def test_caches_with_room_feel_no_pressure_and_the_rest_is_bounded() -> None:
    few = fleet(60.0, 0.0)
    assert few.settle().pressure.tolist() == pytest.approx([2.0, 0.0])
    many = fleet(1.0, *([0.0] * 63))
    assert many.settle().pressure[0] == MAX_PRESSURE


def test_pressure_follows_reports_and_members() -> None:
    made = fleet(60.0, 60.0)
    assert made.settle().pressure.tolist() == [1.0, 1.0]
    made.set_load(key(0), WorkerLoad(total_blocks=100, idle_ns=20 * S), now_ns=S)
    assert made.settle().pressure.tolist() == pytest.approx([1.5, 0.5])
    made.remove(key(1))
    assert made.settle().pressure.tolist() == [1.0]


def test_nobody_knows_how_full_a_worker_is_that_does_not_say() -> None:
    made = fleet(60.0)
    made.set_load(key(0), WorkerLoad(), now_ns=S)
    assert made.columns.empty_blocks.tolist() == [math.inf]
    assert made.settle().pressure.tolist() == [1.0]


def test_what_all_have_learned_is_lent_to_members_without_a_curve_of_their_own() -> None:
    made = fleet(1.0, 1.0, 1.0)
    made.set_curve(key(1), CURVE, own=False)
    made.put(WorkerView(key(3), Role.MIXED, MemberState.ALIVE, "memory", b"", "", None), CURVE, own=False)
    made.lend(PrefillCurve(2e6, 2e5, 2.0))
    assert made.columns.token_ns.tolist() == [1e5, 2e5, 1e5, 2e5]
    assert made.fastest().token_ns == 1e5
    made.remove(key(0))  # the others move up
    made.set_curve(key(3), PrefillCurve(3e6, 3e5, 3.0))
    made.lend(PrefillCurve(4e6, 4e5, 4.0))
    assert made.columns.token_ns.tolist() == [4e5, 1e5, 3e5]
    assert made.columns.t0_ns.tolist() == [4e6, 1e6, 3e6]
    made.remove(key(1))
    made.lend(PrefillCurve(5e6, 5e5, 5.0))
    assert made.columns.token_ns.tolist() == [1e5, 3e5]


def test_a_row_says_of_every_link_what_its_curve_says() -> None:
    links = LinkEstimators(max_links=6)
    made = Fleet(links)
    for number, epoch in ((0, 1), (1, 1), (2, 1), (3, 1), (2, 2)):  # the third is there twice for a moment
        made.put(WorkerView(key(number, epoch), Role.MIXED, MemberState.ALIVE), CURVE)
    holder = key(0).worker_id
    for turn, reader in enumerate((1, 2, 3, 1, 2)):  # of tier after tier, so that the oldest links are forgotten
        tier = Tier(turn % 3)
        links.observe((holder, key(reader).worker_id, tier), 1_000_000, 2_000_000 * (turn + 1), turn * S)
        links.observe((key(3).worker_id, holder, tier), 1_000_000, 1_000_000, turn * S)
        made.links_changed(holder)
        for now_ns in (turn * S, (turn + 100) * S):  # fresh, and faded
            for asked in Tier:
                row = made.row(holder, asked, now_ns)
                curves = [made.curve(holder, view.key.worker_id, asked, now_ns) for view in made.workers]
                assert row.tolist() == [[c.alpha_ns for c in curves], [c.byte_ns for c in curves]]
            made.links_changed(holder)


def test_the_columns_say_until_when_what_is_kept_of_links_counts() -> None:
    made, until_ns = fleet(1.0, 1.0), 5 * S + ROW_AGE_NS

    def kept() -> list[list[float]]:
        for tier in (Tier.HOST, Tier.DISK):
            made.row(key(1).worker_id, tier, 5 * S)
        return made.columns.linked_ns.tolist()  # type: ignore[no-any-return]

    assert made.columns.linked_ns.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert kept() == [[0.0, 0.0], [0.0, until_ns]]
    made.row(key(1).worker_id, Tier.HOST, until_ns - 1)
    assert made.columns.linked_ns[Tier.HOST, 1] == until_ns
    made.row(key(1).worker_id, Tier.HOST, until_ns)
    assert made.columns.linked_ns[Tier.HOST, 1] == until_ns + ROW_AGE_NS
    made.links_changed(key(0).worker_id)
    assert made.columns.linked_ns.any()
    for change in (
        lambda: made.links_changed(key(1).worker_id),
        lambda: made.use_links(LinkEstimators()),
        lambda: made.put(WorkerView(key(2), Role.MIXED, MemberState.ALIVE), CURVE),
        lambda: made.remove(key(0)),
    ):
        kept()
        change()
        assert not made.columns.linked_ns.any()
