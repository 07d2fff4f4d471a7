"""Worker cores on real threads, over real transports and the real loader: tokens always equal the plain run.

What touches KV runs with the fake engine, whose output depends on every byte of it, over memory and over UCX, and with
the torch engine and a tiny random Llama over UCX, compared with the plain Hugging Face model. Refusals, endings and
failures need no model.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from kvpool.config import EngineConfig, SchedulerConfig, StoreConfig, WorkerConfig
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
from kvpool.hashing import Namespace, block_hashes
from kvpool.plan import REDO, HolderRef, LoadSlice, Plan, PlanKind
from kvpool.request import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs
from kvpool.store.disk import DiskTier
from kvpool.transfer.loader import Loader
from kvpool.transport.base import Transport
from kvpool.transport.memory import MemoryHub, MemoryTransport
from kvpool.transport.ucx import UcxTransport
from kvpool.types import RequestId, Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.engine_parity import save_random_model, tiny_llama
from tests.worker_support import (
    Collector,
    FakeEngine,
    PatientGate,
    RecordingPublisher,
    WatchedDevice,
    make_request,
    reference,
)
from workers.core import CoreParts, WorkerCore
from workers.engine.base import Engine, SequenceSlice
from workers.engine.reference import PlainModel
from workers.engine.torch_engine import TorchEngine

BLOCK_TOKENS = 4
SECOND_NS = 1_000_000_000
Plain = Callable[[GenerateRequest], list[int]]


@dataclass
class Kind:
    """One engine under test and its reference."""

    make: Callable[[], Engine]
    plain: Plain
    vocab: int
    transport: Callable[[MemoryHub], Transport] = MemoryTransport


FAKE = Kind(lambda: FakeEngine(block_tokens=BLOCK_TOKENS, max_context_tokens=512), reference, 97)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tiny_llama(), tmp_path_factory.mktemp("llama"))


def make_kind(name: str, model_path: Path) -> Kind:
    """An engine over a transport, by name; ``model_path`` for the torch engine."""
    if name == "fake over memory":
        return FAKE
    if name == "fake over ucx":
        return replace(FAKE, transport=lambda hub: UcxTransport())
    model = PlainModel(model_path)
    known: dict[GenerateRequest, list[int]] = {}

    def plain(wanted: GenerateRequest) -> list[int]:
        if wanted not in known:
            known[wanted] = [item.token for item in model.greedy(wanted.prompt, wanted.sampling.max_tokens)]
        return known[wanted]

    return Kind(lambda: TorchEngine(model_path, block_tokens=BLOCK_TOKENS), plain, 211, lambda hub: UcxTransport())


@pytest.fixture(scope="module", params=["fake over memory", "fake over ucx", "torch over ucx"])
def kind(request: pytest.FixtureRequest, llama: Path) -> Kind:
    return make_kind(request.param, llama)


class Pool:
    """Worker cores that can load from each other."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.hub = MemoryHub()
        self.rng = Random(5)
        self.cores: list[WorkerCore] = []
        self.transports: list[Transport] = []
        self.publishers: list[RecordingPublisher] = []
        self.failures: list[BaseException] = []

    def add(
        self,
        engine: Engine | None = None,
        *,
        num_blocks: int = 64,
        patient: bool = True,
        disk: DiskTier | None = None,
        device_blocks: int = 0,
        **limits: int,
    ) -> WorkerCore:
        key = WorkerKey(WorkerId(f"w{len(self.cores)}"), WorkerEpoch(1))
        engine = engine or self.kind.make()
        transport, publisher = self.kind.transport(self.hub), RecordingPublisher()
        layout = engine.layout
        space = Namespace("tiny", layout.dtype, layout.fingerprint(), layout.block_tokens)
        held: list[WorkerCore] = []
        core = WorkerCore(
            CoreParts(
                key=key,
                engine=engine,
                config=WorkerConfig(
                    engine=EngineConfig(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS),
                    scheduler=SchedulerConfig(**limits),
                    store=StoreConfig(device_blocks=device_blocks),
                ),
                namespace_for=lambda tenant: Namespace(
                    space.model, space.dtype, space.layout, space.block_tokens, tenant=tenant
                ),
                publisher=publisher,
                transport=transport,
                make_loader=lambda started: Loader(
                    started,
                    on_suspect=lambda holder, code: None,
                    on_sample=lambda sample: held[0].observe_load(sample),  # noqa: PLW0108 - bound late
                ),
                decode=lambda tokens: "".join(f"<{token}>" for token in tokens),
                gate=PatientGate(BLOCK_TOKENS) if patient else None,
                disk=disk,
                on_failure=self.failures.append,
            )
        )
        held.append(core)
        if isinstance(engine, WatchedDevice):
            engine.core = core
        self.cores.append(core)
        self.transports.append(transport)
        self.publishers.append(publisher)
        return core

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(4, self.kind.vocab) for _ in range(tokens)]

    def run(self, core: WorkerCore, request: GenerateRequest, plan: Plan = REDO) -> Collector:
        sink = Collector()
        core.submit(request, plan, "d", sink)
        sink.result()
        return sink

    def slice(self, holder: int, start: int, stop: int, *alternates: int, epoch: int = 1) -> LoadSlice:
        key = WorkerKey(WorkerId(f"w{holder}"), WorkerEpoch(epoch))
        refs = tuple(
            HolderRef(WorkerKey(WorkerId(f"w{other}"), WorkerEpoch(1)), self.transports[other].address, Tier.HOST, stop)
            for other in alternates
        )
        end = self.transports[holder]
        return LoadSlice(start, stop, key, end.name, end.address, Tier.HOST, refs)

    def close(self) -> None:
        for core, publisher in zip(self.cores, self.publishers, strict=True):
            if core.failure is None:
                assert core.wait_idle(20 * SECOND_NS), "a request or a load hangs"
                core.check()
                counts = core.segment.counts()
                assert (counts.referenced, counts.in_flight) == (0, 0)
                assert publisher.held == set(core.held_hashes())
                assert publisher.in_device == set(core.device_hashes())
        for core in self.cores:
            core.close()
            core.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvpool-engine")]


