"""What a worker says about itself: how often, and what its queue means."""

from __future__ import annotations

from kvpool.plan import REDO, LoadSlice, Plan, PlanKind
from kvpool.reports import PrefillSample, RequestOutcome, WorkerLoad
from kvpool.types import BlockId, RequestId, Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.worker_support import RecordingPublisher, make_request, namespace
from workers.block_table import BlockTable, PageState
from workers.flights import open_ended, tail_first
from workers.queue_load import queue_load
from workers.reporter import BUSY_NS, IDLE_NS, MAX_PENDING, URGENT_NS, Reporter
from workers.sequence import Sequence

KEY = WorkerKey(WorkerId("w"), WorkerEpoch(2))
OUTCOME = RequestOutcome(RequestId("r"), "d", KEY.worker_id, 5, 3, 2, 1, 0, 0, 0)


def sequence(tokens: int, plan: Plan = REDO) -> Sequence:
    table = BlockTable(namespace(block_tokens=4).root(), 4)
    return Sequence(make_request("s", range(tokens)), plan, "d", table, arrival_ns=100, deadline_ns=10**9)


def reporter() -> tuple[Reporter, RecordingPublisher]:
    publisher = RecordingPublisher()
    return Reporter(KEY, publisher), publisher


def test_the_first_report_is_due_at_once_and_an_idle_worker_reports_once_a_second() -> None:
    made, _ = reporter()
    assert made.due_ns(7) == 7
    made.send(7, WorkerLoad(), {})
    assert made.due_ns(8) == 7 + IDLE_NS


def test_news_go_out_sooner_and_a_first_token_almost_at_once() -> None:
    made, _ = reporter()
    made.send(0, WorkerLoad(), {})
    made.prefill(PrefillSample(4, 0, 9))
    assert made.due_ns(1) == BUSY_NS
    made.outcome(OUTCOME)
    assert made.due_ns(1) == URGENT_NS


def test_a_report_carries_the_news_once() -> None:
    made, publisher = reporter()
    made.accept(RequestId("r"))
    made.prefill(PrefillSample(4, 0, 9))
    made.outcome(OUTCOME)
    made.send(0, WorkerLoad(waiting_requests=3), made.counters)
    made.send(1, WorkerLoad(), made.counters)
    first, second = publisher.reports
    assert (first.sequence, second.sequence) == (1, 2)
    assert first.load == WorkerLoad(waiting_requests=3, served_request_ids=(RequestId("r"),))
    assert (len(first.prefills), len(first.outcomes)) == (1, 1)
    assert (second.prefills, second.outcomes, second.load.served_request_ids) == ((), (), ())
    assert dict(second.counters) == {"requests": 1, "tokens_cached": 3, "tokens_loaded": 2, "tokens_redone": 1}


def test_news_that_do_not_fit_are_dropped_and_counted() -> None:
    made, publisher = reporter()
    for _ in range(MAX_PENDING + 5):
        made.prefill(PrefillSample(4, 0, 9))
    made.send(0, WorkerLoad(), made.counters)
    assert len(publisher.reports[0].prefills) == MAX_PENDING
    assert dict(publisher.reports[0].counters)["samples_dropped"] == 5


def test_the_queue_counts_what_is_left_to_compute() -> None:
    waits, loads, runs, decodes = sequence(10), sequence(22), sequence(30), sequence(9)
    loads.table.assign([0, 1, 2], [BlockId(5), BlockId(6), BlockId(7)])
    loads.table.move(0, PageState.FLYING)
    loads.table.move(1, PageState.FLYING)
    runs.computed_tokens = 8
    decodes.tally.first_token_ns = 1
    decodes.append(3)
    decodes.computed_tokens = 9
    load = queue_load([runs, decodes], [waits, loads])
    assert (load.running_requests, load.waiting_requests) == (2, 2)
    assert load.queued_prefill_tokens == 10 + (22 - 8) + (30 - 8)
    assert load.queued_context_tokens == 0 + 8 + 8


def test_stats_split_the_prompt_into_cached_loaded_and_redone() -> None:
    served = sequence(22, Plan(PlanKind.LOAD))
    served.loaded = {1, 2, 3}
    served.filled(0, 4, block_bytes=100)
    served.tally.first_scheduled_ns, served.tally.first_token_ns = 150, 180
    stats = served.stats(KEY.worker_id)
    assert (stats.tokens_cached, stats.tokens_loaded, stats.tokens_redone) == (4, 12, 6)
    assert (stats.bytes_loaded, stats.queue_ns, stats.ttft_ns, stats.plan) == (300, 50, 80, "load")
    served.filled(4, 1, block_bytes=100)
    assert served.stats(KEY.worker_id) == stats, "nothing counts after the first token"


def test_a_plan_whose_loads_all_failed_was_a_redo() -> None:
    assert sequence(22, Plan(PlanKind.LOAD)).stats(KEY.worker_id).plan == "redo"


def test_a_prompt_filled_to_its_end_still_redid_its_last_token() -> None:
    served = sequence(8, Plan(PlanKind.LOAD))
    served.loaded = {0, 1}
    served.filled(0, 2, block_bytes=100)
    stats = served.stats(KEY.worker_id)
    assert (stats.tokens_cached, stats.tokens_loaded, stats.tokens_redone) == (0, 7, 1)


def test_a_preemption_before_the_first_token_starts_the_count_again() -> None:
    served = sequence(22, Plan(PlanKind.LOAD))
    served.loaded = {0}
    served.filled(0, 2, block_bytes=100)
    served.restart()
    stats = served.stats(KEY.worker_id)
    assert (stats.tokens_cached, stats.tokens_loaded, stats.tokens_redone, stats.preemptions) == (0, 0, 22, 1)


def split(*bounds: tuple[int, int], predicted_load_ns: int = 0) -> Plan:
    slices = tuple(LoadSlice(start, stop, KEY, "memory", b"", Tier.HOST) for start, stop in bounds)
    return Plan(PlanKind.SPLIT, slices, predicted_load_ns=predicted_load_ns)


def test_a_split_loads_in_pieces_from_the_end_and_covers_everything_once() -> None:
    pieces = tail_first(split((0, 40), (40, 70), (70, 200))).loads
    starts = [piece.start for piece in pieces]
    assert starts == sorted(starts, reverse=True)
    assert sorted(index for piece in pieces for index in range(piece.start, piece.stop)) == list(range(200))
    assert len(pieces) < 40
    sizes = {piece.start: piece.stop - piece.start for piece in pieces}
    assert max(sizes.values()) == sizes[starts[0]] == 53, "coarse at the far end"
    assert max(sizes[start] for start in starts if 35 <= start < 45) == 2, "fine where both ends meet"


def test_a_split_may_grow_to_the_front_and_its_expectation_with_it() -> None:
    made = open_ended(split((30, 40), (40, 60), predicted_load_ns=300))
    assert [(part.start, part.stop) for part in made.loads] == [(0, 30), (30, 40), (40, 60)]
    assert made.predicted_load_ns == 600
    for unchanged in (split((0, 5)), Plan(PlanKind.LOAD, made.loads), REDO):
        assert open_ended(unchanged) is unchanged
