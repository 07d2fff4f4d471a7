"""What prefill and decode roles are worth: long prompts beside running decodes, on two clusters of two workers.

One cluster has a prefill and a decode worker, the other two mixed ones; first the one, then the other, because what an
idle cluster takes would be taken from the prefill. A few requests decode; then long prompts come in turn, and the gaps
between the tokens of the others are measured, as clients see them. The default model, a thread per worker.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from random import Random

from kvpool.bench.report import Row, spread
from kvpool.client import AsyncKVPoolClient
from kvpool.cluster.launcher import Cluster
from kvpool.config import ClusterConfig, EngineConfig, WorkerConfig
from kvpool.types import Role

PROMPT_TOKENS, QUICK_PROMPT_TOKENS = 1000, 400
STREAMS = 3
STREAM_TOKENS = 48  # prompts of the streams: long enough to be prefilled by the prefill worker
LONG_PROMPTS = 3
TPOT_BAR = 1 / 0.5
TTFT_BAR = 1 / 1.15
PERCENTILE = 0.99
WARM_TOKENS = 8
TIMEOUT_S = 120.0


@dataclass(slots=True)
class _Seen:
    """One side's measurements, in seconds: gaps between tokens, long prompts beside decodes and alone."""

    gaps: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)


def run(*, quick: bool, peers: bool) -> list[Row]:
    """Measure; two cluster starts and about 20 s a round on two cores. There is no peer to install."""
    del peers
    rounds, tokens = (2, QUICK_PROMPT_TOKENS) if quick else (5, PROMPT_TOKENS)
    engine = EngineConfig(num_blocks=1024, torch_threads=1)
    roles = tuple(WorkerConfig(count=1, role=role, engine=engine) for role in (Role.PREFILL, Role.DECODE))
    mixed = (WorkerConfig(count=2, engine=engine),)
    seen = []
    for name, workers in (("bench-roles", roles), ("bench-mixed", mixed)):
        cluster = Cluster.start(ClusterConfig(workers=workers), name=name)
        try:
            seen.append(asyncio.run(_measure(cluster, rounds, tokens)))
        finally:
            cluster.close()
    return _rows(seen[0], seen[1], tokens, rounds)


def _rows(roles: _Seen, mixed: _Seen, tokens: int, rounds: int) -> list[Row]:
    return [
        Row(
            name=f"p99 gap between tokens of {STREAMS} streams while prompts of {tokens} tokens come: roles",
            ours=_percentile(roles.gaps) * 1e3,
            reference=_percentile(mixed.gaps) * 1e3,
            unit="ms",
            reference_name="two mixed workers",
            bar=TPOT_BAR,
            higher_is_better=False,
            runs=rounds,
            spread=spread(roles.gaps),
        ),
        Row(
            name=f"TTFT of a prompt of {tokens} tokens beside {STREAMS} streams: roles",
            ours=statistics.median(roles.beside) * 1e3,
            reference=statistics.median(roles.alone) * 1e3,
            unit="ms",
            reference_name="nobody else there",
            bar=TTFT_BAR,
            higher_is_better=False,
            runs=len(roles.beside),
            spread=spread(roles.beside),
        ),
        Row(
            name=f"TTFT of a prompt of {tokens} tokens beside {STREAMS} streams: two mixed workers",
            ours=statistics.median(mixed.beside) * 1e3,
            reference=statistics.median(mixed.alone) * 1e3,
            unit="ms",
            reference_name="nobody else there",
            higher_is_better=False,
            runs=len(mixed.beside),
            spread=spread(mixed.beside),
        ),
    ]


async def _measure(cluster: Cluster, rounds: int, tokens: int) -> _Seen:
    client = AsyncKVPoolClient.of(cluster.connection())
    rng, seen = Random(5), _Seen()
    await client.generate(_prompt(rng, tokens), max_tokens=WARM_TOKENS, ignore_eos=True)  # the cluster learns its speed
    for _ in range(rounds):
        seen.alone.append(await _ttft_s(client, _prompt(rng, tokens)))
        await _round(client, seen, rng, tokens)
    return seen


async def _round(client: AsyncKVPoolClient, seen: _Seen, rng: Random, tokens: int) -> None:
    """Streams decode until the last long prompt has its first token."""
    over, going = asyncio.Event(), [asyncio.Event() for _ in range(STREAMS)]
    streams = [
        asyncio.ensure_future(_stream(client, _prompt(rng, STREAM_TOKENS), begun, over, seen.gaps)) for begun in going
    ]
    try:
        for begun in going:
            await asyncio.wait_for(begun.wait(), TIMEOUT_S)
        for _ in range(LONG_PROMPTS):
            seen.beside.append(await _ttft_s(client, _prompt(rng, tokens)))
    finally:
        over.set()
        await asyncio.gather(*streams)


async def _stream(
    client: AsyncKVPoolClient, prompt: tuple[int, ...], begun: asyncio.Event, over: asyncio.Event, gaps: list[float]
) -> None:
    """Decode until ``over``, noting the gaps from the third token on."""
    last_s, seen = 0.0, 0
    async for chunk in client.stream(prompt, max_tokens=2000, ignore_eos=True, timeout_s=TIMEOUT_S):
        now_s = time.perf_counter()
        seen += len(chunk.tokens)
        if begun.is_set():
            gaps.append(now_s - last_s)
        last_s = now_s
        if seen >= 3:
            begun.set()
        if over.is_set():
            return


async def _ttft_s(client: AsyncKVPoolClient, prompt: tuple[int, ...]) -> float:
    start_s = time.perf_counter()
    first_s = 0.0
    async for chunk in client.stream(prompt, max_tokens=4, ignore_eos=True, timeout_s=TIMEOUT_S):
        if chunk.tokens and not first_s:
            first_s = time.perf_counter() - start_s
    return first_s


def _prompt(rng: Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 40_000) for _ in range(tokens))


def _percentile(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(PERCENTILE * len(ordered)))]
