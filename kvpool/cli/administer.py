"""``kvpool drain``, ``evict``, ``pin``, ``unpin`` and ``pins``."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvpool.cli.connect import open_client
from kvpool.cli.output import AddressOption, JsonOption, NameOption, console, guarded, print_json, print_table, progress
from kvpool.cluster.administration import DRAIN_TIMEOUT_S, PIN_TIMEOUT_S, DrainReport, EvictReport, PinReport
from kvpool.cluster.state import DEFAULT_NAME
from kvpool.errors import RequestError
from kvpool.prompts import Prompt

AGE_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

TokensOption = Annotated[str | None, typer.Option(help="The prefix as token ids with commas, instead of text.")]
TenantOption = Annotated[str, typer.Option(help="Whose prefix it is.")]


def drain(
    worker: Annotated[str, typer.Argument(help="Name of the worker, as 'kvpool status' shows it.")],
    timeout: Annotated[float, typer.Option(help="Seconds; what still runs then goes on elsewhere.")] = DRAIN_TIMEOUT_S,
    force: Annotated[bool, typer.Option("--force", help="Even the last worker that takes requests.")] = False,
    address: AddressOption = None,
    name: NameOption = DEFAULT_NAME,
    json_: JsonOption = False,
) -> None:
    """Take a worker out of the cluster: no new requests, hot blocks move, running requests finish, then it leaves."""
    guarded(lambda: _drain(worker, timeout, force, address, name, json_), as_json=json_)


def _drain(worker: str, timeout_s: float, force: bool, address: str | None, name: str, as_json: bool) -> None:
    with open_client(address, name) as client:
        report = client.admin.drain(worker, timeout_s=timeout_s, force=force, progress=progress)
    _print_drain(report, as_json)


def _print_drain(report: DrainReport, as_json: bool) -> None:
    if as_json:
        print_json(asdict(report))
        return
    rows = [
        ("hot chains moved", f"{report.moved_chains} of {report.chains}"),
        ("their blocks", f"{report.moved_blocks} of {report.sole_blocks}"),
        ("not moved because", _counted(report.move_failures)),
        ("cut short", report.cut_short),
        ("took", f"{report.elapsed_ns / 1e9:.1f} s"),
    ]
    print_table(f"{report.worker} has left", ("what", "value"), rows)


def evict(
    prefix: Annotated[str | None, typer.Option(help="Blocks of this text and what continues them.")] = None,
    tokens: TokensOption = None,
    block_hash: Annotated[
        str | None, typer.Option("--hash", help="One block and what continues it, in hexadecimal.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Blocks of this tenant.")] = None,
    older_than: Annotated[str | None, typer.Option(help="Not used for so long: 90s, 10m, 2h or 1d.")] = None,
    address: AddressOption = None,
    name: NameOption = DEFAULT_NAME,
    json_: JsonOption = False,
) -> None:
    """Evict blocks on all workers, as far as nobody needs them now. Conditions add up."""

    def run() -> None:
        selected = _prefix(prefix, tokens)
        age_s = None if older_than is None else parse_age_s(older_than)
        with open_client(address, name) as client:
            report = client.admin.evict(selected, block_hash=block_hash, tenant=tenant, older_than_s=age_s)
        _print_eviction(report, json_)

    guarded(run, as_json=json_)


def _print_eviction(report: EvictReport, as_json: bool) -> None:
    if as_json:
        print_json(asdict(report))
        return
    columns = ("worker", "evicted", "bytes", "in use", "pinned", "needed by what stays", "from disk")
    rows: list[list[Any]] = [
        [worker, item.evicted, item.evicted_bytes, item.in_use, item.kept, item.needed, item.removed_from_disk]
        for worker, item in sorted(report.workers.items())
    ]
    sums = (report.evicted, report.evicted_bytes, report.in_use, report.kept, report.needed, report.removed_from_disk)
    rows.append(["all", *sums])
    print_table("evicted blocks", columns, rows)
    for worker, why in report.unreachable.items():
        console.print(f"{worker} could not be asked: {why}", highlight=False)


def pin(
    prefix: Annotated[str | None, typer.Argument(help="The prefix as text; its whole blocks are kept.")] = None,
    tokens: TokensOption = None,
    min_copies: Annotated[int, typer.Option(help="Workers that should hold it.")] = 1,
    tenant: TenantOption = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the copies.")] = PIN_TIMEOUT_S,
    address: AddressOption = None,
    name: NameOption = DEFAULT_NAME,
    json_: JsonOption = False,
) -> None:
    """Keep the blocks of a prefix, on at least --min-copies workers."""

    def run() -> None:
        selected = _required(prefix, tokens)
        with open_client(address, name) as client:
            report = client.admin.pin(selected, tenant=tenant, min_copies=min_copies, timeout_s=timeout)
        _print_pins([report], json_, one=True)
        if not report.longest_blocks and not json_:
            progress("nobody holds it yet; it is kept and copied as soon as a request has brought it")

    guarded(run, as_json=json_)


def unpin(
    prefix: Annotated[str | None, typer.Argument(help="The prefix, as it was pinned.")] = None,
    tokens: TokensOption = None,
    pin_id: Annotated[str | None, typer.Option("--id", help="The pin's id, instead of the prefix.")] = None,
    tenant: TenantOption = "",
    address: AddressOption = None,
    name: NameOption = DEFAULT_NAME,
    json_: JsonOption = False,
) -> None:
    """Take a pin back: its blocks are evicted like any other again."""

    def run() -> None:
        selected = _prefix(prefix, tokens)
        with open_client(address, name) as client:
            report = client.admin.unpin(selected, tenant=tenant, pin_id=pin_id)
        _print_pins([report], json_, one=True)

    guarded(run, as_json=json_)


def pins(address: AddressOption = None, name: NameOption = DEFAULT_NAME, json_: JsonOption = False) -> None:
    """Pins, and who holds what they keep."""

    def run() -> None:
        with open_client(address, name) as client:
            reports = client.admin.pins()
        _print_pins(reports, json_, one=False)

    guarded(run, as_json=json_)


def _print_pins(reports: list[PinReport], as_json: bool, *, one: bool) -> None:
    if as_json:
        print_json(asdict(reports[0]) if one else {"pins": [asdict(report) for report in reports]})
        return
    rows = [
        [
            report.pin_id,
            report.tenant or "(shared)",
            report.blocks,
            f"{len(report.holders)} of {report.min_copies}",
            ", ".join(report.holders) or "–",
        ]
        for report in reports
    ]
    print_table("pins", ("pin", "tenant", "blocks", "whole copies", "on"), rows)


def parse_age_s(text: str) -> float:
    """``90``, ``90s``, ``10m``, ``2h`` or ``1d`` in seconds.

    Raises:
        RequestError: it is none of these.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)", text.strip(), re.ASCII)
    if match is None:
        raise RequestError(
            f"an age is a number with s, m, h or d, for example 10m; got {text[:40]!r}", field="older_than"
        )
    return float(match[1]) * AGE_UNITS_S[match[2]]


def _prefix(text: str | None, tokens: str | None) -> Prompt | None:
    if tokens is None:
        return text
    if text is not None:
        raise RequestError("give the prefix as text or as --tokens, not both", field="tokens")
    try:
        return [int(item) for item in tokens.split(",")]
    except ValueError as error:
        raise RequestError(f"--tokens is a list of numbers with commas, got {tokens[:60]!r}", field="tokens") from error


def _required(text: str | None, tokens: str | None) -> Prompt:
    selected = _prefix(text, tokens)
    if selected is None:
        raise RequestError("give a prefix, as text or as --tokens", field="prefix")
    return selected


def _counted(failures: dict[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in failures.items()) or "–"
