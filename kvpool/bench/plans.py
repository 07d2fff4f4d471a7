"""What the plans are worth when a worker carries them out: redo, load, split, stripes, early starts and broken loads.

The real default model, three worker cores in this process, the memory transport behind links shaped to multiples of
B*, the bandwidth at which loading the prefix takes as long as redoing it (``docs/science.md``). B* is measured first,
so that ratios hold on any machine. Every time is a time to the first token of one prompt whose whole prefix the
holders have and the reader does not.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from random import Random

from kvpool.bench import roles
from kvpool.bench.report import Row, interleave, spread
from kvpool.config import DEFAULT_MODEL, EngineConfig, SchedulerConfig, WorkerConfig
from kvpool.errors import KVPoolError
from kvpool.hashing import Namespace
from kvpool.plan import REDO, LoadSlice, Plan, PlanKind
from kvpool.reports import WorkerReport
from kvpool.request import GenerateRequest, SamplingParams, TokenChunk
from kvpool.transfer.loader import Loader
from kvpool.transport.memory import MemoryHub, MemoryTransport
from kvpool.transport.shaping import LinkShape, ShapingTransport
from kvpool.types import BlockHash, RequestId, Tier, WorkerEpoch, WorkerId, WorkerKey
from router.striping import deal
from workers.core import CoreParts, WorkerCore
from workers.gate import Gate, LoadView, Rest, Ruling, Verdict

BLOCK_TOKENS = 16
CHUNK_TOKENS = 128
PREFIX_TOKENS = 1500
QUICK_PREFIX_TOKENS = 512
SPLIT_BAR = 1 / 0.65
QUEUE_BAR = 1 / 0.8
STRIPE_BAR = 1 / 0.6
QUEUE_LENGTH = 8
TRIALS, QUICK_TRIALS = 50, 3
STALL_S = 0.2
WAIT_S = 120.0
READER = 2


def run(*, quick: bool, peers: bool) -> list[Row]:
    """Measure; minutes on two cores, with ``quick`` about one at a shorter prefix. No peers to install."""
    del peers
    rig = Rig(QUICK_PREFIX_TOKENS if quick else PREFIX_TOKENS)
    runs = 3 if quick else 5
    try:
        rows = [_split_at_balance(rig, runs)]
        for multiple in (0.3, 3.0) if quick else (0.05, 0.3, 3.0, 20.0, 50.0):
            rows.append(_never_worse(rig, multiple, runs))
        rows += [_early_start(rig, runs), _striped(rig, runs)]
    finally:
        rig.close()
    rig = Rig(QUICK_PREFIX_TOKENS)  # many trials
    try:
        rows += [_broken_load(rig, how, QUICK_TRIALS if quick else TRIALS) for how in ("dies", "stalls")]
    finally:
        rig.close()
    return rows + roles.run(quick=quick, peers=False)


def _split_at_balance(rig: Rig, runs: int) -> Row:
    rig.shape(1.0)
    times = interleave(
        [lambda: rig.ttft(rig.split(1.0)), lambda: rig.ttft(REDO), lambda: rig.pure_load(1.0)], runs=runs
    )
    split, redo, load = (statistics.median(taken) for taken in times)
    name = f"TTFT, {rig.prefix_tokens} tokens over a link of B*: split"
    return _cost(name, split, min(redo, load), "better of redo and load", SPLIT_BAR, times[0])


def _never_worse(rig: Rig, multiple: float, runs: int) -> Row:
    """The plan that the formulas choose against the better pure one, one chunk and 5 %."""
    rig.shape(multiple)
    chosen = rig.split(multiple) if 0.1 <= multiple <= 10 else rig.load(multiple) if multiple > 1 else REDO
    pure = (lambda: rig.ttft(REDO)) if multiple < 1 else (lambda: rig.pure_load(multiple))
    times = interleave([lambda: rig.ttft(chosen), pure], runs=runs)
    ours, bound = statistics.median(times[0]), statistics.median(times[1]) * 1.05 + rig.chunk_s
    name = f"TTFT over a link of {multiple:g} B*: {chosen.kind.value}"
    return _cost(name, ours, bound, "better pure plan + one chunk + 5 %", 1.0, times[0])


def _broken_load(rig: Rig, how: str, trials: int) -> Row:
    """A holder dies or stalls at a random point of a load; nobody else has the blocks."""
    rng = Random(7)
    taken: list[float] = []
    redo: list[float] = []
    for _ in range(trials):
        rig.shape(3.0)
        redo.append(rig.ttft(REDO))
        timer = threading.Timer(rng.uniform(0, rig.redo_s / 3), rig.kill if how == "dies" else rig.stall)
        timer.start()
        taken.append(rig.ttft(rig.load(3.0)))
        timer.join()
    bound = max(redo) + rig.chunk_s + STALL_S  # worst against worst: a machine that hiccups hits both
    name = f"worst TTFT of {trials}, {rig.prefix_tokens} tokens, when the holder {how} in mid-load"
    return _cost(name, max(taken), bound, "worst redo + one chunk + notice", 1.0, taken)


def _early_start(rig: Rig, runs: int) -> Row:
    """Requests that load half of their prompt and compute the rest, all at once; against loads that begin only when
    the request before has its first token."""
    half = rig.prefix_tokens // 8
    prompts = [(*rig.warm(rig.tokens(half), (0,)), *rig.tokens(half)) for _ in range(QUEUE_LENGTH)]
    rig.shape(1.0)
    means: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(runs):
        for early, taken in means.items():
            taken.append(rig.queue(prompts, early=early))
    name = f"mean TTFT of a queue of {QUEUE_LENGTH}, loads from arrival on"
    ours, late = (statistics.median(taken) for taken in means.values())
    return _cost(name, ours, late, "loads from the head of the queue", QUEUE_BAR, means[True])


def _striped(rig: Rig, runs: int) -> Row:
    rig.shape(0.5)
    times = interleave([lambda: rig.pure_load(0.5, holders=(0, 1)), lambda: rig.pure_load(0.5)], runs=runs)
    ours, single = (statistics.median(taken) for taken in times)
    return _cost("TTFT loaded from two holders of B*/2 each", ours, single, "one holder of B*/2", STRIPE_BAR, times[0])


def _cost(name: str, ours: float, reference: float, against: str, bar: float, taken: Sequence[float]) -> Row:
    return Row(
        name,
        ours * 1e3,
        reference * 1e3,
        "ms",
        reference_name=against,
        bar=bar,
        higher_is_better=False,
        runs=len(taken),
        spread=spread(taken),
    )


class _Gate(Gate):
    """The worker's gate, which can be told to wait for every load, so that a pure load can be measured."""

    patient = False

    def rule(self, view: LoadView, rest: Rest, now_ns: int, *, idle: bool) -> Ruling:
        if self.patient and now_ns < view.deadline_ns:
            return Ruling(Verdict.WAIT)
        return super().rule(view, rest, now_ns, idle=idle)