def load_plan(*slices: LoadSlice, kind: PlanKind = PlanKind.LOAD) -> Plan:
    return Plan(kind, slices, load_deadline_ns=10 * SECOND_NS, stall_ns=2 * SECOND_NS)


@pytest.fixture
def pool(kind: Kind) -> Iterator[Pool]:
    made = Pool(kind)
    yield made
    made.close()


@pytest.fixture
def fake_pool() -> Iterator[Pool]:
    made = Pool(FAKE)
    yield made
    made.close()


def test_cold_prompts_of_any_length_equal_the_plain_model(pool: Pool) -> None:
    core = pool.add(max_step_tokens=10)
    for length in (1, 3, 4, 5, 8, 40, 63):
        request = make_request(f"cold-{length}", pool.prompt(length), 9, ignore_eos=True)
        assert pool.run(core, request).tokens == pool.kind.plain(request)


def test_a_prompt_seen_before_is_cached_and_gives_the_same_tokens(pool: Pool) -> None:
    core = pool.add()
    prompt = pool.prompt(40)
    first = pool.run(core, make_request("a", prompt, 6, ignore_eos=True))
    again = pool.run(core, make_request("b", prompt, 6, ignore_eos=True))
    assert first.tokens == again.tokens == pool.kind.plain(make_request("c", prompt, 6, ignore_eos=True))
    assert first.stats is not None
    assert (first.stats.tokens_cached, first.stats.tokens_redone) == (0, 40)
    assert again.stats is not None
    assert (again.stats.tokens_cached, again.stats.tokens_redone) == (39, 1)


def test_blocks_of_one_token_are_cached_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BLOCK_TOKENS", 1)
    pool = Pool(replace(FAKE, make=lambda: FakeEngine(block_tokens=1)))
    core = pool.add()
    request = replace(make_request("short", pool.prompt(20), 3, ignore_eos=True), timeout_ns=20 * SECOND_NS)
    for _ in range(2):
        sink = pool.run(core, request)
        assert sink.tokens == reference(request)
    assert sink.stats is not None
    assert sink.stats.tokens_redone == 1
    pool.close()


def test_generated_blocks_are_reused_by_the_next_turn(pool: Pool) -> None:
    core = pool.add()
    prompt = pool.prompt(10)
    first = pool.run(core, make_request("turn-1", prompt, 14, ignore_eos=True))
    request = make_request("turn-2", prompt + first.tokens + pool.prompt(3), 5, ignore_eos=True)
    second = pool.run(core, request)
    assert second.tokens == pool.kind.plain(request)
    assert second.stats is not None
    assert second.stats.tokens_cached == 20


def test_blocks_of_a_peer_are_loaded_instead_of_redone(pool: Pool) -> None:
    holder, reader = pool.add(), pool.add()
    prompt = pool.prompt(42)
    pool.run(holder, make_request("warm", prompt, 2, ignore_eos=True))
    request = make_request("load", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 0, 10)))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert (got.stats.tokens_loaded, got.stats.tokens_redone) == (40, 2)
    assert got.stats.bytes_loaded == 10 * reader.segment.config.block_bytes
    assert not got.stats.load_failures
    assert reader.wait_idle(SECOND_NS * 10)
    chain = block_hashes(prompt, pool.cores[0]._parts.namespace_for(""))
    assert set(chain) <= pool.publishers[1].held, "the reader became a holder"
    assert reader.counters()["loads"] == 1


