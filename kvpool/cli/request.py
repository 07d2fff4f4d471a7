"""``kvpool generate``, ``explain`` and ``records``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli.connect import open_client
from kvpool.cli.output import AddressOption, JsonOption, NameOption, console, guarded, print_json, progress
from kvpool.cli.records import check_target, write_records
from kvpool.client import TextChunk
from kvpool.cluster.state import DEFAULT_NAME, command
from kvpool.errors import OverloadError
from kvpool.request import GenerateResult


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, plain text.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    tenant: Annotated[str, typer.Option(help="Requests of different tenants never share blocks.")] = "",
    timeout: Annotated[float, typer.Option(help="Budget in seconds.")] = 120.0,
    ttft_limit: Annotated[
        float | None, typer.Option(help="Seconds to the first token; refused at once when they will not do.")
    ] = None,
    tpot_limit: Annotated[
        float | None, typer.Option(help="Seconds between tokens after it, on average (0.05 for 50 ms).")
    ] = None,
    priority: Annotated[int, typer.Option(help="Of requests that wait, the higher goes first; -100 to 100.")] = 0,
    may_degrade: Annotated[
        bool, typer.Option("--may-degrade", help="The limits are goals: rather late than refused.")
    ] = False,
    address: AddressOption = None,
    name: NameOption = DEFAULT_NAME,
    json_: JsonOption = False,
) -> None:
    """Generate text on a running cluster."""
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": tuple(stop or ()),
        "tenant": tenant,
        "timeout_s": timeout,
        "ttft_limit_s": ttft_limit,
        "tpot_limit_s": tpot_limit,
        "priority": priority,
        "may_degrade": may_degrade,
    }
    guarded(lambda: _generate(prompt, chat, options, address, name, json_), as_json=json_)


def _generate(prompt: str, chat: bool, options: dict[str, Any], address: str | None, name: str, as_json: bool) -> None:
    sent: Any = [{"role": "user", "content": prompt}] if chat else prompt
    with open_client(address, name) as client:
        try:
            result, gap_s = _received(client.stream(sent, **options), as_json)
        except OverloadError as error:
            explained = command(f"explain {error.details['request_id']}", name, address)
            error.add_note(f"'{explained}' says why")
            raise
    if as_json:
        print_json({**asdict(result), "finish": result.finish.value})
        return
    typer.echo()
    progress(_served(result))
    for line in _missed(result, gap_s, options["ttft_limit_s"], options["tpot_limit_s"]):
        progress(line)


def _received(chunks: Iterable[TextChunk], as_json: bool) -> tuple[GenerateResult, float | None]:
    """The result and the mean gap between tokens after the first ones, in seconds as they came here, None of less than
    two. Unless it is to be JSON, the text is printed meanwhile."""
    first_s, first_tokens = 0.0, 0
    for chunk in chunks:
        if not as_json:
            typer.echo(chunk.text, nl=False)  # as it is; a console would expand tabs
        if not first_tokens:
            first_s, first_tokens = time.monotonic(), len(chunk.tokens)
        if chunk.result is not None:
            later_tokens = len(chunk.result.tokens) - first_tokens
            return chunk.result, (time.monotonic() - first_s) / later_tokens if later_tokens else None
    raise AssertionError("the client's stream ended without a result")


def _served(result: GenerateResult) -> str:
    """How a request was served. The first token is timed from the call on, as the user waited for it."""
    stats = result.stats
    return (
        f"{result.request_id}: {stats.worker_id}, {stats.plan}, cached {stats.tokens_cached} loaded "
        f"{stats.tokens_loaded} redone {stats.tokens_redone}, TTFT {_ttft_ns(result) / 1e6:.0f} ms "
        f"({stats.waited_ns / 1e6:.0f} until the router had decided)"
    )


def _missed(
    result: GenerateResult, gap_s: float | None, ttft_limit_s: float | None, tpot_limit_s: float | None
) -> Iterator[str]:
    """Which limits were not met, by how much."""
    ttft_s = _ttft_ns(result) / 1e9
    if ttft_limit_s is not None and ttft_s > ttft_limit_s:
        yield f"missed its limit: the first token came after {ttft_s:.3g} s, the limit is {ttft_limit_s:g} s"
    if tpot_limit_s is not None and gap_s is not None and gap_s > tpot_limit_s:
        yield f"missed its limit: tokens came every {gap_s:.3g} s, the limit is {tpot_limit_s:g} s"


def _ttft_ns(result: GenerateResult) -> int:
    return result.stats.waited_ns + result.stats.ttft_ns


def explain(
    request_id: Annotated[str, typer.Argument(help="Identity of the request, as 'generate' printed it.")],
    address: AddressOption = None,
    name: NameOption = DEFAULT_NAME,
    json_: JsonOption = False,
) -> None:
    """Why a request went where it went, and what the alternatives would have cost."""
    guarded(lambda: _explain(request_id, address, name, json_), as_json=json_)


def _explain(request_id: str, address: str | None, name: str, as_json: bool) -> None:
    with open_client(address, name) as client:
        record = client.explain(request_id)
    if as_json:
        print_json({key: value for key, value in record.items() if key != "text"})
    else:
        console.print(record["text"], markup=False, highlight=False)


def records(
    out: Annotated[Path, typer.Option(help="File to write: .jsonl, or .parquet (needs pyarrow).")],
    address: AddressOption = None,
    name: NameOption = DEFAULT_NAME,
    json_: JsonOption = False,
) -> None:
    """Export the router's decision records, each with its outcome, for 'kvpool replay' or a notebook."""
    guarded(lambda: _records(out, address, name, json_), as_json=json_)


def _records(out: Path, address: str | None, name: str, as_json: bool) -> None:
    check_target(out)
    with open_client(address, name) as client:
        lines = client.records()
    write_records(out, lines)
    if as_json:
        print_json({"out": str(out), "records": len(lines)})
    else:
        console.print(f"wrote {len(lines):,} records to {out}", highlight=False)