class _FirstToken:
    """A sink that knows when the first token came."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.token: int | None = None
        self.error: KVPoolError | None = None
        self.first, self.done = threading.Event(), threading.Event()

    def __call__(self, item: TokenChunk | KVPoolError) -> None:
        if not self.first.is_set():
            self.at_s = time.perf_counter()
            self.first.set()
        if isinstance(item, TokenChunk) and item.tokens and self.token is None:
            self.token = item.tokens[0]
        if isinstance(item, KVPoolError):
            self.error = item
            self.done.set()
        elif item.finish is not None:
            self.done.set()

    def wait(self) -> float:
        """When the first token came; raises the request's error."""
        if not self.done.wait(WAIT_S):
            raise TimeoutError("a measured request hangs")
        if self.error is not None:
            raise self.error
        return self.at_s


class _Silent:
    """A publisher that tells nobody: these workers know each other from the plans."""

    def stored(self, tier: Tier, hashes: Sequence[BlockHash], *, linked: bool = False) -> None:
        """Ignored."""

    def removed(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Ignored."""

    def report(self, report: WorkerReport) -> None:
        """Ignored."""


class Rig:
    """Two holders and a reader over shaped links; the prefix is warm on both holders."""

    def __init__(self, prefix_tokens: int) -> None:
        self.prefix_tokens = prefix_tokens
        self._rng = Random(3)
        self._hub = MemoryHub()
        self._numbers = 0
        self._token: int | None = None  # what every plan must answer to the prompt
        self._gate = _Gate(BLOCK_TOKENS)
        self.cores: list[WorkerCore] = []
        self.links: list[ShapingTransport] = []
        for number in range(3):
            self._grow(number)
        self._reader, self._link = self.cores[READER], self.links[READER]
        self.prompt = self.warm(self.tokens(prefix_tokens), (0, 1))
        self._blocks = (prefix_tokens - 1) // BLOCK_TOKENS
        self.ttft(REDO)
        self.redo_s = statistics.median(self.ttft(REDO) for _ in range(3))
        self.chunk_s = self.redo_s * CHUNK_TOKENS / prefix_tokens

    def _grow(self, number: int) -> None:
        from workers.engine.models import resolve_model
        from workers.engine.torch_engine import TorchEngine

        engine = TorchEngine(resolve_model(DEFAULT_MODEL).path, block_tokens=BLOCK_TOKENS)
        layout = engine.layout
        space = Namespace(layout.model, layout.dtype, layout.fingerprint(), BLOCK_TOKENS)
        link = ShapingTransport(MemoryTransport(self._hub))
        num_blocks = 3 * self.prefix_tokens // BLOCK_TOKENS
        core = WorkerCore(
            CoreParts(
                key=_key(number),
                engine=engine,
                config=WorkerConfig(
                    engine=EngineConfig(num_blocks=num_blocks), scheduler=SchedulerConfig(max_step_tokens=CHUNK_TOKENS)
                ),
                namespace_for=lambda tenant: space,
                publisher=_Silent(),
                transport=link,
                make_loader=lambda started: Loader(
                    started, on_suspect=lambda holder, code: None, on_sample=lambda sample: None
                ),
                gate=self._gate if number == READER else None,
            )
        )
        self.cores.append(core)
        self.links.append(link)

    def close(self) -> None:
        """Release everything."""
        for core in self.cores:
            core.close()

    def tokens(self, count: int) -> tuple[int, ...]:
        """A random prompt."""
        return tuple(self._rng.randrange(100, 40_000) for _ in range(count))

    def warm(self, prompt: tuple[int, ...], holders: Sequence[int]) -> tuple[int, ...]:
        """Compute a prompt on the holders; returns it."""
        for number in holders:
            sink = self._submit(self.cores[number], prompt, REDO)
            sink.wait()
        return prompt

    # -- links

    def shape(self, multiple: float) -> None:
        """Give both holders' links ``multiple`` times B*."""
        prefix_bytes = self._blocks * self._reader.segment.config.block_bytes
        for number in range(READER):
            self._link.shape(WorkerId(f"w{number}"), LinkShape(rate_bytes_per_s=multiple * prefix_bytes / self.redo_s))

    def stall(self) -> None:
        """The first holder's link moves nothing more."""
        self._link.shape(WorkerId("w0"), LinkShape(stalled=True))

    def kill(self) -> None:
        """The first holder is gone; what is read from it fails at once."""
        self._link.forget(_key(0))

    # -- plans

    def load(self, multiple: float, holders: Sequence[int] = (0,)) -> Plan:
        """Load everything, a part from each holder."""
        return self._plan(PlanKind.LOAD, 0, self.redo_s / multiple / len(holders), holders)

    def split(self, multiple: float) -> Plan:
        """Redo the front while the tail loads; the point where both meet at constant speeds."""
        load_s = self.redo_s / multiple
        front = round(self._blocks * load_s / (load_s + self.redo_s))
        return self._plan(PlanKind.SPLIT, min(front, self._blocks - 1), load_s * (1 - front / self._blocks), (0,))

    def _plan(self, kind: PlanKind, start: int, load_s: float, holders: Sequence[int], stop: int | None = None) -> Plan:
        stop = self._blocks if stop is None else stop
        count = len(holders)
        shares = [(stop - start) * (n + 1) // count - (stop - start) * n // count for n in range(count)]
        slices = tuple(
            LoadSlice(low, high, _key(holders[who]), "memory", self.links[holders[who]].address, Tier.HOST)
            for low, high, who in deal(start, stop, shares)
        )
        load_ns = int(load_s * 1e9)
        return Plan(
            kind,
            slices,
            load_deadline_ns=max(3 * load_ns, 1_000_000_000),
            stall_ns=int(STALL_S * 1e9),
            predicted_load_ns=load_ns,
        )

    # -- measured runs

    def ttft(self, plan: Plan) -> float:
        """Seconds to the first token on the reader, which holds nothing at first."""
        self._forget()
        start_s = time.perf_counter()
        sink = self._submit(self._reader, self.prompt, plan)
        taken_s = sink.wait() - start_s
        self._token = sink.token if self._token is None else self._token
        if sink.token != self._token:
            raise AssertionError(f"a {plan.kind.value} answered {sink.token}, a redo {self._token}")
        return taken_s

    def pure_load(self, multiple: float, holders: Sequence[int] = (0,)) -> float:
        """As `ttft`, waiting for the whole load."""
        self._gate.patient = True
        try:
            return self.ttft(self.load(multiple, holders))
        finally:
            self._gate.patient = False

    def queue(self, prompts: Sequence[tuple[int, ...]], *, early: bool) -> float:
        """Serve prompts that load their first half, all at once or one after the other; mean time to first token."""
        self._forget()
        stop = len(prompts[0]) // 2 // BLOCK_TOKENS
        plan = self._plan(PlanKind.LOAD, 0, self.redo_s * stop / self._blocks, (0,), stop)
        plan = plan._replace(load_deadline_ns=len(prompts) * plan.load_deadline_ns)  # they share the link
        start_s = time.perf_counter()
        sinks: list[_FirstToken] = []
        for prompt in prompts:
            sinks.append(self._submit(self._reader, prompt, plan))
            if not early:
                sinks[-1].wait()
        return statistics.mean(sink.wait() - start_s for sink in sinks)

    def _submit(self, core: WorkerCore, prompt: tuple[int, ...], plan: Plan) -> _FirstToken:
        self._numbers += 1
        sink = _FirstToken()
        request = GenerateRequest(RequestId(f"bench-{self._numbers}"), prompt, SamplingParams(max_tokens=1))
        core.submit(request, plan, "bench", sink)
        return sink

    def _forget(self) -> None:
        """Empty the reader's cache."""
        if not self._reader.wait_idle(int(WAIT_S * 1e9)):
            raise TimeoutError("the reader does not come to rest")
        self._reader.segment.clear()


def _key(number: int) -> WorkerKey:
    return WorkerKey(WorkerId(f"w{number}"), WorkerEpoch(1))
