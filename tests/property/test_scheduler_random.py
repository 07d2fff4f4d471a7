"""Random requests, cancels, loads that fail, pins and evictions against the fake engine: outputs never change.

One seed is one run, one thread, no clock. The shell of `workers.engine_loop` is replayed here step by step so that
invariants can be checked after every one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from kvpool.config import SchedulerConfig
from kvpool.errors import CapacityError
from kvpool.hashing import block_hashes
from kvpool.plan import LoadSlice, Plan, PlanKind
from kvpool.request import GenerateRequest
from kvpool.store.arena import Arena
from kvpool.store.segment import Segment, SegmentConfig
from kvpool.types import Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.worker_support import FakeEngine, RecordingPublisher, kv_of, make_request, namespace, reference
from workers.block_table import BlockTable
from workers.bridge import Bridge
from workers.engine.base import SequenceSlice
from workers.gate import Gate
from workers.scheduler import Scheduler
from workers.sequence import Phase, Sequence
from workers.step import LoadOrder, Step

BLOCK_TOKENS = 4
PEER = WorkerKey(WorkerId("peer"), WorkerEpoch(1))


@dataclass
class Load:
    """A scripted load: blocks arrive in a random order, it may stop early, and ends when the script says so."""

    order: LoadOrder
    coming: list[int]
    arrived: set[int] = field(default_factory=set)
    cancelled: bool = False


class Harness:
    """One worker, driven by one seed."""

    def __init__(self, seed: int, num_blocks: int, **limits: int) -> None:
        self.rng = Random(seed)
        self.now_ns = 0
        self.engine = FakeEngine(block_tokens=BLOCK_TOKENS, max_views=limits.pop("max_views", 64))
        block_bytes = self.engine.layout.block_bytes
        self.arena = Arena(num_blocks * block_bytes)
        self.publisher = RecordingPublisher()
        self.segment = Segment(
            SegmentConfig(block_bytes, num_blocks, lease_ns=50), self.arena.memory, self.publisher, lambda: self.now_ns
        )
        self.engine.attach_pages(self.arena.memory, num_blocks)
        self.gate = Gate(BLOCK_TOKENS)
        self.scheduler = Scheduler(SchedulerConfig(**limits), self.segment, self.gate)
        self.bridge = Bridge(self.engine, self.segment)
        self.loads: dict[int, Load] = {}
        self.landed: list[Sequence] = []
        self.live: dict[str, Sequence] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.requests: dict[str, GenerateRequest] = {}
        self.leases: list[int] = []
        self.documents = [[self.rng.randrange(97) for _ in range(60)] for _ in range(3)]

    def submit(self) -> None:
        rng = self.rng
        name = f"r{len(self.requests)}"
        document = rng.choice(self.documents)
        prompt = document[: rng.randrange(1, 50)] + [rng.randrange(97) for _ in range(rng.randrange(4))]
        max_tokens = rng.randrange(1, 16)
        request = make_request(name, prompt, max_tokens, temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(9))
        if (len(prompt) + max_tokens) // BLOCK_TOKENS > self.segment.total_blocks:
            return
        table = BlockTable(namespace(block_tokens=BLOCK_TOKENS).root(), BLOCK_TOKENS)
        timeout_ns = 10**9 if rng.random() < 0.9 else rng.randrange(1, 60)
        sequence = Sequence(request, self.plan(len(prompt)), "d", table, self.now_ns, self.now_ns + timeout_ns)
        try:
            order = self.scheduler.add(sequence, self.now_ns)
        except CapacityError:
            return
        self.requests[name] = request
        self.live[name] = sequence
        self.outputs[name] = []
        if order is not None:
            self.start(order)

    def plan(self, prompt_tokens: int) -> Plan:
        blocks = prompt_tokens // BLOCK_TOKENS
        if not blocks or self.rng.random() < 0.4:
            return Plan(PlanKind.REDO)
        start = self.rng.randrange(blocks)
        piece = LoadSlice(start, self.rng.randrange(start + 1, blocks + 1), PEER, "memory", b"", Tier.HOST)
        pieces = (piece, piece._replace(stop=blocks + 2)) if self.rng.random() < 0.2 else (piece,)  # a wrong router
        kind = PlanKind.SPLIT if start else PlanKind.LOAD
        return Plan(kind, pieces, load_deadline_ns=self.rng.randrange(1, 60), stall_ns=10)

    def start(self, order: LoadOrder) -> None:
        coming = list(order.pages)
        if self.rng.random() < 0.5:
            self.rng.shuffle(coming)
        self.loads[order.flight] = Load(order, coming[: self.rng.randrange(len(coming) + 1)])

    def arrive(self) -> None:
        """Some bytes land, some loads end; a cancelled load may still write before it is terminal."""
        for number, load in list(self.loads.items()):
            for _ in range(self.rng.randrange(3)):
                if load.coming:
                    self.write(load, load.coming.pop(0))
            self.scheduler.progress(number, load.arrived)
            if (load.cancelled or not load.coming) and self.rng.random() < 0.3:
                self.land(number)

    def write(self, load: Load, index: int) -> None:
        page, tokens = load.order.pages[index], load.order.sequence.tokens
        content = kv_of(tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS], index * BLOCK_TOKENS)
        start = self.segment.offset(page)
        self.arena.memory[start : start + len(content.tobytes())] = content.tobytes()
        load.arrived.add(index)

    def land(self, number: int) -> None:
        del self.loads[number]
        sequence = self.scheduler.land(number)
        if sequence is not None:
            self.landed.append(sequence)

    def cancel(self) -> None:
        if self.live:
            self.end(self.rng.choice(sorted(self.live)), "cancelled")

    def pin(self) -> None:
        hashes = self.segment.held_hashes()
        if hashes and self.rng.random() < 0.5:
            self.leases.append(self.segment.pin(PEER, self.rng.sample(hashes, min(3, len(hashes))))[0])
        elif self.leases:
            self.segment.unpin(self.leases.pop(self.rng.randrange(len(self.leases))))

    def end(self, name: str, why: str) -> None:
        slot = self.scheduler.remove(self.live.pop(name))
        if slot is not None:
            self.engine.close(slot)
        self.ended[name] = why

    def step(self) -> bool:
        step = self.scheduler.plan_step(self.now_ns)
        for order in step.loads:
            self.start(order)
        for slot in step.closed_slots:
            self.engine.close(slot)
        for number in step.cancelled_flights:
            self.loads[number].cancelled = True
        for sequence in step.expired:
            self.end(sequence.request_id, "expired")
        self.run(step)
        owed = [sequence for sequence in step.owed if sequence.slot is not None]
        for sequence in owed:
            self.scheduler.rescue(sequence)
        for sequence in (*self.landed, *owed):  # after the step, as the engine loop does
            self.bridge.seal(sequence)
        self.landed.clear()
        self.check()
        return bool(step.work)

    def run(self, step: Step) -> None:
        assert sum(work.count for work in step.work) <= self.scheduler._config.max_step_tokens
        prefills = [work for work in step.work if not work.sequence.decoding]
        if len(prefills) < len(step.work):
            budget = min(self.scheduler._config.max_step_tokens, self.scheduler._config.mixed_prefill_tokens)
            filled = sum(len(work.fill) for work in prefills)
            assert filled <= self.gate.fill_blocks(budget) + len(prefills), "each may fill one at least"
        batch = []
        for work in step.work:
            if work.sequence.slot is None:
                try:
                    work.sequence.slot = self.engine.open(work.sequence.view_capacity_tokens)
                except CapacityError:
                    assert self.scheduler.defer(work.sequence)
                    continue
            self.bridge.fill(work)
            batch.append(work)
        for work in batch:
            sequence, stop = work.sequence, work.start + work.count
            result = None
            if work.count:
                part = SequenceSlice(
                    sequence.slot or 0,
                    tuple(sequence.tokens[work.start : stop]),
                    work.start,
                    sequence.request.sampling if work.samples else None,
                )
                result = self.engine.step([part])[0]
            self.scheduler.ran(work)
            if result is not None:
                sequence.tally.first_token_ns = self.now_ns
                sequence.append(result.token)
                self.outputs[sequence.request_id].append(result.token)
        for work in batch:
            ends = work.sequence.generated_tokens >= work.sequence.request.sampling.max_tokens
            if ends or self.rng.random() < 0.3:
                self.scheduler.rescue(work.sequence)
            self.bridge.seal(work.sequence)
            if ends:
                self.end(work.sequence.request_id, "length")

    def check(self) -> None:
        self.segment.check()
        self.scheduler.check()
        assert self.publisher.held == set(self.segment.held_hashes())
        assert self.engine.open_views == sum(sequence.slot is not None for sequence in self.live.values())
        for sequence in self.live.values():
            table = sequence.table
            assert table.chain == list(block_hashes(sequence.tokens, namespace(block_tokens=BLOCK_TOKENS)))

    def finish(self) -> None:
        """Let every load end and every request finish; nothing may hang. Leases of readers that died run out."""
        for _ in range(4000):
            self.now_ns += 1
            for number in list(self.loads):
                self.land(number)
            self.step()
            if not self.live and not self.loads:
                self.now_ns += self.segment.config.lease_ns
                assert self.segment.available_blocks == self.segment.total_blocks
                return
        pytest.fail(f"requests hang: {sorted(self.live)}")


def run_seed(seed: int) -> Harness:
    """A random run: everything may happen, then everything heals."""
    shape = Random(seed * 7919)
    harness = Harness(
        seed,
        num_blocks=shape.choice([17, 20, 40, 200]),
        max_step_tokens=shape.choice([1, 3, 8, 64]),
        mixed_prefill_tokens=shape.choice([1, 8]),
        max_running=shape.choice([1, 3, 8]),
        max_waiting=shape.choice([2, 16]),
        max_views=shape.choice([1, 2, 64]),
    )
    if seed % 2:
        harness.gate.observe(1, shape.choice([1, 3, 100]))
    for _ in range(150):
        harness.now_ns += harness.rng.randrange(3)
        action = harness.rng.random()
        if action < 0.25:
            harness.submit()
        elif action < 0.30:
            harness.cancel()
        elif action < 0.40:
            harness.pin()
        harness.arrive()
        harness.step()
    harness.finish()
    return harness


@pytest.mark.parametrize("seed", range(60))
def test_outputs_equal_the_reference_whatever_happens_to_loads_pages_and_neighbours(seed: int) -> None:
    harness = run_seed(seed)
    finished = 0
    for name, why in harness.ended.items():
        expected = reference(harness.requests[name])
        if why == "length":
            finished += 1
            assert harness.outputs[name] == expected, f"{name} differs"
        else:
            assert harness.outputs[name] == expected[: len(harness.outputs[name])], f"{name} differs before its end"
    assert finished > 0
    counts = harness.segment.counts()
    assert (counts.referenced, counts.in_flight, counts.pinned) == (0, 0, 0)
    assert harness.scheduler.flights == 0
    assert harness.engine.open_views == 0


def test_random_runs_reach_the_interesting_paths() -> None:
    runs = [run_seed(seed) for seed in (*range(11), 20)]
    assert sum(run.scheduler.preemptions for run in runs) > 0
    assert sum(run.segment.totals()["evictions"] for run in runs) > 0
    sequences = {why for run in runs for why in run.ended.values()}
    assert sequences == {"length", "cancelled", "expired"}
    assert Phase.GONE.value == "gone"
