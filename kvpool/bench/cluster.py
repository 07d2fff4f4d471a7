"""What a load is worth to a user: TTFT on a real cluster, prefix loaded from a peer over UCX against redone.

Two workers with the default model, real gRPC and UCX between their processes, the time to the first token as a client
sees it. Routes are made by hand so that it is known which worker does what.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from random import Random

from kvpool.bench.report import Row, spread
from kvpool.cluster.connection import ClusterConnection
from kvpool.cluster.launcher import Cluster
from kvpool.cluster.manual import ManualRouter
from kvpool.config import ClusterConfig, WorkerConfig
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.plan import Route
from kvpool.request import GenerateRequest, SamplingParams
from kvpool.types import RequestId, WorkerId

PREFIX_TOKENS = 1500
QUICK_PREFIX_TOKENS = 500
QUESTION_TOKENS = 10
LOAD_BAR = 5.0
"""TTFT with a load is at most 0.2 × TTFT with redo."""

HOLDER, READER = WorkerId("worker-0"), WorkerId("worker-1")
TIMEOUT_S = 120.0
READY_S = 10.0


def run(*, quick: bool, peers: bool) -> list[Row]:
    """Measure; a cluster start and about ten seconds a round on two cores. There is no peer to install."""
    del peers
    cluster = Cluster.start(ClusterConfig(workers=(WorkerConfig(count=2),)), name="bench-cluster")
    try:
        return asyncio.run(
            _measure(cluster.connection(), 3 if quick else 5, QUICK_PREFIX_TOKENS if quick else PREFIX_TOKENS)
        )
    finally:
        cluster.close()


async def _measure(connection: ClusterConnection, rounds: int, prefix_tokens: int) -> list[Row]:
    info = await connection.info()
    watcher = MetadataWatcher(info.metadata)
    watcher.start()
    try:
        watcher.wait_ready(READY_S)
        routes = ManualRouter(watcher, info.namespace)
        rng = Random(1)
        loaded: list[float] = []
        redone: list[float] = []
        for number in range(rounds + 1):
            shared, other = (_tokens(rng, prefix_tokens + QUESTION_TOKENS) for _ in range(2))
            warm = f"warm-{number}"
            await _ttft_s(connection, routes.redo(warm, HOLDER), warm, shared)
            blocks = prefix_tokens // info.namespace.block_tokens
            await asyncio.to_thread(routes.wait_held, HOLDER, shared, blocks)
            load, redo = f"load-{number}", f"redo-{number}"
            route = routes.load(load, READER, holder=HOLDER, blocks=(0, blocks))
            loaded.append(await _ttft_s(connection, route, load, shared))
            redone.append(await _ttft_s(connection, routes.redo(redo, READER), redo, other))
    finally:
        await asyncio.to_thread(watcher.close)
    del loaded[0], redone[0]  # the first round warms up
    return [
        Row(
            name=f"TTFT, {prefix_tokens} cached tokens held by another worker: load",
            ours=statistics.median(loaded) * 1e3,
            reference=statistics.median(redone) * 1e3,
            unit="ms",
            reference_name="redo on the same worker",
            bar=LOAD_BAR,
            higher_is_better=False,
            runs=rounds,
            spread=spread(loaded),
        )
    ]


def _tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 40_000) for _ in range(count))


async def _ttft_s(connection: ClusterConnection, route: Route, request_id: str, prompt: tuple[int, ...]) -> float:
    request = GenerateRequest(RequestId(request_id), prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    start_s = time.perf_counter()
    first_s = None
    async for chunk in connection.stream(route, request, TIMEOUT_S):
        if first_s is None and chunk.tokens:
            first_s = time.perf_counter() - start_s
    assert first_s is not None, "a finished request has at least one token"
    return first_s
