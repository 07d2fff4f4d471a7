"""The scheduler, case by case, over a bare block pool: no engine, no bytes, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.config import SchedulerConfig
from kvpool.errors import CapacityError
from kvpool.plan import REDO, LoadSlice, Plan, PlanKind
from kvpool.request import Limits
from kvpool.store.pool import BlockPool
from kvpool.types import BlockHash, BlockId, Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.worker_support import make_request, namespace
from workers.block_table import BlockTable, PageState
from workers.gate import Gate
from workers.scheduler import MAX_REFUSED, Scheduler
from workers.sequence import Phase, Sequence
from workers.step import LoadOrder, Step

SIZE = 4
HOLDER = WorkerKey(WorkerId("holder"), WorkerEpoch(1))


class Bench:
    """A scheduler whose steps always succeed; sampled tokens are 1."""

    def __init__(self, blocks: int = 100, **limits: int) -> None:
        self.pool = BlockPool(blocks)
        self.gate = Gate(SIZE)
        self.scheduler = Scheduler(SchedulerConfig(**limits), self.pool, self.gate)
        self.now_ns = 0
        self.orders: dict[str, LoadOrder] = {}

    def submit(
        self, name: str, prompt: range | list[int], plan: Plan = REDO, max_tokens: int = 8, priority: int = 0
    ) -> Sequence:
        self.now_ns += 1
        table = BlockTable(namespace(block_tokens=SIZE).root(), SIZE)
        request = replace(make_request(name, list(prompt), max_tokens), limits=Limits(priority=priority))
        sequence = Sequence(request, plan, "d", table, self.now_ns, self.now_ns + 10**12)
        order = self.scheduler.add(sequence, self.now_ns)
        if order is not None:
            self.orders[name] = order
        self.scheduler.check()
        return sequence

    def plan(self) -> Step:
        self.now_ns += 1
        step = self.scheduler.plan_step(self.now_ns)
        self.pool.check()
        self.scheduler.check()
        return step

    def run(self, step: Step) -> None:
        for work in step.work:
            sequence = work.sequence
            sequence.slot = sequence.slot or 1
            self.scheduler.ran(work)
            if work.samples:
                sequence.tally.first_token_ns = self.now_ns
                sequence.append(1)
            self.seal(sequence)

    def seal(self, sequence: Sequence) -> None:
        table = sequence.table
        for index in table.sealable(sequence.computed_tokens // SIZE):
            page = table.page(index)
            assert page is not None
            if self.pool.lookup(table.chain[index]) != page:
                page = self.pool.seal(page, table.chain[index], table.parent_of(index))
            table.seal(index, page)

    def beat(self) -> list[tuple[str, int, int, int]]:
        """Plan and run one step: (request, filled blocks, start, count)."""
        step = self.plan()
        self.run(step)
        return [(work.sequence.request_id, len(work.fill), work.start, work.count) for work in step.work]


def load_plan(start: int, stop: int, *, deadline_ns: int = 10**9) -> Plan:
    kind = PlanKind.SPLIT if start else PlanKind.LOAD
    loads = (LoadSlice(start, stop, HOLDER, "memory", b"", Tier.HOST),)
    return Plan(kind, loads, load_deadline_ns=deadline_ns, stall_ns=1)


SLOW = load_plan(0, 4)._replace(predicted_load_ns=10**6)  # than computing, once the gate has seen a step


def test_a_long_prompt_is_cut_into_chunks_and_decode_goes_first() -> None:
    bench = Bench(max_step_tokens=16)
    bench.submit("a", range(10))
    assert bench.beat() == [("a", 0, 0, 10)]
    bench.submit("b", range(50, 90))
    assert bench.beat() == [("a", 0, 10, 1), ("b", 0, 0, 12)], "decode first, then whole blocks of the rest"
    assert bench.beat() == [("a", 0, 11, 1), ("b", 0, 12, 12)]
    assert bench.beat() == [("a", 0, 12, 1), ("b", 0, 24, 12)]
    assert bench.beat() == [("a", 0, 13, 1), ("b", 0, 36, 4)]
    assert bench.beat() == [("a", 0, 14, 1), ("b", 0, 40, 1)]


def test_a_step_that_decodes_carries_less_prefill() -> None:
    bench = Bench(max_step_tokens=64, mixed_prefill_tokens=8)
    bench.submit("a", range(10))
    bench.beat()
    bench.submit("b", range(50, 90))
    assert bench.beat() == [("a", 0, 10, 1), ("b", 0, 0, 8)]
    bench.scheduler.remove(bench.scheduler.running[0])
    assert bench.beat() == [("b", 0, 8, 32)]


def test_a_held_prefix_is_filled_and_only_the_rest_computed() -> None:
    bench = Bench()
    bench.submit("a", range(20))
    bench.beat()
    bench.submit("b", [*range(16), 90, 91])
    assert ("b", 4, 16, 2) in bench.beat()


def test_a_prompt_held_to_its_last_token_still_computes_that_one() -> None:
    bench = Bench()
    bench.submit("a", range(16))
    bench.beat()
    bench.submit("b", range(16))
    assert ("b", 4, 15, 1) in bench.beat()


def test_a_long_held_prefix_is_filled_in_parts_beside_decodes_and_alone_at_once() -> None:
    bench = Bench(mixed_prefill_tokens=8)
    bench.submit("a", range(40), max_tokens=20)
    bench.beat()
    bench.submit("b", [*range(40), 90, 91])
    bench.gate.fill_block_ns = 1
    bench.gate.observe(1, 2)
    assert bench.beat() == [("a", 0, 40, 1), ("b", 10, 40, 2)], "copying takes no time worth mentioning"
    bench.gate.fill_block_ns = None
    bench.submit("c", [*range(40), 92, 93])
    parts = [work for _ in range(6) for work in bench.beat() if work[0] == "c"]
    assert parts == [
        ("c", 2, 8, 0),
        ("c", 2, 16, 0),
        ("c", 2, 24, 0),
        ("c", 2, 32, 0),
        ("c", 2, 40, 0),
        ("c", 0, 40, 2),
    ]
    for sequence in bench.scheduler.running:
        bench.scheduler.remove(sequence)
    bench.submit("d", [*range(40), 94])
    assert bench.beat() == [("d", 10, 40, 1)]


def test_twins_in_one_batch_compute_a_shared_block_once() -> None:
    bench = Bench(max_step_tokens=64)
    bench.submit("a", [*range(16), 90])
    bench.submit("b", [*range(16), 91])
    assert bench.beat() == [("a", 0, 0, 17)]
    assert bench.beat() == [("a", 0, 17, 1), ("b", 4, 16, 1)]


def test_more_requests_than_may_run_wait_in_order_and_the_queue_is_bounded() -> None:
    bench = Bench(max_running=2, max_waiting=2)
    bench.submit("a", range(4), max_tokens=2)
    bench.beat()
    for name, first in (("b", 20), ("c", 30)):
        bench.submit(name, range(first, first + 4))
    with pytest.raises(CapacityError, match="max_waiting is 2"):
        bench.submit("d", range(4))
    bench.beat()
    assert [entry.request_id for entry in bench.scheduler.running] == ["a", "b"]
    bench.scheduler.remove(bench.scheduler.running[0])
    bench.beat()
    assert [entry.request_id for entry in bench.scheduler.running] == ["b", "c"]


def test_a_request_without_pages_waits_and_nobody_overtakes_it() -> None:
    bench = Bench(blocks=10)
    bench.submit("a", range(24))
    bench.beat()
    bench.submit("big", range(100, 132))
    bench.submit("small", range(200, 204))
    bench.beat()
    assert [entry.request_id for entry in bench.scheduler.running] == ["a"]
    bench.scheduler.remove(bench.scheduler.running[0])
    bench.beat()
    assert [entry.request_id for entry in bench.scheduler.running] == ["big", "small"]


def test_the_youngest_is_preempted_and_resumes_from_its_retained_blocks() -> None:
    bench = Bench(blocks=5)
    old = bench.submit("old", range(7), max_tokens=20)
    young = bench.submit("young", range(50, 57), max_tokens=20)
    bench.beat()
    ran: list[tuple[str, int, int, int]] = []
    while not young.tally.preemptions:
        ran = bench.beat()
    assert [name for name, *_ in ran] == ["old"], "the older one goes on in the same step"
    assert young.table.pages() == []
    assert old.phase is Phase.RUNNING
    assert young.phase is Phase.WAITING
    assert (young.slot, young.computed_tokens) == (None, 0)
    assert bench.scheduler.preemptions == 1
    bench.scheduler.remove(old)
    name, filled, _, _ = bench.beat()[0]
    assert (name, filled >= 1) == ("young", True)


def test_a_load_reserves_its_pages_at_arrival_and_is_filled_in_when_it_came() -> None:
    bench = Bench()
    bench.gate.observe(1, 10**6)
    sequence = bench.submit("a", range(22), load_plan(0, 5))
    order = bench.orders["a"]
    assert sorted(order.pages) == [0, 1, 2, 3, 4]
    assert list(order.pages.values()) == list(range(5)), "contiguous, so that it can travel as one message"
    assert bench.pool.counts().in_flight == 5
    bench.scheduler.progress(order.flight, range(5))
    assert bench.scheduler.land(order.flight) is sequence
    assert bench.beat() == [("a", 5, 20, 2)]
    assert bench.pool.counts().in_flight == 0


def test_blocks_that_arrived_are_used_while_the_rest_is_still_in_flight() -> None:
    bench = Bench()
    bench.gate.observe(1, 10**9)
    bench.submit("a", range(22), load_plan(0, 5))
    bench.scheduler.progress(bench.orders["a"].flight, {0, 1})
    assert bench.beat() == [("a", 2, 8, 0)], "filled in; the rest comes sooner than it could be computed"
    bench.scheduler.progress(bench.orders["a"].flight, {0, 1, 2, 3, 4})
    assert bench.beat() == [("a", 3, 20, 2)]


def test_a_load_that_failed_is_redone_in_its_own_pages() -> None:
    bench = Bench()
    sequence = bench.submit("a", range(22), load_plan(0, 5))
    bench.scheduler.progress(bench.orders["a"].flight, {0})
    bench.scheduler.land(bench.orders["a"].flight)
    assert bench.beat() == [("a", 1, 4, 18)]
    assert sequence.table.sealed_blocks == 5


def test_others_run_while_a_load_is_on_its_way() -> None:
    bench = Bench()
    bench.submit("loads", range(22), load_plan(0, 5))
    bench.submit("ready", range(50, 60))
    assert bench.beat() == [("ready", 0, 0, 10)]


def test_the_front_of_a_split_is_computed_while_its_tail_arrives() -> None:
    bench = Bench(max_step_tokens=8)
    bench.gate.observe(1, 10**9)
    bench.submit("a", range(30), load_plan(3, 7))
    assert bench.beat() == [("a", 0, 0, 8)]
    bench.scheduler.progress(bench.orders["a"].flight, {3, 4, 5, 6})
    assert bench.beat() == [("a", 0, 8, 4)], "no token of a block that is there is computed"
    assert bench.beat() == [("a", 4, 28, 2)]


def test_a_gpu_with_nothing_else_to_do_computes_a_load_that_is_too_slow() -> None:
    bench = Bench(max_step_tokens=8)
    bench.gate.observe(1, 10)
    sequence = bench.submit("a", range(22), load_plan(0, 5, deadline_ns=10**12))
    assert bench.beat() == [("a", 0, 0, 8)]
    bench.now_ns = 10**6
    bench.scheduler.progress(bench.orders["a"].flight, {0, 1, 2, 3})
    assert bench.beat() == [("a", 2, 16, 6)], "what came meanwhile is used"
    assert sequence.table.sealed_blocks == 0, "pages a load may still write are not offered"
    bench.scheduler.land(bench.orders["a"].flight)
    bench.beat()
    assert sequence.table.sealed_blocks == 5


def test_a_load_past_its_deadline_is_given_up_and_its_pages_return_only_when_it_is_terminal() -> None:
    bench = Bench(blocks=6)
    sequence = bench.submit("a", range(22), load_plan(0, 5, deadline_ns=1))
    step = bench.plan()
    assert step.cancelled_flights == (bench.orders["a"].flight,)
    bench.run(step)
    assert sequence.computed_tokens == 22
    bench.scheduler.remove(sequence)
    assert bench.pool.counts().in_flight == 5
    assert bench.scheduler.land(bench.orders["a"].flight) is None
    assert bench.pool.counts().free == 6


def test_two_half_loaded_requests_cannot_wait_for_each_others_pages() -> None:
    bench = Bench(blocks=10)
    first = bench.submit("first", range(34), load_plan(0, 5))
    second = bench.submit("second", range(100, 134), load_plan(0, 5))
    assert bench.pool.available_blocks == 0
    for name in ("first", "second"):
        bench.scheduler.progress(bench.orders[name].flight, range(5))
        bench.scheduler.land(bench.orders[name].flight)
    assert bench.beat() == [("first", 5, 20, 14)], "the younger one gave its pages back"
    assert second.table.pages() == []
    bench.scheduler.remove(first)
    assert bench.beat() == [("second", 0, 0, 34)]


def test_a_step_does_not_look_at_everyone_who_finds_no_room_for_a_load() -> None:
    bench = Bench(blocks=60, max_waiting=256)
    bench.submit("runs", range(200), max_tokens=20)
    while not bench.scheduler.running or not bench.scheduler.running[0].decoding:
        bench.beat()
    for number in range(1, 101):
        bench.submit(f"w{number}", range(1000 * number, 1000 * number + 80), load_plan(0, 20))
    looked: list[BlockHash] = []
    lookup = bench.pool.lookup

    def counting(block_hash: BlockHash) -> BlockId | None:
        looked.append(block_hash)
        return lookup(block_hash)

    bench.pool.lookup = counting
    assert [work[0] for work in bench.beat()] == ["runs"]
    assert len(looked) <= (MAX_REFUSED + 2) * 21, "in every step, before the next token of who runs"
    assert bench.scheduler.waiting[0].load_due


def test_no_more_requests_give_their_pages_back_than_it_takes() -> None:
    bench = Bench(blocks=40, max_running=1)
    runs = bench.submit("runs", range(20), max_tokens=60)
    bench.beat()
    for number in (1, 2, 3):
        bench.submit(f"w{number}", range(100 * number, 100 * number + 40), load_plan(0, 10))
    step = bench.plan()
    while not step.cancelled_flights:
        bench.run(step)
        step = bench.plan()
    assert step.cancelled_flights == (bench.orders["w3"].flight,), "its pages are enough, though still in flight"
    assert bench.plan().work == ()
    bench.scheduler.land(bench.orders["w3"].flight)
    while runs.generated_tokens < 60:
        assert bench.beat() == [("runs", 0, len(runs.tokens) - 2, 1)]
    assert bench.scheduler.waiting[0].table.flying() == list(range(10))


def test_a_load_that_finds_no_room_at_arrival_starts_when_there_is() -> None:
    bench = Bench(blocks=8)
    running = bench.submit("running", range(24))
    bench.beat()
    late = bench.submit("late", range(100, 122), load_plan(0, 5))
    assert "late" not in bench.orders
    assert late.load_due
    bench.scheduler.remove(running)
    step = bench.plan()
    assert [order.sequence for order in step.loads] == [late]
    assert late.table.state(0) is PageState.FLYING


def test_a_block_that_appears_here_meanwhile_ends_the_load_for_it() -> None:
    bench = Bench()
    bench.gate.observe(1, 10)
    twin = bench.submit("twin", range(22))
    loads = bench.submit("loads", range(22), load_plan(0, 5))
    assert bench.beat() == [("twin", 0, 0, 22)], "computing is sooner than the load of the other"
    bench.scheduler.remove(twin)
    step = bench.plan()
    assert step.cancelled_flights == (bench.orders["loads"].flight,)
    bench.run(step)
    assert loads.computed_tokens == 22
    assert bench.pool.counts().in_flight == 5
    bench.scheduler.land(bench.orders["loads"].flight)
    assert bench.pool.counts().in_flight == 0


def test_a_split_that_loads_everything_tail_first_stops_where_both_ends_meet() -> None:
    bench = Bench(max_step_tokens=8)
    bench.gate.observe(1, 10**6)
    piece = LoadSlice(0, 8, HOLDER, "memory", b"", Tier.HOST)
    plan = Plan(PlanKind.SPLIT, (piece,), load_deadline_ns=10**12, stall_ns=1, predicted_ttft_ns=32 * 10**6)
    sequence = bench.submit("a", range(34), plan)
    flight = bench.orders["a"].flight
    assert bench.beat() == [("a", 0, 0, 8)]
    bench.now_ns += 8 * 10**6
    bench.scheduler.progress(flight, {7, 6})
    assert bench.beat() == [("a", 0, 8, 8)], "a chunk of the front while the tail arrives"
    bench.now_ns += 8 * 10**6
    bench.scheduler.progress(flight, {7, 6, 5, 4})
    step = bench.plan()
    assert [(len(work.fill), work.start, work.count) for work in step.work] == [(4, 32, 2)]
    assert step.cancelled_flights == (flight,), "what it still brings is computed already"
    bench.run(step)
    assert sequence.table.sealed_blocks == 0, "the front's pages are still named by the load"
    bench.scheduler.land(flight)
    bench.beat()
    assert sequence.table.sealed_blocks == 8


@pytest.mark.parametrize("prompt_tokens", [16, 18])
def test_a_load_that_the_last_chunk_overtakes_is_given_up(prompt_tokens: int) -> None:
    bench = Bench()
    bench.gate.observe(SIZE, SIZE)
    bench.submit("slow", range(prompt_tokens), SLOW)
    given_up: list[int] = []
    while not bench.scheduler.running or not bench.scheduler.running[0].decoding:
        step = bench.plan()
        given_up += step.cancelled_flights
        bench.run(step)
    assert given_up == [bench.orders["slow"].flight], "nothing that it still brings is needed"


def test_what_a_sequence_computed_into_pages_of_a_load_is_rescued_when_it_ends() -> None:
    bench = Bench(blocks=20)
    bench.gate.observe(SIZE, SIZE)
    sequence = bench.submit("slow", range(16), SLOW, max_tokens=1)
    bench.scheduler.progress(bench.orders["slow"].flight, {0})
    while not sequence.generated_tokens:
        bench.beat()
    assert sequence.table.sealable(4) == [], "the load may still write them"
    bench.scheduler.rescue(sequence)
    assert sequence.table.sealable(4) == [0, 1, 2, 3]
    assert bench.pool.counts().in_flight == 4
    bench.scheduler.remove(sequence)
    bench.scheduler.land(bench.orders["slow"].flight)
    bench.scheduler.check()
    assert bench.pool.available_blocks == 20


def test_a_rescue_is_awaited_while_a_twin_lacks_what_it_frees() -> None:
    bench = Bench(max_step_tokens=8)
    bench.gate.observe(SIZE, SIZE)
    first = bench.submit("first", [*range(16), 90], SLOW)
    bench.submit("stranger", range(200, 220), SLOW)
    bench.beat()
    assert first.computed_tokens
    assert not bench.scheduler.awaited(first)
    twin = bench.submit("twin", [*range(16), 91], SLOW)
    assert bench.scheduler.awaited(first)
    bench.scheduler.rescue(first)
    assert not bench.scheduler.awaited(first)
    assert not bench.scheduler.awaited(twin), "it computed nothing"


def test_a_rescue_takes_what_room_there_is_and_preempts_nobody() -> None:
    bench = Bench(blocks=7)
    bench.gate.observe(SIZE, SIZE)
    sequence = bench.submit("slow", range(16), SLOW, max_tokens=1)
    while not sequence.generated_tokens:
        bench.beat()
    bench.scheduler.rescue(sequence)
    assert sequence.table.sealable(4) == [0, 1], "three are free and one may be wanted by who runs"
    assert bench.scheduler.preemptions == 0


def test_a_plan_that_names_blocks_twice_or_beyond_the_prompt_loads_each_once() -> None:
    bench = Bench()
    whole = load_plan(0, 4).loads[0]
    odd = (whole._replace(start=2, stop=2**40), whole, whole, whole._replace(start=-3, stop=1))
    bench.submit("odd", range(18), load_plan(0, 4)._replace(loads=odd))
    assert sorted(bench.orders["odd"].pages) == [0, 1, 2, 3]
    bench.scheduler.progress(bench.orders["odd"].flight, {0, 1, 2, 3})
    bench.scheduler.land(bench.orders["odd"].flight)
    assert bench.beat() == [("odd", 4, 16, 2)]


def test_requests_past_their_deadline_leave_running_or_waiting() -> None:
    bench = Bench(max_running=1)
    runs = bench.submit("runs", range(4))
    waits = bench.submit("waits", range(50, 54))
    bench.beat()
    bench.now_ns = 10**13
    step = bench.plan()
    assert step.expired == (runs, waits)
    assert step.closed_slots == (1,)
    assert not step.work
    assert bench.pool.counts().referenced == 0


def test_a_view_that_does_not_fit_waits_until_another_ends() -> None:
    bench = Bench()
    first = bench.submit("first", range(4))
    bench.beat()
    second = bench.submit("second", range(50, 54))
    step = bench.plan()
    assert [work.sequence for work in step.work] == [first, second]
    assert bench.scheduler.defer(second)
    bench.run(Step(work=step.work[:1]))
    assert [work.sequence for work in bench.plan().work] == [first]
    bench.scheduler.remove(first)
    assert [work.sequence for work in bench.plan().work] == [second]
    assert not bench.scheduler.defer(second), "nobody else will ever free memory"


def test_a_higher_priority_goes_first_and_equal_ones_by_age() -> None:
    bench = Bench(max_running=1)
    for name, priority in (("first", 0), ("second", 0), ("urgent", 1)):
        bench.submit(name, range(8), priority=priority)
    (work,) = bench.plan().work
    assert work.sequence.request_id == "urgent"
    assert [entry.request_id for entry in bench.scheduler.waiting] == ["first", "second"]
