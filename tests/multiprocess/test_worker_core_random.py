"""Several cores, random requests, shaped links and faults: every finished output is right and nothing is left over.

Threads make a run not repeatable to the step, but every choice of the test comes from the seed. The safety phase does
everything at once; then links heal and every request must end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from kvpool.config import EngineConfig, SchedulerConfig, WorkerConfig
from kvpool.errors import CapacityError, DeadlineError, RequestError, UnavailableError
from kvpool.plan import HolderRef, LoadSlice, Plan, PlanKind
from kvpool.request import FinishReason, GenerateRequest
from kvpool.transfer.loader import Loader
from kvpool.transport.memory import MemoryHub, MemoryTransport
from kvpool.transport.shaping import CLEAR, LinkShape, ShapingTransport
from kvpool.types import RequestId, Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.worker_support import Collector, FakeEngine, RecordingPublisher, make_request, namespace, reference
from workers.core import CoreParts, WorkerCore

BLOCK_TOKENS = 4
WORKERS = 3
SECOND_NS = 1_000_000_000
FAULTS = (
    CLEAR,
    LinkShape(rate_bytes_per_s=2e5),
    LinkShape(delay_ns=2_000_000),
    LinkShape(loss=0.2),
    LinkShape(corruption=0.3),
    LinkShape(stalled=True),
)


@dataclass
class Fleet:
    """Three cores that can load from each other over links with faults."""

    rng: Random
    cores: list[WorkerCore] = field(default_factory=list)
    links: list[ShapingTransport] = field(default_factory=list)
    publishers: list[RecordingPublisher] = field(default_factory=list)
    sinks: dict[str, tuple[GenerateRequest, Collector]] = field(default_factory=dict)

    def grow(self, hub: MemoryHub, num_blocks: int | None = None) -> None:
        number = len(self.cores)
        link, publisher = ShapingTransport(MemoryTransport(hub), seed=number), RecordingPublisher()
        held: list[WorkerCore] = []
        core = WorkerCore(
            CoreParts(
                key=WorkerKey(WorkerId(f"w{number}"), WorkerEpoch(1)),
                engine=FakeEngine(block_tokens=BLOCK_TOKENS, token_s=self.rng.choice([0.0, 2e-5])),
                config=WorkerConfig(
                    engine=EngineConfig(num_blocks=num_blocks or self.rng.choice([24, 40, 120])),
                    scheduler=SchedulerConfig(
                        max_step_tokens=self.rng.choice([8, 64]), max_running=self.rng.choice([2, 8]), max_waiting=32
                    ),
                ),
                namespace_for=lambda tenant: namespace(tenant, BLOCK_TOKENS),
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
        self.cores.append(core)
        self.links.append(link)
        self.publishers.append(publisher)

    def plan(self, reader: int, blocks: int) -> Plan:
        """Any plan, true or stale: the router's view may be wrong in every way."""
        rng = self.rng
        if blocks < 1 or rng.random() < 0.3:
            return Plan(PlanKind.REDO)
        start = rng.choice([0, rng.randrange(blocks)])
        cut = rng.randrange(start, blocks + 1)
        others = [number for number in range(WORKERS) if number != reader]
        parts = [self.part(lo, hi, others) for lo, hi in ((start, cut), (cut, blocks)) if lo < hi]
        return Plan(
            rng.choice([PlanKind.LOAD, PlanKind.SPLIT]),
            tuple(parts),
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
        return LoadSlice(start, stop, key, "memory", self.links[first].address, Tier.HOST, (spare,))

    def submit(self, documents: list[list[int]]) -> None:
        rng, name = self.rng, f"r{len(self.sinks)}"
        prompt = rng.choice(documents)[: rng.randrange(1, 60)] + [rng.randrange(97) for _ in range(rng.randrange(3))]
        made = make_request(
            name, prompt, rng.randrange(1, 20), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(9)
        )
        timeout_ns = rng.choice([60 * SECOND_NS, 60 * SECOND_NS, 60 * SECOND_NS, 5_000_000])
        request = GenerateRequest(made.request_id, made.prompt, made.sampling, timeout_ns=timeout_ns)
        reader = rng.randrange(WORKERS)
        sink = Collector()
        try:
            self.cores[reader].submit(request, self.plan(reader, len(prompt) // BLOCK_TOKENS), "d", sink)
        except (CapacityError, RequestError):
            return
        self.sinks[name] = (request, sink)
        if rng.random() < 0.1:
            self.cores[reader].cancel(RequestId(name))

    def disturb(self) -> None:
        """One link gets another shape."""
        link = self.rng.choice(self.links)
        link.shape(WorkerId(f"w{self.rng.randrange(WORKERS)}"), self.rng.choice(FAULTS))

    def heal(self) -> None:
        for link in self.links:
            for number in range(WORKERS):
                link.shape(WorkerId(f"w{number}"), CLEAR)


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_over_failing_links_end_with_the_right_tokens_and_leave_nothing(seed: int) -> None:
    rng = Random(seed)
    fleet, hub = Fleet(rng), MemoryHub()
    for _ in range(WORKERS):
        fleet.grow(hub)
    documents = [[rng.randrange(97) for _ in range(64)] for _ in range(3)]
    finished = 0
    try:
        for _ in range(200):
            fleet.submit(documents)
            if rng.random() < 0.1:
                fleet.disturb()
            if rng.random() < 0.3 and fleet.sinks:
                rng.choice(list(fleet.sinks.values()))[1].done.wait(0.05)
        fleet.heal()
        for request, sink in fleet.sinks.values():
            expected = reference(request)
            try:
                tokens = sink.result()
            except (DeadlineError, CapacityError):
                tokens = None
            if tokens is not None and sink.finish is not FinishReason.CANCELLED:
                finished += 1
                assert tokens == expected, f"seed {seed}: {request.request_id} differs"
            assert sink.tokens == expected[: len(sink.tokens)], f"seed {seed}: {request.request_id} differs"
        for core, publisher in zip(fleet.cores, fleet.publishers, strict=True):
            assert core.wait_idle(20 * SECOND_NS), f"seed {seed}: something hangs"
            core.check()
            counts = core.segment.counts()
            assert (counts.referenced, counts.in_flight, core.segment.leases) == (0, 0, 0)
            assert publisher.held == set(core.held_hashes())
            assert core.failure is None
        assert finished > 100
        assert sum(core.counters()["loads"] for core in fleet.cores) > 10
        assert sum(core.counters().get("tokens_loaded", 0) for core in fleet.cores) > 0
    finally:
        for core in fleet.cores:
            core.close()


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


def test_a_load_that_cannot_even_start_is_redone(fleet: Fleet) -> None:
    document, reader = warm_document(fleet), fleet.cores[1]
    plan = replace(load_from_first(fleet, 16), load_deadline_ns=0)
    request, sink = make_request("undated", document, 4), Collector()
    reader.submit(request, plan, "d", sink)
    assert sink.result() == reference(request)
    assert sink.stats is not None
    assert (sink.stats.plan, sink.stats.load_failures) == ("redo", ("invalid_request",))


def test_a_load_past_its_deadline_is_counted_and_redone(fleet: Fleet) -> None:
    document, reader = warm_document(fleet), fleet.cores[1]
    fleet.links[1].shape(WorkerId("w0"), LinkShape(stalled=True))
    plan = replace(load_from_first(fleet, 16), load_deadline_ns=30_000_000, predicted_load_ns=SECOND_NS)
    request, sink = make_request("late", document, 4), Collector()
    reader.submit(request, plan, "d", sink)
    assert sink.result() == reference(request)
    assert reader.wait_idle(10 * SECOND_NS)
    assert sum(count for name, count in reader.counters().items() if name.startswith("load_failures.")) == 1
