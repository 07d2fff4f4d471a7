"""The load machine, one case per rule."""

from __future__ import annotations

import pytest

from kvpool.errors import InvariantViolation
from kvpool.transfer.machine import (
    Begin,
    Cancel,
    CancelRead,
    Ended,
    Event,
    Finish,
    Instruction,
    LoadMachine,
    LoadState,
    Outcome,
    PagesFree,
    PagesUsable,
    Settled,
    Slice,
    Source,
    StartRead,
    Suspect,
    Tick,
)
from kvpool.types import WorkerEpoch, WorkerId, WorkerKey

DEADLINE = 1_000


def source(name: str, stop: int) -> Source:
    return Source(WorkerKey(WorkerId(name), WorkerEpoch(1)), name.encode(), "memory", stop)


def arrived(*indices: int) -> dict[int, Outcome]:
    return dict.fromkeys(indices, Outcome.ARRIVED)


def machine(*slices: Slice, wanted: tuple[int, ...] | None = None) -> LoadMachine:
    every = tuple(index for part in slices for index in part.indices)
    return LoadMachine(every if wanted is None else wanted, slices, DEADLINE)


def run(load: LoadMachine, *events: Event, now_ns: int = 0) -> list[Instruction]:
    return [instruction for event in events for instruction in load.handle(event, now_ns)]


A, B = source("a", 4), source("b", 2)


def test_every_block_that_arrives_makes_the_load_verified() -> None:
    load = machine(Slice((0, 1, 2), (A,)))
    assert run(load, Begin()) == [StartRead(1, A, (0, 1, 2), DEADLINE)]
    assert load.state is LoadState.LEASED
    assert run(load, Settled(1, arrived(0))) == [PagesUsable((0,))]
    assert load.state is LoadState.IN_FLIGHT
    assert run(load, Ended(1, arrived(1, 2), None)) == [PagesUsable((1, 2)), Finish(LoadState.VERIFIED)]
    assert load.failures == []


def test_slices_are_read_from_their_holders_at_once() -> None:
    load = machine(Slice((0, 1), (B,)), Slice((2, 3), (A,)))
    assert [item.source for item in run(load, Begin()) if isinstance(item, StartRead)] == [B, A]


def test_blocks_that_no_slice_covers_are_free_at_once() -> None:
    load = machine(Slice((0,), (A,)), wanted=(0, 7))
    assert PagesFree((7,)) in run(load, Begin())


def test_only_wanted_blocks_are_read() -> None:
    load = machine(Slice((0, 1, 2), (A,)), wanted=(1,))
    assert run(load, Begin()) == [StartRead(1, A, (1,), DEADLINE)]


def test_a_load_of_nothing_is_verified_at_once() -> None:
    assert run(machine(), Begin()) == [Finish(LoadState.VERIFIED)]


def test_what_failed_is_asked_of_the_next_source_inside_the_same_deadline() -> None:
    load = machine(Slice((0, 1), (A, B)))
    run(load, Begin())
    out = load.handle(Ended(1, arrived(0), "peer_gone", blames_holder=True), 400)
    assert out == [PagesUsable((0,)), Suspect(A.holder, "peer_gone"), StartRead(2, B, (1,), DEADLINE - 400)]
    assert run(load, Ended(2, arrived(1), None)) == [PagesUsable((1,)), Finish(LoadState.VERIFIED)]
    assert load.failures == ["peer_gone"]


def test_a_source_is_not_asked_for_blocks_beyond_its_stop() -> None:
    load = machine(Slice((0, 1, 2, 3), (A, B)))
    run(load, Begin())
    out = run(load, Ended(1, {}, "peer_gone"))
    assert out == [StartRead(2, B, (0, 1), DEADLINE), PagesFree((2, 3))]


def test_a_missing_block_is_a_stale_failure_and_blames_nobody() -> None:
    load = machine(Slice((0, 1), (A,)))
    run(load, Begin())
    out = run(load, Ended(1, {0: Outcome.ARRIVED, 1: Outcome.MISSING}, None))
    assert out == [PagesUsable((0,)), PagesFree((1,)), Finish(LoadState.FAILED)]
    assert load.failures == ["stale"]
    assert load.front_blocks == 1


def test_pages_stay_in_use_after_cancel_until_their_read_ended() -> None:
    load = machine(Slice((0, 1), (A, B)))
    run(load, Begin())
    assert run(load, Cancel()) == [CancelRead(1)]
    assert load.state is LoadState.CANCELLING
    assert run(load, Cancel()) == []
    assert run(load, Settled(1, arrived(0))) == [PagesUsable((0,))]
    assert run(load, Ended(1, {}, "cancelled")) == [PagesFree((1,)), Finish(LoadState.FAILED)]
    assert load.failures == ["cancelled"]


def test_cancel_before_the_start_frees_everything() -> None:
    load = machine(Slice((0, 1), (A,)))
    assert run(load, Cancel()) == [PagesFree((0, 1)), Finish(LoadState.FAILED)]


def test_no_read_starts_after_the_deadline() -> None:
    load = machine(Slice((0, 1), (A, B)))
    run(load, Begin())
    out = load.handle(Ended(1, {}, "stall", blames_holder=True), DEADLINE)
    assert out == [Suspect(A.holder, "stall"), PagesFree((0, 1)), Finish(LoadState.FAILED)]


def test_the_deadline_cancels_what_is_still_open() -> None:
    load = machine(Slice((0, 1), (A,)))
    run(load, Begin())
    assert load.handle(Tick(), DEADLINE - 1) == []
    assert load.handle(Tick(), DEADLINE) == [CancelRead(1)]
    assert load.failures == ["deadline_exceeded"]


def test_reports_that_contradict_the_instructions_are_our_bug() -> None:
    load = machine(Slice((0,), (A,)))
    run(load, Begin())
    with pytest.raises(InvariantViolation):
        run(load, Settled(9, {}))
    with pytest.raises(InvariantViolation):
        run(load, Settled(1, arrived(5)))
    with pytest.raises(InvariantViolation):
        run(load, Begin())
    run(load, Ended(1, arrived(0), None))
    with pytest.raises(InvariantViolation):
        run(load, Ended(1, {}, None))
