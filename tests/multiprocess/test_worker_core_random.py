"""Several cores, random requests, shaped links and faults: every finished output is right and nothing is left over.

Loads come from up to four places, prompts are handed over, blocks are evicted, a holder dies. The fake engine, whose
output depends on every byte of KV, runs over memory; the torch engine with a tiny random Llama over UCX, compared with
the plain Hugging Face model, log-probabilities too.

Threads make a run not repeatable to the step, but every choice of the test comes from the seed. The safety phase does
everything at once; then links heal and every request must end.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from kvpool.config import EngineConfig, SchedulerConfig, StoreConfig, WorkerConfig
from kvpool.errors import CapacityError, DeadlineError, KVPoolError, RequestError, UnavailableError
from kvpool.hashing import Namespace
from kvpool.plan import HolderRef, LoadSlice, Plan, PlanKind
from kvpool.reports import PrefillSample
from kvpool.request import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs
from kvpool.store.selection import Selection
from kvpool.transfer.loader import Loader
from kvpool.transport.base import Transport
from kvpool.transport.memory import MemoryHub, MemoryTransport
from kvpool.transport.shaping import CLEAR, LinkShape, ShapingTransport
from kvpool.transport.ucx import UcxTransport
from kvpool.types import RequestId, Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.engine_parity import WatchedTorch, save_random_model, tiny_llama
from tests.multiprocess.cluster_kit import wait_until
from tests.worker_support import (
    Collector,
    RecordingPublisher,
    WatchedDevice,
    WatchedFake,
    make_request,
    reference,
    reference_choices,
)
from workers.core import CoreParts, WorkerCore
from workers.engine.base import Engine
from workers.engine.reference import PlainModel
from workers.engine.torch_engine import TorchEngine

BLOCK_TOKENS = 4
WORKERS = 3
MORTAL = WORKERS
"""Number of a further worker that only gives blocks, and dies."""

TOLERANCE = 1e-4
SECOND_NS = 1_000_000_000
FAULTS = (
    CLEAR,
    LinkShape(rate_bytes_per_s=2e5),
    LinkShape(delay_ns=2_000_000),
    LinkShape(loss=0.2),
    LinkShape(corruption=0.3),
    LinkShape(stalled=True),
)


@dataclass(frozen=True)
class Kind:
    """One engine under test, what moves its blocks, and its reference."""

    engine: Callable[[Random], Engine]
    choices: Callable[[GenerateRequest], list[TokenLogprobs]]
    vocab: int
    transport: Callable[[MemoryHub], Transport]
    temperatures: tuple[float, ...] = (0.0,)


FAKE = Kind(
    lambda rng: WatchedFake(block_tokens=BLOCK_TOKENS, token_s=rng.choice([0.0, 2e-5])),
    reference_choices,
    97,
    MemoryTransport,
    (0.0, 1.0),
)


@pytest.fixture(scope="module")
def torch_kind(tmp_path_factory: pytest.TempPathFactory) -> Kind:
    path = save_random_model(tiny_llama(), tmp_path_factory.mktemp("llama"))
    model = PlainModel(path)

    def choices(request: GenerateRequest) -> list[TokenLogprobs]:
        left = request.sampling.max_tokens - len(request.generated)
        return model.greedy((*request.prompt, *request.generated), left)

    engine = TorchEngine(path, block_tokens=BLOCK_TOKENS)
    return Kind(
        lambda _: WatchedTorch(path, block_tokens=BLOCK_TOKENS), choices, engine.vocab_size, lambda _: UcxTransport()
    )


@dataclass
class Fleet:
    """Cores that can load from each other over links with faults."""

    rng: Random
    kind: Kind = FAKE
    cores: list[WorkerCore] = field(default_factory=list)
    links: list[ShapingTransport] = field(default_factory=list)
    publishers: list[RecordingPublisher] = field(default_factory=list)
    sinks: dict[str, tuple[GenerateRequest, Collector]] = field(default_factory=dict)
    errands: list[threading.Thread] = field(default_factory=list)

    def grow(self, hub: MemoryHub, num_blocks: int | None = None) -> None:
        number = len(self.cores)
        link, publisher = ShapingTransport(self.kind.transport(hub), seed=number), RecordingPublisher()
        engine = self.kind.engine(self.rng)
        layout = engine.layout
        held: list[WorkerCore] = []
        num_blocks = num_blocks or self.rng.choice([24, 40, 120])
        core = WorkerCore(
            CoreParts(
                key=WorkerKey(WorkerId(f"w{number}"), WorkerEpoch(1)),
                engine=engine,
                config=WorkerConfig(
                    engine=EngineConfig(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS),
                    store=StoreConfig(device_blocks=(0, 7, num_blocks, 0)[number]),
                    scheduler=SchedulerConfig(
                        max_step_tokens=self.rng.choice([8, 64]), max_running=self.rng.choice([2, 8]), max_waiting=32
                    ),
                ),
                namespace_for=lambda tenant: Namespace(
                    "tiny", layout.dtype, layout.fingerprint(), layout.block_tokens, tenant=tenant
                ),
                publisher=publisher,
                transport=link,
                make_loader=lambda started: Loader(
                    started,
                    on_suspect=lambda holder, code: None,
                    on_sample=lambda sample: held[0].observe_load(sample),  # noqa: PLW0108 - bound late
                ),
            )
        )
        held.append(core)
        if isinstance(engine, WatchedDevice):
            engine.core = core
        self.cores.append(core)
        self.links.append(link)
        self.publishers.append(publisher)

    def plan(self, reader: int, blocks: int) -> Plan:
        """Any plan, true or stale, striped or not: the router's view may be wrong in every way."""
        rng = self.rng
        if blocks < 1 or rng.random() < 0.3:
            return Plan(PlanKind.REDO)
        start = rng.choice([0, rng.randrange(blocks)])
        cuts = sorted({start, blocks, *(rng.randrange(start, blocks + 1) for _ in range(rng.choice([0, 1, 1, 3])))})
        others = [number for number in range(len(self.cores)) if number != reader or rng.random() < 0.1]
        return Plan(
            rng.choice([PlanKind.LOAD, PlanKind.SPLIT]),
            tuple(
                self.part(lo, hi + rng.choice([0, 0, 0, 2]), others)
                for lo, hi in rng.sample(list(itertools.pairwise(cuts)), len(cuts) - 1)
            ),
            load_deadline_ns=rng.choice([20_000_000, 300_000_000]),
            stall_ns=40_000_000,
            predicted_ttft_ns=rng.choice([1_000_000, 50_000_000]),
        )

    def part(self, start: int, stop: int, others: list[int]) -> LoadSlice:
        first, second = self.rng.sample(others, 2)
        epoch = WorkerEpoch(self.rng.choice([1, 1, 1, 2]))
        spare = HolderRef(
            WorkerKey(WorkerId(f"w{second}"), WorkerEpoch(1)), self.links[second].address, Tier.HOST, stop
        )
        key = WorkerKey(WorkerId(f"w{first}"), epoch)
        return LoadSlice(start, stop, key, self.links[first].name, self.links[first].address, Tier.HOST, (spare,))

    def request(self, documents: list[list[int]]) -> GenerateRequest:
        rng, name = self.rng, f"r{len(self.sinks) + len(self.errands)}"
        prompt = rng.choice(documents)[: rng.randrange(1, 60)]
        prompt = prompt + [rng.randrange(self.kind.vocab) for _ in range(rng.randrange(3))]
        made = make_request(
            name,
            prompt,
            rng.randrange(1, 20),
            temperature=rng.choice(self.kind.temperatures),
            seed=rng.randrange(9),
            ignore_eos=True,
            logprobs=1,
        )
        return replace(made, timeout_ns=rng.choice([60 * SECOND_NS, 60 * SECOND_NS, 60 * SECOND_NS, 5_000_000]))

    def submit(self, documents: list[list[int]]) -> None:
        request, reader = self.request(documents), self.rng.randrange(WORKERS)
        self.give(request, reader, self.plan(reader, len(request.prompt) // BLOCK_TOKENS), "d")
        if self.rng.random() < 0.1:
            self.cores[reader].cancel(request.request_id)

    def give(self, request: GenerateRequest, reader: int, plan: Plan, decision_id: str) -> Collector | None:
        """To a worker, which may refuse it."""
        sink = Collector()
        try:
            self.cores[reader].submit(request, plan, decision_id, sink)
        except (CapacityError, RequestError):
            return None
        self.sinks[f"{request.request_id} {decision_id}"] = (request, sink)
        return sink

    def hand_over(self, documents: list[list[int]]) -> None:
        """One worker gives the first token, another follows the prompt and goes on."""
        request, (first, second) = self.request(documents), self.rng.sample(range(WORKERS), 2)
        blocks = len(request.prompt) // BLOCK_TOKENS
        before, after = self.plan(first, blocks), self.plan(second, blocks)
        whole = LoadSlice(
            0, max(1, blocks), self.cores[first].key, self.links[first].name, self.links[first].address, Tier.HOST
        )
        follow = Plan(PlanKind.LOAD, (whole,), load_deadline_ns=SECOND_NS, stall_ns=100_000_000)
        decision = f"over-{request.request_id}"

        def carry_out() -> None:
            follower = threading.Thread(target=self._follow, args=(second, request, follow, decision))
            follower.start()
            one = replace(request, sampling=replace(request.sampling, max_tokens=1))
            sink = self.give(one, first, before, "first")
            if sink is not None and sink.done.wait(60) and sink.tokens and request.sampling.max_tokens > 1:
                self.cores[second].unfollow(decision)
                self.give(replace(request, generated=tuple(sink.tokens)), second, after, decision)
            self.cores[second].unfollow(decision)
            follower.join()

        self.errands.append(threading.Thread(target=carry_out))
        self.errands[-1].start()

    def _follow(self, worker: int, request: GenerateRequest, plan: Plan, decision_id: str) -> None:
        with contextlib.suppress(CapacityError, UnavailableError):
            self.cores[worker].follow(request, plan, decision_id)

    def disturb(self) -> None:
        """One link gets another shape, or one worker loses all it need not keep."""
        if self.rng.random() < 0.2:
            self.rng.choice(self.cores[:WORKERS]).evict(Selection(idle_ns=0))
            return
        link = self.rng.choice(self.links)
        link.shape(WorkerId(f"w{self.rng.randrange(len(self.cores))}"), self.rng.choice(FAULTS))

    def load_once(self, kind: Kind) -> None:
        """A load that nothing disturbs: whatever went before, loads still bring what they are for."""
        prompt = [self.rng.randrange(kind.vocab) for _ in range(48)]
        whole = LoadSlice(
            0, len(prompt) // BLOCK_TOKENS, self.cores[1].key, self.links[1].name, self.links[1].address, Tier.HOST
        )
        load = Plan(PlanKind.LOAD, (whole,), load_deadline_ns=20 * SECOND_NS, stall_ns=20 * SECOND_NS)
        for worker, plan in ((1, Plan(PlanKind.REDO)), (2, load)):
            name = f"undisturbed-{worker}"
            sink = self.give(make_request(name, prompt, 1, ignore_eos=True, logprobs=1), worker, plan, name)
            assert sink is not None
            sink.result()

    def heal(self) -> None:
        for link in self.links:
            for number in range(len(self.cores)):
                link.shape(WorkerId(f"w{number}"), CLEAR)


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_over_failing_links_end_with_the_right_tokens_and_leave_nothing(seed: int) -> None:
    run_random_requests(FAKE, seed)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))])
