"""The router: a whole decision in its process, herding, the speed of the simulator, and the policy against its rivals.

A decision is what the router actor does for one request: look the chain up in the index, price, choose, reserve,
record. The rows with ``requirement`` as the reference compare with the project's stated bars, which are absolute.
Dynamo is used where `kvpool.bench.metadata_peers` finds it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from kvpool.bench.metadata_peers import peer_python
from kvpool.bench.report import Row, skipped, spread
from kvpool.errors import UnavailableError
from kvpool.metadata.index import PrefixIndex
from kvpool.metadata.prefixes import Prefixes
from kvpool.reports import LoadSample, PrefillSample, WorkerLoad, WorkerReport
from kvpool.types import (
    BLOCK_HASH_BYTES,
    BlockHash,
    MemberInfo,
    MemberState,
    RequestId,
    Role,
    Tier,
    WorkerEpoch,
    WorkerId,
    WorkerKey,
)
from router.core import RouterCore
from router.door import RequestMeta
from router.policies import NEVER_LOADS
from router.signals import Features
from router.simulation.report import SimReport
from router.simulation.simulate import simulate
from router.simulation.trace import Trace, TraceRequest, load_trace

CHAIN_BLOCKS = 100
BLOCK_TOKENS = 16
ENTRIES = 1_000_000
QUICK_ENTRIES = 200_000
HOLDERS = 4
HOT_HOLDERS = 100
EVERYWHERE_HOLDERS = 500
RUNS = 5
DECISIONS_PER_RUN = 400
PEER_TIMEOUT_S = 120.0
REQUIREMENT = "requirement"
DECISION_LIMIT_US = {16: 50.0, 1000: 150.0}
HERDING_LIMIT = 2.0
SIMULATION_LIMIT_S = 60.0
TRACE = Path(__file__).parents[2] / "examples" / "traces" / "mooncake_conversation.jsonl.xz"
KNEE_RATE = 7.0
KNEE_REQUESTS = 2000
LOADING_RIVALS = ("mooncake", "llm-d-pull")
_PEER_SCRIPT = Path(__file__).with_name("router_peer_script.py")


def run(*, quick: bool, peers: bool) -> list[Row]:
    """Measure; about two minutes, with ``quick`` half a minute. Without ``peers`` only Dynamo's rows are missing."""
    rows: list[Row] = []
    for workers in DECISION_LIMIT_US:
        rows += decision_rows(workers, QUICK_ENTRIES if quick else ENTRIES, peers=peers)
    rows += [hot_row(), everywhere_row()]
    rows.append(herding_row())
    if not TRACE.exists():
        return [*rows, skipped("simulation", "conversation trace", f"{TRACE} is not in this installation")]
    trace = load_trace(TRACE).spread()
    rows.append(simulation_row(trace, 2000 if quick else len(trace)))
    rows += knee_rows(trace, quick=quick)
    return rows


# -- decisions --------------------------------------------------------------------------------------------------------


def decision_rows(workers: int, entries: int, *, peers: bool) -> list[Row]:
    """Median time of a whole decision with this many workers, against the bar and against Dynamo."""
    label = f"decision, {CHAIN_BLOCKS}-block prompt, {entries // 1000}k entries, {workers} workers"
    bench = _Decisions(workers, entries)
    peer, why = None, "peers not asked for"
    if peers:
        try:
            peer = peer_python("dynamo")
        except UnavailableError as error:
            why = str(error)
    ours, theirs = [], []
    bench.measure()
    for _ in range(RUNS):
        ours.append(bench.measure())
        if peer is not None:
            theirs.append(_peer_median(peer, workers))
    median, limit = statistics.median(ours), DECISION_LIMIT_US[workers]
    options = {"unit": "µs", "higher_is_better": False, "runs": RUNS, "spread": spread(ours), "bar": 1.0}
    rows = [Row(label, median, limit, reference_name=REQUIREMENT, **options)]  # type: ignore[arg-type]
    name = f"{label}, against select_and_reserve"
    if any(value is None for value in theirs) or not theirs:
        return [*rows, skipped(name, "Dynamo", why if not theirs else "installed but failed")]
    reference = statistics.median(value for value in theirs if value is not None)
    return [*rows, Row(name, median, reference, reference_name="Dynamo", **options)]  # type: ignore[arg-type]


