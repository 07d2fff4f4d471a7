"""``kvpool demo``: the main job on real input, with the evidence.

The same chats run twice on fresh clusters, once with loads and once with redo-only routing, and a third time through
the plain model without any pool. Outputs must be equal in all three; the command fails when they are not.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvpool.cli.demo_workload import CUSTOMERS, Chat, make_chats
from kvpool.cli.output import EXIT_FAILED, JsonOption, console, guarded, print_json, print_table, progress
from kvpool.client import AsyncKVPoolClient
from kvpool.cluster.launcher import Cluster
from kvpool.config import ClusterConfig, RouterConfig
from kvpool.request import GenerateResult

ANSWER_TOKENS = 24
ARRIVAL_GAP_S = 0.2
REQUEST_TIMEOUT_S = 180.0
LOGPROB_TOLERANCE = 1e-4
_WHY_LOADS = (
    "redo only sends everybody to the worker that has the handbook, where they wait; with loads other workers fetch it "
    "and start at once"
)
_TOKEN_ROWS = (
    ("prompt tokens", "prompt_tokens"),
    ("… in the worker's own cache", "tokens_cached"),
    ("… loaded from another worker", "tokens_loaded"),
    ("… redone", "tokens_redone"),
)


@dataclass(frozen=True, slots=True)
class _Served:
    """One request of a run: who asked, what came, and the time to its first token as the client saw it."""

    chat: str
    turn: int
    prompt: tuple[int, ...]
    result: GenerateResult
    ttft_s: float


@dataclass(frozen=True, slots=True)
class _Run:
    """All requests of one run in order of (chat, turn), and the cluster's status after it."""

    served: tuple[_Served, ...]
    status: dict[str, Any]


def demo(
    chats: Annotated[int, typer.Option(min=2, max=len(CUSTOMERS), help="Customers who chat, two turns each.")] = 5,
    json_: JsonOption = False,
) -> None:
    """Serve chats over a long handbook with three workers; compare loads with redo, and with no pool at all."""
    guarded(lambda: _demo(chats, json_), as_json=json_)


def _demo(count: int, as_json: bool) -> None:
    workload = make_chats(count)
    with_loads = _run_cluster("kvpool", workload)
    redo_only = _run_cluster("redo_only", workload)
    progress(f"the same {len(with_loads.served)} requests through the plain model, one after the other, without a pool")
    report = _report(with_loads, redo_only, _reference(with_loads))
    if as_json:
        print_json(report)
    else:
        _print(report)
    if not report["outputs_equal"]:
        raise typer.Exit(EXIT_FAILED)


def _run_cluster(policy: str, workload: Sequence[Chat]) -> _Run:
    progress(f"cluster with routing policy {policy!r}")
    config = ClusterConfig(router=RouterConfig(policy=policy))
    cluster = Cluster.start(config, name=f"demo-{policy.replace('_', '-')}", progress=progress)
    try:
        return asyncio.run(_run(AsyncKVPoolClient.of(cluster.connection()), workload))
    finally:
        progress("ending the cluster")
        cluster.close()


async def _run(client: AsyncKVPoolClient, workload: Sequence[Chat]) -> _Run:
    """The first chat asks alone, so that one worker holds the handbook, then keeps it busy while everybody comes."""
    first, *rest = workload
    opened = await _chat(client, first, (0,), [])
    coming = [_chat(client, first, (1,), opened)] + [
        _chat(client, chat, (0, 1), [], ARRIVAL_GAP_S * number) for number, chat in enumerate(rest, start=1)
    ]
    served = opened + [item for items in await asyncio.gather(*coming) for item in items]
    served.sort(key=lambda item: (item.chat, item.turn))
    return _Run(tuple(served), await client.status())


async def _chat(
    client: AsyncKVPoolClient, chat: Chat, turns: tuple[int, ...], before: list[_Served], delay_s: float = 0.0
) -> list[_Served]:
    await asyncio.sleep(delay_s)
    messages = [{"role": "system", "content": chat.system}]
    for question, item in zip(chat.questions, before, strict=False):
        messages += [_message("user", question), _message("assistant", item.result.text)]
    served = []
    for turn in turns:
        messages.append(_message("user", chat.questions[turn]))
        item = await _ask(client, chat.name, turn, messages)
        messages.append(_message("assistant", item.result.text))
        served.append(item)
    return served


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def _ask(client: AsyncKVPoolClient, chat: str, turn: int, messages: list[dict[str, str]]) -> _Served:
    prompt = (await client.tokenizer()).encode_chat(messages)
    start_s = time.monotonic()
    ttft_s = None
    options: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "logprobs": 1, "timeout_s": REQUEST_TIMEOUT_S}
    async for chunk in client.stream(prompt, **options):
        if ttft_s is None and chunk.tokens:
            ttft_s = time.monotonic() - start_s
        if chunk.result is not None:
            stats = chunk.result.stats
            progress(
                f"{chat:<8} turn {turn + 1}: {stats.worker_id} {stats.plan:<5} cached {stats.tokens_cached:>4} "
                f"loaded {stats.tokens_loaded:>4} redone {stats.tokens_redone:>4}  TTFT {(ttft_s or 0) * 1e3:6.0f} ms"
            )
            return _Served(chat, turn, prompt, chunk.result, ttft_s or time.monotonic() - start_s)
    raise AssertionError("a stream always ends with its result or an error")