def test_a_prefix_may_be_partly_local_partly_loaded_and_partly_redone(pool: Pool) -> None:
    holder, reader = pool.add(), pool.add()
    prompt = pool.prompt(48)
    pool.run(holder, make_request("warm", prompt[:40], 2, ignore_eos=True))
    pool.run(reader, make_request("own", prompt[:16], 2, ignore_eos=True))
    request = make_request("mixed", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 4, 10)))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert (got.stats.tokens_cached, got.stats.tokens_loaded, got.stats.tokens_redone) == (16, 24, 8)


def test_a_split_over_a_link_worth_waiting_for_loads_its_front_too(pool: Pool) -> None:
    holder, reader = pool.add(), pool.add(max_step_tokens=8)
    prompt = pool.prompt(50)
    pool.run(holder, make_request("warm", prompt, 2, ignore_eos=True))
    request = make_request("split", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 5, 12), kind=PlanKind.SPLIT))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert (got.stats.tokens_loaded, got.stats.tokens_redone) == (48, 2)


def test_a_load_may_be_striped_over_two_holders(pool: Pool) -> None:
    first, second, reader = pool.add(), pool.add(), pool.add()
    prompt = pool.prompt(41)
    for core in (first, second):
        pool.run(core, make_request("warm", prompt, 2, ignore_eos=True))
    request = make_request("striped", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 0, 5, 1), pool.slice(1, 5, 10, 0)))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert got.stats.tokens_loaded == 40


@pytest.mark.parametrize("gone", ["closed", "another epoch", "never held"])
def test_what_a_holder_does_not_give_is_redone(pool: Pool, gone: str) -> None:
    holder, reader = pool.add(), pool.add()
    prompt = pool.prompt(42)
    if gone != "never held":
        pool.run(holder, make_request("warm", prompt, 2, ignore_eos=True))
    if gone == "closed":
        pool.transports[0].close()
    request = make_request("load", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 0, 10, epoch=2 if gone == "another epoch" else 1)))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert (got.stats.tokens_loaded, got.stats.tokens_redone) == (0, 42)
    assert got.stats.load_failures
    assert reader.counters()[f"load_failures.{got.stats.load_failures[0]}"] == 1


def test_a_corrupted_payload_is_never_used(pool: Pool) -> None:
    holder, reader = pool.add(), pool.add()
    prompt = pool.prompt(42)
    pool.run(holder, make_request("warm", prompt, 2, ignore_eos=True))
    chain = block_hashes(prompt, holder._parts.namespace_for(""))
    block = holder.segment.lookup(chain[3])
    assert block is not None
    holder._arena.memory[holder.segment.offset(block) + 5] ^= 0xFF
    request = make_request("load", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 0, 10)))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert "integrity" in got.stats.load_failures
    assert got.stats.tokens_loaded == 36


def test_preempted_requests_resume_with_the_same_tokens(pool: Pool) -> None:
    core = pool.add(num_blocks=16)
    requests = [make_request(f"p{i}", pool.prompt(13), 30, ignore_eos=True) for i in range(3)]
    sinks = [Collector() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        core.submit(request, REDO, "d", sink)
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.result() == pool.kind.plain(request)
    assert core.counters()["preemptions"] > 0
    assert sum(sink.stats.preemptions for sink in sinks if sink.stats) == core.counters()["preemptions"]


def test_a_batch_of_eight_with_a_shared_prefix_gives_eight_plain_outputs(pool: Pool) -> None:
    core = pool.add(max_step_tokens=32)
    shared = pool.prompt(24)
    requests = [make_request(f"b{i}", shared + pool.prompt(1 + i), 10, ignore_eos=True) for i in range(8)]
    sinks = [Collector() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        core.submit(request, REDO, "d", sink)
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.result() == pool.kind.plain(request)
    redone = sum(sink.stats.tokens_redone for sink in sinks if sink.stats)
    assert redone <= 24 + sum(range(1, 9)) + 8, "the shared prefix is computed once"


def test_an_impatient_worker_computes_what_has_not_come_yet(pool: Pool) -> None:
    holder, reader = pool.add(), pool.add(patient=False, max_step_tokens=8)
    prompt = pool.prompt(50)
    pool.run(holder, make_request("warm", prompt, 2, ignore_eos=True))
    pool.run(reader, make_request("learn", pool.prompt(30), 2, ignore_eos=True))
    for kind in (PlanKind.SPLIT, PlanKind.LOAD):
        request = make_request(f"hasty-{kind.value}", prompt, 8, ignore_eos=True)
        got = pool.run(reader, request, load_plan(pool.slice(0, 5 if kind is PlanKind.SPLIT else 0, 12), kind=kind))
        assert got.tokens == pool.kind.plain(request)
        assert got.stats is not None
        assert got.stats.tokens_cached + got.stats.tokens_loaded + got.stats.tokens_redone == 50


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