def hot_row() -> Row:
    """The same when many of many workers hold its beginning, as with a system prompt: how candidates are pruned. It has
    no bar: who holds more of it where decides how many are tried."""
    workers = max(DECISION_LIMIT_US)
    bench = _Decisions(workers, QUICK_ENTRIES)
    bench.heat(HOT_HOLDERS)
    return _hot_row(bench, f"decision, {HOT_HOLDERS} of {workers} workers hold half the prompt", bar=None)


def everywhere_row() -> Row:
    """The same when half of the workers hold all of it."""
    workers = max(DECISION_LIMIT_US)
    bench = _Decisions(workers, QUICK_ENTRIES)
    bench.heat(EVERYWHERE_HOLDERS, whole=True)
    return _hot_row(bench, f"decision, {EVERYWHERE_HOLDERS} of {workers} workers hold the whole prompt", bar=1.0)


def _hot_row(bench: _Decisions, name: str, bar: float | None) -> Row:
    bench.measure()
    ours = [bench.measure() for _ in range(RUNS)]
    return Row(
        name,
        statistics.median(ours),
        DECISION_LIMIT_US[max(DECISION_LIMIT_US)],
        "µs",
        REQUIREMENT,
        bar=bar,
        higher_is_better=False,
        runs=RUNS,
        spread=spread(ours),
    )