def _reference(run: _Run) -> list[tuple[tuple[int, ...], float]]:
    """Greedy tokens and first-token log-probability of the plain model for every prompt."""
    from workers.engine.models import resolve_model
    from workers.engine.reference import plain_generate

    path = resolve_model(ClusterConfig().workers[0].engine.model).path
    made = []
    for number, item in enumerate(run.served, start=1):
        made.append(plain_generate(path, item.prompt, max_tokens=ANSWER_TOKENS))
        progress(f"plain model: {number} of {len(run.served)}")
    return made


def _report(ours: _Run, redo: _Run, reference: list[tuple[tuple[int, ...], float]]) -> dict[str, Any]:
    rows = [_row(item) for item in ours.served]
    gaps = [
        abs(item.result.logprobs[0].logprob - logprob)
        for item, (_, logprob) in zip(ours.served, reference, strict=True)
    ]
    tokens_equal = all(
        mine.result.tokens == tokens == other.result.tokens
        for mine, other, (tokens, _) in zip(ours.served, redo.served, reference, strict=True)
    )
    loaded = [row for row in rows if row["tokens_loaded"]]
    return {
        "requests": len(rows),
        "loads": len(loaded),
        "bytes_loaded": sum(row["bytes_loaded"] for row in rows),
        **_tokens(ours, ""),
        **_tokens(redo, "_redo_only"),
        "ttft_ms_p50": _ttft_ms(ours, 0.5),
        "ttft_ms_p50_redo_only": _ttft_ms(redo, 0.5),
        "ttft_ms_max": _ttft_ms(ours, 1.0),
        "ttft_ms_max_redo_only": _ttft_ms(redo, 1.0),
        "outputs_equal": tokens_equal and max(gaps) <= LOGPROB_TOLERANCE,
        "first_logprob_gap": max(gaps),
        "per_request": rows,
    }


def _tokens(run: _Run, ending: str) -> dict[str, int]:
    """Where the KV of the prompts came from; cached, loaded and redone add up to the prompts."""
    stats = [item.result.stats for item in run.served]
    return {
        f"prompt_tokens{ending}": sum(item.prompt_tokens for item in stats),
        f"tokens_cached{ending}": sum(item.tokens_cached for item in stats),
        f"tokens_loaded{ending}": sum(item.tokens_loaded for item in stats),
        f"tokens_redone{ending}": sum(item.tokens_redone for item in stats),
    }


def _row(item: _Served) -> dict[str, Any]:
    stats = item.result.stats
    return {
        "request_id": item.result.request_id,
        "chat": item.chat,
        "turn": item.turn + 1,
        "worker": stats.worker_id,
        "plan": stats.plan,
        "tokens_cached": stats.tokens_cached,
        "tokens_loaded": stats.tokens_loaded,
        "tokens_redone": stats.tokens_redone,
        "bytes_loaded": stats.bytes_loaded,
        "ttft_ms": item.ttft_s * 1e3,
    }


def _ttft_ms(run: _Run, quantile: float) -> float:
    values = sorted(item.ttft_s * 1e3 for item in run.served)
    return statistics.median(values) if quantile == 0.5 else values[-1]


def _print(report: dict[str, Any]) -> None:
    rows = report["per_request"]
    header = ("chat", "turn", "worker", "plan", "cached", "loaded", "redone", "TTFT ms")
    keys = ("chat", "turn", "worker", "plan", "tokens_cached", "tokens_loaded", "tokens_redone")
    print_table("requests", header, [(*(row[key] for key in keys), f"{row['ttft_ms']:.0f}") for row in rows])
    comparison = [
        ("TTFT p50, ms", f"{report['ttft_ms_p50']:.0f}", f"{report['ttft_ms_p50_redo_only']:.0f}"),
        ("TTFT max, ms", f"{report['ttft_ms_max']:.0f}", f"{report['ttft_ms_max_redo_only']:.0f}"),
        *((name, report[key], report[f"{key}_redo_only"]) for name, key in _TOKEN_ROWS),
        ("MB moved over UCX", f"{report['bytes_loaded'] / 1e6:.1f}", 0),
    ]
    print_table(
        f"{report['requests']} requests, {report['loads']} of them loaded", ("", "kvpool", "redo only"), comparison
    )
    if report["loads"]:
        console.print(_WHY_LOADS, highlight=False)
    equal = "yes" if report["outputs_equal"] else "NO"
    console.print(f"outputs equal to the run without a pool: {equal}", highlight=False)