def test_random_requests_to_a_real_model_end_with_the_right_tokens_and_leave_nothing(
    torch_kind: Kind, seed: int
) -> None:
    run_random_requests(torch_kind, seed)


def run_random_requests(kind: Kind, seed: int) -> None:
    rng = Random(seed)
    fleet, hub = Fleet(rng, kind), MemoryHub()
    for _ in range(WORKERS + 1):
        fleet.grow(hub)
    documents = [[rng.randrange(kind.vocab) for _ in range(64)] for _ in range(3)]
    for document in documents:
        sink = fleet.give(
            make_request("warm", document, 1, ignore_eos=True), MORTAL, Plan(PlanKind.REDO), str(document)
        )
        assert sink is not None
        sink.result()
    try:
        for number in range(200):
            (fleet.hand_over if rng.random() < 0.1 else fleet.submit)(documents)
            if rng.random() < 0.1:
                fleet.disturb()
            if number == 120:
                fleet.cores[MORTAL].close()
            if rng.random() < 0.3 and fleet.sinks:
                rng.choice(list(fleet.sinks.values()))[1].done.wait(0.05)
        fleet.heal()
        for errand in fleet.errands:
            errand.join(90)
            assert not errand.is_alive(), f"seed {seed}: a hand-over hangs"
        fleet.load_once(kind)
        finished = sum(ended_right(fleet, request, sink, seed) for request, sink in fleet.sinks.values())
        for core, publisher in zip(fleet.cores[:WORKERS], fleet.publishers, strict=False):
            assert core.wait_idle(20 * SECOND_NS), f"seed {seed}: something hangs"
            core.check()
            counts = core.segment.counts()
            assert (counts.referenced, counts.in_flight, core.segment.leases) == (0, 0, 0)
            assert publisher.held == set(core.held_hashes())
            assert publisher.in_device == set(core.device_hashes())
            assert core.failure is None
        assert finished > 100
        assert sum(core.counters().get("loads", 0) for core in fleet.cores) > 10
        assert sum(core.counters().get("tokens_loaded", 0) for core in fleet.cores) > 0
        assert all(core.counters()["device_fills"] > 0 for core in fleet.cores[1:WORKERS]), "the device tier served"
    finally:
        for core in fleet.cores:
            core.close()


