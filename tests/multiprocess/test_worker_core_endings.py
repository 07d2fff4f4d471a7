"""How requests and workers end: refusals, cancellations, deadlines, drains, broken engines. No model is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from kvpool.errors import (
    CapacityError,
    DeadlineError,
    DuplicateError,
    InvariantViolation,
    KVPoolError,
    NumericsError,
    RequestError,
    UnavailableError,
)
from kvpool.plan import REDO
from kvpool.request import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs
from kvpool.types import RequestId, WorkerEpoch, WorkerId, WorkerKey
from tests.multiprocess.worker_core_support import BLOCK_TOKENS, FAKE, SECOND_NS, Pool, load_plan
from tests.worker_support import (
    Collector,
    FakeEngine,
    make_request,
    reference,
)
from workers.engine.base import SequenceSlice


@pytest.fixture
def fake_pool() -> Iterator[Pool]:
    made = Pool(FAKE)
    yield made
    made.close()


def test_a_second_request_of_the_same_id_is_refused_and_giving_it_up_does_not_end_the_first(fake_pool: Pool) -> None:
    core = fake_pool.add(num_blocks=200)
    sink, other = Collector(), Collector()
    request = make_request("same", fake_pool.prompt(9), 60, ignore_eos=True)
    core.submit(request, REDO, "first", sink)
    assert sink.first.wait(30)
    with pytest.raises(DuplicateError, match="same"):
        core.submit(request, REDO, "second", other)
    core.cancel(RequestId("same"), "second")
    assert sink.result() == fake_pool.kind.plain(request)
    assert sink.finish is FinishReason.LENGTH


def test_a_cancelled_request_ends_at_once_and_gives_its_pages_back(fake_pool: Pool) -> None:
    core = fake_pool.add(num_blocks=200)
    sink, other = Collector(), Collector()
    core.submit(make_request("gone", fake_pool.prompt(20), 480, ignore_eos=True), REDO, "d", sink)
    request = make_request("stays", fake_pool.prompt(9), 20, ignore_eos=True)
    core.submit(request, REDO, "d", other)
    assert sink.first.wait(30)
    core.cancel(RequestId("gone"))
    core.cancel(RequestId("never heard of"))
    sink.result()
    assert sink.finish is FinishReason.CANCELLED
    assert sink.stats is not None
    assert other.result() == fake_pool.kind.plain(request)


def test_a_late_request_ends_with_a_deadline_error(fake_pool: Pool) -> None:
    core = fake_pool.add()
    sink = Collector()
    late = make_request("late", fake_pool.prompt(20), 40, ignore_eos=True)
    core.submit(GenerateRequest(late.request_id, late.prompt, late.sampling, timeout_ns=1), REDO, "d", sink)
    with pytest.raises(DeadlineError):
        sink.result()
    assert core.status()["failures"] == {"deadline_exceeded": 1}


def test_requests_that_can_never_run_are_refused_by_name(fake_pool: Pool) -> None:
    core = fake_pool.add(num_blocks=10)
    vocab = fake_pool.kind.vocab
    for request, says in (
        (make_request("long", [5] * 500, 20), "max_tokens"),
        (make_request("big", [5] * 40, 8), "engine.num_blocks"),
        (make_request("alien", [5, vocab], 2), f"token id {vocab}"),
        (make_request("negative", [-1], 2), "token id -1"),
    ):
        with pytest.raises(RequestError, match=says):
            core.submit(request, REDO, "d", Collector())
    request = make_request("fits", [5] * 33, 8, ignore_eos=True)
    assert fake_pool.run(core, request).tokens == fake_pool.kind.plain(request)


def test_the_same_id_twice_at_once_is_refused(fake_pool: Pool) -> None:
    engine = FakeEngine(block_tokens=BLOCK_TOKENS)
    engine.running.clear()
    core = fake_pool.add(engine)
    request = make_request("twin", fake_pool.prompt(20), 60, ignore_eos=True)
    sink = Collector()
    core.submit(request, REDO, "d", sink)
    with pytest.raises(RequestError, match="twin"):
        core.submit(request, REDO, "d", Collector())
    engine.running.set()
    assert sink.result() == fake_pool.kind.plain(request)
    assert fake_pool.run(core, request).tokens == sink.tokens


def test_whoever_has_the_last_chunk_may_use_the_id_again(fake_pool: Pool) -> None:
    core, again = fake_pool.add(), Collector()
    request = make_request("same", fake_pool.prompt(30), 3, ignore_eos=True)

    def sink(item: TokenChunk | KVPoolError) -> None:
        if isinstance(item, TokenChunk) and item.finish is not None:
            core.submit(request, REDO, "d2", again)

    core.submit(request, REDO, "d1", sink)
    again.result()
    assert again.tokens == fake_pool.kind.plain(request)


def test_too_many_waiting_requests_are_refused(fake_pool: Pool) -> None:
    engine = FakeEngine(block_tokens=BLOCK_TOKENS)
    engine.running.clear()
    core = fake_pool.add(engine, max_running=1, max_waiting=2)
    sinks: list[Collector] = []

    def flood() -> None:
        for i in range(50):
            sink = Collector()
            core.submit(make_request(f"q{i}", fake_pool.prompt(8), 60, ignore_eos=True), REDO, "d", sink)
            sinks.append(sink)

    with pytest.raises(CapacityError, match="max_waiting"):
        flood()
    engine.running.set()
    assert len(sinks) >= 2
    for sink in sinks:
        assert len(sink.result()) == 60


def test_stop_tokens_end_silently_and_stop_strings_end_visibly(fake_pool: Pool) -> None:
    core = fake_pool.add()
    prompt = fake_pool.prompt(12)
    plain = fake_pool.kind.plain(make_request("plain", prompt, 20, ignore_eos=True))
    stop = plain[5]
    cut = plain.index(stop)
    got = fake_pool.run(core, make_request("ids", prompt, 20, ignore_eos=True, stop_token_ids=(stop,)))
    assert (got.tokens, got.finish) == (plain[:cut], FinishReason.STOP)
    got = fake_pool.run(core, make_request("text", prompt, 20, ignore_eos=True, stop=(f"<{stop}>",)))
    assert (got.tokens, got.finish) == (plain[: cut + 1], FinishReason.STOP)
    got = fake_pool.run(core, make_request("length", prompt, 20, ignore_eos=True))
    assert (got.tokens, got.finish) == (plain, FinishReason.LENGTH)


def test_a_retry_continues_after_what_was_delivered(fake_pool: Pool) -> None:
    core = fake_pool.add()
    request = make_request("whole", fake_pool.prompt(12), 20, ignore_eos=True)
    plain = fake_pool.kind.plain(request)
    rest = GenerateRequest(RequestId("rest"), request.prompt, request.sampling, generated=tuple(plain[:7]))
    got = fake_pool.run(core, rest)
    assert got.tokens == plain[7:]
    assert got.finish is FinishReason.LENGTH


def test_reports_carry_load_samples_outcomes_and_counters(fake_pool: Pool) -> None:
    holder, reader = fake_pool.add(), fake_pool.add()
    prompt = fake_pool.prompt(42)
    fake_pool.run(holder, make_request("warm", prompt, 2, ignore_eos=True))
    fake_pool.run(reader, make_request("load", prompt, 8, ignore_eos=True), load_plan(fake_pool.slice(0, 0, 10)))
    assert reader.wait_idle(10 * SECOND_NS)
    publisher = fake_pool.publishers[1]
    assert publisher.wait_for(lambda reports: any(report.loads for report in reports))
    reports = list(publisher.reports)
    assert [report.sequence for report in reports] == list(range(1, len(reports) + 1))
    outcomes = [outcome for report in reports for outcome in report.outcomes]
    assert [(outcome.request_id, outcome.tokens_loaded) for outcome in outcomes] == [("load", 40)]
    samples = [sample for report in reports for sample in report.loads]
    assert [(sample.holder, sample.blocks) for sample in samples] == [(WorkerKey(WorkerId("w0"), WorkerEpoch(1)), 10)]
    assert [name for report in reports for name in report.load.served_request_ids] == ["load"]
    counters = dict(reports[-1].counters)
    assert counters["bytes_loaded"] == 10 * reader.segment.config.block_bytes
    assert dict(fake_pool.cores[0].counters())["bytes_served"] == counters["bytes_loaded"]


def test_a_draining_worker_finishes_and_takes_nothing_new(fake_pool: Pool) -> None:
    engine = FakeEngine(block_tokens=BLOCK_TOKENS)
    engine.running.clear()
    core = fake_pool.add(engine)
    request = make_request("runs", fake_pool.prompt(12), 20, ignore_eos=True)
    sink = Collector()
    core.submit(request, REDO, "d", sink)
    core.drain()
    with pytest.raises(UnavailableError, match="drains"):
        core.submit(make_request("late", [5], 2), REDO, "d", Collector())
    engine.running.set()
    assert sink.result() == fake_pool.kind.plain(request)
    assert core.wait_idle(10 * SECOND_NS)


def test_closing_ends_every_request_with_a_typed_error(fake_pool: Pool) -> None:
    core = fake_pool.add(max_running=1)
    sinks = [Collector() for _ in range(3)]
    for i, sink in enumerate(sinks):
        core.submit(make_request(f"open{i}", fake_pool.prompt(12), 200, ignore_eos=True), REDO, "d", sink)
    core.close()
    for sink in sinks:
        with pytest.raises(UnavailableError, match="closed"):
            sink.result()
    with pytest.raises(UnavailableError):
        core.submit(make_request("late", [5], 2), REDO, "d", Collector())


class BreakingEngine(FakeEngine):
    """Raises on demand."""

    def __init__(self) -> None:
        super().__init__(block_tokens=BLOCK_TOKENS)
        self.errors: list[Callable[[Sequence[SequenceSlice]], BaseException]] = []

    def step(self, batch: Sequence[SequenceSlice]) -> list[TokenLogprobs | None]:
        if self.errors and len(batch) == 2:
            raise self.errors.pop()(batch)
        return super().step(batch)


@pytest.mark.parametrize(
    "error", [InvariantViolation("a bug"), RuntimeError("out of memory"), CapacityError("no room")]
)
def test_a_broken_engine_fails_every_request_and_takes_no_more(fake_pool: Pool, error: BaseException) -> None:
    engine = BreakingEngine()
    engine.errors.append(lambda batch: error)
    engine.running.clear()
    core = fake_pool.add(engine)
    sinks = [Collector(), Collector()]
    for i, sink in enumerate(sinks):
        core.submit(make_request(f"b{i}", [5, 6, 7 + i], 200, ignore_eos=True), REDO, "d", sink)
    engine.running.set()
    for sink in sinks:
        with pytest.raises(UnavailableError, match="broke"):
            sink.result()
    assert core.failure is error
    assert fake_pool.failures == [error]
    assert core.status()["healthy"] is False
    with pytest.raises(UnavailableError, match="broke"):
        core.submit(make_request("late", [5], 2), REDO, "d", Collector())


def test_broken_numbers_end_one_request_and_not_its_neighbour(fake_pool: Pool) -> None:
    engine = BreakingEngine()
    engine.errors.append(lambda batch: NumericsError("not finite", slots=str(batch[0].slot)))
    engine.running.clear()
    core = fake_pool.add(engine)
    sinks = [Collector(), Collector()]
    requests = [make_request(f"n{i}", [5, 6, 7 + i], 200, ignore_eos=True) for i in range(2)]
    for request, sink in zip(requests, sinks, strict=True):
        core.submit(request, REDO, "d", sink)
    engine.running.set()
    with pytest.raises(NumericsError):
        sinks[0].result()
    assert sinks[1].result() == reference(requests[1])


def test_a_view_that_does_not_fit_waits_for_another_to_end(fake_pool: Pool) -> None:
    core = fake_pool.add(FakeEngine(block_tokens=BLOCK_TOKENS, max_views=1))
    requests = [make_request(f"v{i}", [5, 6, 7 + i], 20, ignore_eos=True) for i in range(3)]
    sinks = [Collector() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        core.submit(request, REDO, "d", sink)
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.result() == reference(request)


def test_a_view_that_never_fits_fails_its_request_only(fake_pool: Pool) -> None:
    core = fake_pool.add(FakeEngine(block_tokens=BLOCK_TOKENS, max_views=0))
    sink = Collector()
    core.submit(make_request("never", [5, 6], 4), REDO, "d", sink)
    with pytest.raises(CapacityError):
        sink.result()
    assert core.failure is None


def test_a_sink_that_raises_loses_only_its_own_request(fake_pool: Pool) -> None:
    core = fake_pool.add()

    def broken(item: object) -> None:
        raise KVPoolError("the client is gone")

    core.submit(make_request("deaf", fake_pool.prompt(8), 100, ignore_eos=True), REDO, "d", broken)
    request = make_request("fine", fake_pool.prompt(8), 10, ignore_eos=True)
    assert fake_pool.run(core, request).tokens == fake_pool.kind.plain(request)
    assert core.wait_idle(10 * SECOND_NS)
    assert core.counters()["sink_failures"] >= 1
