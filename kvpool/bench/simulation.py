"""How well the simulator tells the truth: a small run on a real cluster against its replay.

Requests with shared prefixes go through the real router to workers with the default model. The same arrivals are then
played by the simulator with what that run taught the router (prefill curve, links, decode step) and its hand-over time,
the median of what clients saw beyond their worker's time to first token. Links are shaped to `LINK` times B*, the
bandwidth at which loading a prompt takes as long as computing it. There is no bar: the rows say how far apart the two
are on this machine at this moment. What the real router predicted for the same requests stands beside them:
on a busy machine the learned constants themselves are off, and the simulator cannot be better than they are.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random
from typing import Any

from kvpool.bench.report import Row
from kvpool.client import AsyncKVPoolClient
from kvpool.cluster.connection import ClusterConnection
from kvpool.cluster.launcher import Cluster
from kvpool.config import ClusterConfig, EngineConfig, WorkerConfig
from kvpool.layout import AttentionKind, KVGroup, KVLayout
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.reports import DECODE_NS, DECODE_REQUESTS
from kvpool.transport import SHAPED
from kvpool.transport.shaping import LinkShape
from kvpool.types import PrefillSample
from router.estimators import PrefillCurve
from router.policies import make_policy
from router.simulation.cluster import Cluster as SimulatedCluster
from router.simulation.presets import Preset
from router.simulation.report import percentile
from router.simulation.scenario import Served, Timing
from router.simulation.trace import Trace, TraceRequest

PREFIXES, PREFIX_TOKENS = 4, 208
QUESTION_TOKENS = (16, 64)
OUTPUT_TOKENS = 6
CALIBRATED_TOKENS = (32, 128, 512)
UTILISATION = 0.6
"""Of the workers, if nothing were ever cached and the machine were quiet; on a busy one arrivals do not wait longer
than ``MAX_GAP_S`` on average."""

MAX_GAP_S = 0.8

LINK = 3.0

TIMEOUT_S, READY_S, OUTCOMES_S = 120.0, 10.0, 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the real run. The worker's times come from the decision record."""

    arrival_ns: int
    prompt: tuple[int, ...]
    ttft_ns: int
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Real:
    """The real run: its requests in order of arrival, the first ``warm`` of which are not counted."""

    asked: list[Asked]
    warm: int
    status: dict[str, Any]
    config: EngineConfig
    max_step_tokens: int
    block_bytes: int
    workers: int


def run(*, quick: bool, peers: bool) -> list[Row]:
    """Measure; a cluster start and about half a minute on two cores. There is no peer to install."""
    del peers
    requests = 20 if quick else 60
    workers = min(3, max(2, os.cpu_count() or 1))  # simulated nodes do not share cores
    engine = EngineConfig(num_blocks=1024, torch_threads=1)
    worker = WorkerConfig(count=workers, engine=engine, transport=SHAPED + WorkerConfig().transport)
    cluster = Cluster.start(ClusterConfig(workers=(worker,)), name="bench-simulation")
    try:
        real = asyncio.run(_record(cluster.connection(), worker, requests))
    finally:
        cluster.close()
    return compare(real, replay(real))


# ---- the real run


async def _record(connection: ClusterConnection, worker: WorkerConfig, requests: int) -> Real:
    client, rng = AsyncKVPoolClient.of(connection), Random(11)
    shared = [_tokens(rng, PREFIX_TOKENS) for _ in range(PREFIXES)]
    begun_ns = time.monotonic_ns()
    warm: list[tuple[int, tuple[int, ...], int]] = []
    for _ in range(2 * worker.count):
        warm.append(await _ask(client, begun_ns, _tokens(rng, PREFIX_TOKENS + QUESTION_TOKENS[1]), len(warm)))
    alone_s = statistics.median(ttft_ns for _, _, ttft_ns in warm) / 1e9
    block_bytes = await asyncio.to_thread(_block_bytes, (await client.info()).metadata)
    prompt_bytes = len(warm[0][1]) // worker.engine.block_tokens * block_bytes
    await _shape_links(connection, LinkShape(rate_bytes_per_s=LINK * prompt_bytes / alone_s))
    gap_s = min(MAX_GAP_S, alone_s / worker.count / UTILISATION)
    tasks = []
    for number in range(requests):
        prompt = shared[rng.randrange(PREFIXES)] + _tokens(rng, rng.randint(*QUESTION_TOKENS))
        tasks.append(asyncio.create_task(_ask(client, begun_ns, prompt, len(warm) + number)))
        await asyncio.sleep(rng.expovariate(1.0 / gap_s))
    seen = warm + await asyncio.gather(*tasks)
    records = await _outcomes(client, len(seen))
    status = await connection.call("router", "status")
    return Real(
        asked=[Asked(*item, records[f"sim-{number}"]) for number, item in enumerate(seen)],
        warm=len(warm),
        status=status,
        config=worker.engine,
        max_step_tokens=worker.scheduler.max_step_tokens,
        block_bytes=block_bytes,
        workers=worker.count,
    )


async def _shape_links(connection: ClusterConnection, shape: LinkShape) -> None:
    for reader, holder in permutations((await connection.info()).workers, 2):
        await connection.call(reader, "shape_link", holder, shape)


async def _ask(
    client: AsyncKVPoolClient, begun_ns: int, prompt: tuple[int, ...], number: int
) -> tuple[int, tuple[int, ...], int]:
    """Arrival, prompt and TTFT in ns, as the client sees them."""
    start_ns, first_ns = time.monotonic_ns(), None
    stream = client.stream(
        prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, timeout_s=TIMEOUT_S, request_id=f"sim-{number}"
    )
    async for chunk in stream:
        if chunk.tokens and first_ns is None:
            first_ns = time.monotonic_ns()
    assert first_ns is not None, "a finished request has at least one token"
    return start_ns - begun_ns, prompt, first_ns - start_ns