def ended_right(fleet: Fleet, request: GenerateRequest, sink: Collector, seed: int) -> bool:
    """Whether a request finished; all it said must be what the reference says, log-probabilities too."""
    who = f"seed {seed}: {request.request_id}"
    try:
        sink.result()
        finished = sink.finish is not FinishReason.CANCELLED
    except (DeadlineError, CapacityError):
        finished = False
    expected = fleet.kind.choices(request)
    if finished:
        assert len(sink.tokens) == len(expected), who
    assert sink.tokens == [choice.token for choice in expected[: len(sink.tokens)]], f"{who} differs"
    for ours, theirs in zip(sink.logprobs, expected, strict=False):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE), f"{who} differs in log-probabilities"
    return finished


def test_a_worker_that_closes_under_load_fails_its_requests_and_nobody_elses() -> None:
    fleet, hub = Fleet(Random(99)), MemoryHub()
    for _ in range(WORKERS):
        fleet.grow(hub)
    documents = [[fleet.rng.randrange(97) for _ in range(64)] for _ in range(3)]
    try:
        for i in range(60):
            fleet.submit(documents)
            if i == 30:
                fleet.cores[0].close()
                fleet.cores[0] = fleet.cores[1]
        ends = {"finished": 0, "failed": 0}
        for request, sink in fleet.sinks.values():
            try:
                tokens = sink.result()
                if sink.finish is not FinishReason.CANCELLED:
                    assert tokens == reference(request)
                    ends["finished"] += 1
            except (UnavailableError, DeadlineError):
                ends["failed"] += 1
        assert ends["finished"] > 20
    finally:
        for core in fleet.cores:
            core.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Three cores; worker 0 holds a document of 64 tokens, worker 1 is the reader of these tests."""
    made, hub = Fleet(Random(7)), MemoryHub()
    for _ in range(WORKERS):
        made.grow(hub, num_blocks=40)
    yield made
    for core in made.cores:
        core.close()


def warm_document(fleet: Fleet) -> list[int]:
    document = [fleet.rng.randrange(97) for _ in range(64)]
    sink = Collector()
    fleet.cores[0].submit(make_request("warm", document, 1), Plan(PlanKind.REDO), "d", sink)
    sink.result()
    return document


def load_from_first(fleet: Fleet, stop: int) -> Plan:
    key = WorkerKey(WorkerId("w0"), WorkerEpoch(1))
    piece = LoadSlice(0, stop, key, "memory", fleet.links[0].address, Tier.HOST)
    return Plan(PlanKind.LOAD, (piece,), load_deadline_ns=20 * SECOND_NS, stall_ns=10 * SECOND_NS)


def test_pages_of_a_cancelled_request_return_once_its_load_is_terminal(fleet: Fleet) -> None:
    document, reader = warm_document(fleet), fleet.cores[1]
    fleet.links[1].shape(WorkerId("w0"), LinkShape(stalled=True))
    sink = Collector()
    reader.submit(make_request("gone", document, 4), load_from_first(fleet, 16), "d", sink)
    assert reader.status()["loads_in_flight"] == 1
    assert reader.segment.counts().in_flight == 16
    reader.cancel(RequestId("gone"))
    sink.result()
    assert sink.finish is FinishReason.CANCELLED
    assert reader.wait_idle(10 * SECOND_NS)
    assert reader.segment.counts().free == 40
    assert reader.counters()["loads_given_up"] == 1


def test_a_holder_that_closes_in_mid_load_costs_time_and_no_token(fleet: Fleet) -> None:
    document, reader = warm_document(fleet), fleet.cores[1]
    block_bytes = reader.segment.config.block_bytes
    fleet.links[1].shape(WorkerId("w0"), LinkShape(rate_bytes_per_s=100 * block_bytes))
    request, sink = make_request("robbed", document, 4), Collector()
    reader.submit(request, load_from_first(fleet, 16), "d", sink)
    fleet.cores[0].close()
    assert sink.result() == reference(request)
    assert sink.stats is not None
    assert sink.stats.tokens_redone > 0
    assert sink.stats.load_failures


@pytest.mark.parametrize("kind", [PlanKind.LOAD, PlanKind.SPLIT])
@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(64, 1), (66, 1), (64, 40), (66, 40)])
def test_what_was_computed_past_a_load_that_does_not_come_is_kept(
    fleet: Fleet, kind: PlanKind, prompt_tokens: int, max_tokens: int
) -> None:
    document, reader = warm_document(fleet), fleet.cores[1]
    reader.observe_prefills([PrefillSample(8, 0, 2_000_000), PrefillSample(64, 0, 10_000_000)])
    fleet.links[1].shape(WorkerId("w0"), LinkShape(stalled=True))
    plan = load_from_first(fleet, 16)._replace(kind=kind, predicted_load_ns=1_000_000)
    request, sink = make_request("kept", [*document, 1, 2][:prompt_tokens], max_tokens, ignore_eos=True), Collector()
    reader.submit(request, plan, "d", sink)
    assert sink.result() == reference(request)
    assert reader.wait_idle(10 * SECOND_NS)
    assert len(reader.held_hashes()) == (prompt_tokens + max_tokens - 1) // BLOCK_TOKENS
    reader.check()


def test_what_is_computed_beside_a_load_is_offered_at_once_to_who_follows(fleet: Fleet) -> None:
    document, reader = warm_document(fleet), fleet.cores[1]
    reader.observe_prefills([PrefillSample(8, 0, 2_000_000), PrefillSample(64, 0, 10_000_000)])
    fleet.links[1].shape(WorkerId("w0"), LinkShape(stalled=True))
    plan = load_from_first(fleet, 16)._replace(kind=PlanKind.SPLIT, predicted_load_ns=10_000_000)
    request = replace(make_request("over", document, 1, ignore_eos=True), hands_over=True)
    done, offered = Collector(), []

    def sink(item: TokenChunk | KVPoolError) -> None:
        offered.append(len(reader.held_hashes()))
        done(item)

    reader.submit(request, plan, "d", sink)
    assert done.result() == reference(request)
    assert offered[0] > 0, "the front, before the first token"
    assert reader.wait_idle(10 * SECOND_NS)
    assert len(reader.held_hashes()) == 16


@pytest.mark.parametrize("kind", [PlanKind.LOAD, PlanKind.SPLIT])
def test_what_one_computes_beside_a_load_another_does_not_compute_again(fleet: Fleet, kind: PlanKind) -> None:
    document, reader = warm_document(fleet), fleet.cores[1]
    engine = reader._parts.engine
    assert isinstance(engine, WatchedFake)
    reader._scheduler._config = SchedulerConfig()
    reader.observe_prefills([PrefillSample(8, 0, 80_000_000), PrefillSample(64, 0, 640_000_000)])
    fleet.links[1].shape(WorkerId("w0"), LinkShape(stalled=True))
    plan = load_from_first(fleet, 16)._replace(kind=kind, predicted_load_ns=900_000_000)
    requests = [make_request("long", document, 6, ignore_eos=True)]
    requests.append(make_request("short", [*document[:16], 9], 6, ignore_eos=True))
    sinks = [Collector() for _ in requests]
    engine.running.clear()
    reader.submit(requests[0], plan, "d", sinks[0])
    wait_until(lambda: reader.status()["running"] == 1, 20, "the first chunk is computed")
    reader.submit(requests[1], Plan(PlanKind.REDO), "d", sinks[1])
    engine.running.set()
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.result() == reference(request)
    assert engine.computed_tokens == 64 + 5 + 1 + 5
    assert reader.wait_idle(10 * SECOND_NS)
    reader.check()


def test_a_load_that_cannot_even_start_is_redone(fleet: Fleet) -> None:
    document, reader = warm_document(fleet), fleet.cores[1]
    plan = load_from_first(fleet, 16)._replace(load_deadline_ns=0)
    request, sink = make_request("undated", document, 4), Collector()
    reader.submit(request, plan, "d", sink)
    assert sink.result() == reference(request)
    assert sink.stats is not None
    assert (sink.stats.plan, sink.stats.load_failures) == ("redo", ("invalid_request",))


def test_a_load_past_its_deadline_is_counted_and_redone(fleet: Fleet) -> None:
    document, reader = warm_document(fleet), fleet.cores[1]
    fleet.links[1].shape(WorkerId("w0"), LinkShape(stalled=True))
    plan = load_from_first(fleet, 16)._replace(load_deadline_ns=30_000_000, predicted_load_ns=SECOND_NS)
    request, sink = make_request("late", document, 4), Collector()
    reader.submit(request, plan, "d", sink)
    assert sink.result() == reference(request)
    assert reader.wait_idle(10 * SECOND_NS)
    assert sum(count for name, count in reader.counters().items() if name.startswith("load_failures.")) == 1