class _Decisions:
    """A router core over a filled index, with loaded workers and learned curves."""

    def __init__(self, workers: int, entries: int) -> None:
        self._rng = random.Random(workers)
        self._index = PrefixIndex()
        self._chains: list[tuple[BlockHash, ...]] = []
        self._serial = 0
        keys = [WorkerKey(WorkerId(f"w{number:04d}"), WorkerEpoch(1)) for number in range(workers)]
        for key in keys:
            self._index.add_worker(key)
        self._fill(keys, entries)
        self._keys = keys
        self._reports = 0
        self._core = RouterCore(self, time.monotonic_ns, features=Features(split=True))
        for key in keys:
            self._core.on_member_change(_member(key), MemberState.ALIVE)

    def prefixes(self, chain: Sequence[BlockHash]) -> Prefixes:
        """The index as a directory, as the watcher offers it."""
        return self._index.prefixes(chain, learn=True)

    def measure(self) -> float:
        """Median microseconds of a decision with everything around it, after a fresh report of every worker."""
        self._reports += 1
        for key in self._keys:
            self._core.on_report(self._report(key, self._rng.choice(self._keys)))
        taken = []
        for _ in range(DECISIONS_PER_RUN):
            self._serial += 1
            request_id = RequestId(f"r{self._serial}")
            meta = RequestMeta(request_id, CHAIN_BLOCKS * BLOCK_TOKENS + 1, self._rng.choice(self._chains))
            start = time.perf_counter_ns()
            self._core.route(meta)
            taken.append(time.perf_counter_ns() - start)
            self._core.release(request_id)
        return statistics.median(taken) / 1e3

    def heat(self, holders: int, *, whole: bool = False) -> None:
        """From now on everybody asks for one chain, of which so many workers hold the first half and a few more, or
        all."""
        chain = tuple(BlockHash(self._rng.randbytes(BLOCK_HASH_BYTES)) for _ in range(CHAIN_BLOCKS))
        for place, key in enumerate(self._rng.sample(self._keys, holders)):
            stop = CHAIN_BLOCKS // 2 if place >= HOLDERS else self._rng.randrange(CHAIN_BLOCKS // 2, CHAIN_BLOCKS)
            held = chain if whole else chain[:stop]
            self._index.stored(key, Tier.DEVICE, held, linked=True)
        self._chains = [chain]

    def _fill(self, keys: list[WorkerKey], entries: int) -> None:
        for _ in range(entries // CHAIN_BLOCKS // HOLDERS * 2):
            chain = tuple(BlockHash(self._rng.randbytes(BLOCK_HASH_BYTES)) for _ in range(CHAIN_BLOCKS))
            self._chains.append(chain)
            for place, key in enumerate(self._rng.sample(keys, HOLDERS)):
                stop = self._rng.randrange(1, CHAIN_BLOCKS) if place else CHAIN_BLOCKS
                self._index.stored(key, Tier.DEVICE, chain[:stop], linked=True)

    def _report(self, key: WorkerKey, holder: WorkerKey) -> WorkerReport:
        waiting = self._rng.randrange(4)
        load = WorkerLoad(
            waiting_requests=waiting,
            running_requests=self._rng.randrange(1, 32),
            queued_prefill_tokens=waiting * 1200,
            free_blocks=500,
            total_blocks=1000,
        )
        prefill = PrefillSample(1600, 0, self._rng.randrange(40_000_000, 60_000_000))
        size = 1600 * 40_000
        loaded = LoadSample(holder, size, CHAIN_BLOCKS, round(1e6 + size * self._rng.uniform(0.2, 0.3)))
        return WorkerReport(key, self._reports, load, (prefill,), (loaded,) if holder != key else ())


def _member(key: WorkerKey) -> MemberInfo:
    return MemberInfo(
        key=key,
        role=Role.MIXED,
        transport="memory",
        data_address=b"",
        layout_fingerprint="",
        hash_scheme="",
        block_tokens=BLOCK_TOKENS,
        block_bytes=BLOCK_TOKENS * 40_000,
        capacity_blocks=(100_000, 0, 0),
        control_address=key.worker_id,
    )


def _peer_median(python: str, workers: int) -> float | None:
    command = [python, str(_PEER_SCRIPT), str(workers), str(DECISIONS_PER_RUN)]
    environment = {**os.environ, "DYN_LOG": "error"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"select_and_reserve_us"')]
    return float(json.loads(lines[-1])["select_and_reserve_us"]) if lines else None


# -- simulated --------------------------------------------------------------------------------------------------------


def herding_row() -> Row:
    """64 different cold prompts, at most about 32 in flight, 16 workers: the busiest worker against a fair share."""
    rng = random.Random(3)
    requests = []
    for number in range(4000):
        prompt = rng.randrange(64)
        blocks = tuple(prompt * 10 + n for n in range(3))
        requests.append(TraceRequest(number * 4_000_000, 1536, 8, blocks))
    trace = Trace("cold prompts", 512, tuple(requests))
    report = simulate(trace, nodes=16, preset="llama-70b", bandwidth_bytes_per_s=8e9, policy="kvpool")
    name = "herding, 64 cold prompts on 16 workers: busiest / fair"
    return Row(name, report.largest_share, HERDING_LIMIT, "×", REQUIREMENT, bar=1.0, higher_is_better=False)


def simulation_row(trace: Trace, requests: int) -> Row:
    """Wall time of the conversation trace on 16 nodes, scaled to 12,000 requests."""
    report = _simulate(trace.head(requests), "kvpool")
    seconds = report.wall_s * 12_000 / report.requests
    name = "simulating 12,000 requests on 16 nodes"
    return Row(name, seconds, SIMULATION_LIMIT_S, "s", REQUIREMENT, bar=1.0, higher_is_better=False, runs=1)


def knee_rows(trace: Trace, *, quick: bool) -> list[Row]:
    """Mean TTFT around B* at the knee: ours against the best rule that never loads, and against those that do."""
    part = trace.head(KNEE_REQUESTS)
    never = ("plain", "lmetric", "preble") if quick else tuple(sorted(NEVER_LOADS))
    ours = _simulate(part, "kvpool").ttft_mean_ms
    means = {name: _simulate(part, name).ttft_mean_ms for name in never}
    best = min(means, key=lambda name: means[name])
    options = {"unit": "ms", "higher_is_better": False, "runs": 1}
    rows = [
        Row(
            "simulated mean TTFT at the knee, best rule that never loads",
            ours,
            means[best],
            reference_name=best,
            bar=1 / 0.75,
            **options,  # type: ignore[arg-type]
        )
    ]
    for name in LOADING_RIVALS:
        theirs = _simulate(part, name).ttft_mean_ms
        label = f"simulated mean TTFT at the knee, {name}"
        rows.append(Row(label, ours, theirs, reference_name=name, bar=1 / 0.9, **options))  # type: ignore[arg-type]
    return rows


def _simulate(trace: Trace, policy: str) -> SimReport:
    return simulate(trace, nodes=16, preset="llama-70b", bandwidth_bytes_per_s=8e9, policy=policy, rate=KNEE_RATE)