async def _outcomes(client: AsyncKVPoolClient, count: int) -> dict[str, dict[str, Any]]:
    """Decision records by request, each with its outcome; what a worker has not told in time lacks it."""
    deadline_s = time.monotonic() + OUTCOMES_S
    while True:
        records = [json.loads(line) for line in await client.records()]
        told = sum(record["outcome"] is not None for record in records)
        if told >= count or time.monotonic() > deadline_s:
            return {record["request_id"]: record for record in records}
        await asyncio.sleep(0.1)


def _block_bytes(metadata: tuple[str, ...]) -> int:
    watcher = MetadataWatcher(metadata)
    watcher.start()
    try:
        watcher.wait_ready(READY_S)
        return next(iter(watcher.members().values())).info.block_bytes
    finally:
        watcher.close()


def _tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 40_000) for _ in range(count))


# ---- the replay


def replay(real: Real) -> list[Served]:
    """Play the arrivals of the real run, the uncounted ones too, with its learned constants."""
    preset, bandwidth = _preset(real)
    samples = [PrefillSample(tokens, 0, round(preset.curve.time_ns(tokens, 0))) for tokens in CALIBRATED_TOKENS]
    cluster = SimulatedCluster(
        _trace(real),
        preset,
        nodes=real.workers,
        bandwidth_bytes_per_s=bandwidth,
        policy=make_policy("kvpool"),
        timing=Timing(dispatch_ns=_hand_over_ns(real)),
        calibration=tuple(samples),
    )
    return cluster.run()


def _trace(real: Real) -> Trace:
    """The arrivals; a block's id stands for the whole prefix up to its end."""
    size = real.config.block_tokens
    known: dict[tuple[int, ...], int] = {}
    requests = []
    for item in real.asked:
        ends = range(size, len(item.prompt) + size, size)
        blocks = tuple(known.setdefault(item.prompt[:end], len(known)) for end in ends)
        requests.append(TraceRequest(item.arrival_ns, len(item.prompt), OUTPUT_TOKENS, blocks))
    return Trace("recorded", size, tuple(requests))


def _preset(real: Real) -> tuple[Preset, float]:
    """A node as the router learned it, the mean over workers; and the links' bytes per second."""
    workers, links = real.status["workers"], real.status["links"]
    mean = statistics.fmean
    counters = [row["counters"] for row in workers]
    decoded = sum(item.get(DECODE_REQUESTS, 0) for item in counters)
    size = real.config.block_tokens
    return Preset(
        name="recorded",
        layout=KVLayout("recorded", "", size, (KVGroup(AttentionKind.FULL, 1, real.block_bytes // size),)),
        curve=PrefillCurve(
            mean(row["prefill_t0_ms"] for row in workers) * 1e6,
            mean(row["prefill_us_per_token"] for row in workers) * 1e3,
            mean(row["prefill_ps_per_pair"] for row in workers) / 1e3,
        ),
        step_ns=0.0,
        sequence_ns=sum(item.get(DECODE_NS, 0) for item in counters) / max(1, decoded),  # on a CPU, one by one
        context_ns=0.0,
        chunk_tokens=real.max_step_tokens,
        alpha_ns=round(1e6 * (mean(row["alpha_ms"] for row in links) if links else 1.0)),
        capacity_blocks=real.config.num_blocks,
    ), 1e9 * (mean(row["beta_gbytes_per_s"] for row in links) if links else 1.0)


def _hand_over_ns(real: Real) -> int:
    told = [(item.ttft_ns, int(item.record["outcome"]["ttft_ns"])) for item in real.asked if item.record["outcome"]]
    return round(statistics.median(max(0, seen_ns - worker_ns) for seen_ns, worker_ns in told))


# ---- the rows


def compare(real: Real, simulated: Sequence[Served]) -> list[Row]:
    """Rows of the counted requests: simulated against real."""
    pairs = [*zip(real.asked, simulated, strict=True)][real.warm :]
    told = [(item.record["outcome"], served) for item, served in pairs if item.record["outcome"]]
    real_ms = sorted(item.ttft_ns / 1e6 for item, _ in pairs)
    simulated_ms = sorted((served.ttft_ns or 0) / 1e6 for _, served in pairs)
    tokens = sum(served.prompt_tokens for _, served in told)
    real_hits = 1.0 - sum(outcome["tokens_redone"] for outcome, _ in told) / tokens
    simulated_hits = 1.0 - sum(served.tokens_redone for _, served in told) / tokens
    same = sum(item.record["plan"] == served.plan for item, served in pairs)
    predicted_ms = statistics.fmean(item.record["predicted_ttft_ns"] / 1e6 for item, _ in pairs)
    figures = (
        ("mean TTFT, simulated", statistics.fmean(simulated_ms), statistics.fmean(real_ms), "ms"),
        ("median TTFT, simulated", percentile(simulated_ms, 0.5), percentile(real_ms, 0.5), "ms"),
        ("p90 TTFT, simulated", percentile(simulated_ms, 0.9), percentile(real_ms, 0.9), "ms"),
        ("prompt tokens not computed, simulated", 100 * simulated_hits, 100 * real_hits, "%"),
        ("requests with the same kind of plan, simulated", 100 * same / len(pairs), 100.0, "%"),
        ("mean TTFT, predicted by the real router", predicted_ms, statistics.fmean(real_ms), "ms"),
    )
    return [
        Row(name, ours, reference, unit, reference_name="real", runs=len(pairs))
        for name, ours, reference, unit in figures
    ]
