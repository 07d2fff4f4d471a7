"""``kvpool simulate``, ``tune`` and ``replay``: policies against traces and against recorded decisions.

Nothing here needs a cluster, a model or a GPU. Tables and JSON go to standard output, progress to standard error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from kvpool.cli.output import JsonOption, console, guarded, print_json, print_table, progress
from kvpool.cli.records import read_records
from kvpool.cli.trace_source import open_trace
from kvpool.config import MAX_ROUTERS
from kvpool.errors import ConfigError, RequestError
from kvpool.jsontext import parse_json
from router.parameters import params_from_dict, params_to_dict
from router.planning import Params
from router.policies import POLICIES
from router.replay import REPLAYABLE, Replay, replay_records
from router.simulation.cluster import Faults
from router.simulation.html import html_report
from router.simulation.presets import get_preset
from router.simulation.svg import number
from router.simulation.sweep import OURS, TUNED, Run, Sweep, cells, check, losses, oracle_regrets, run_sweep
from router.simulation.trace import Trace
from router.simulation.tune import GOALS, Tuning, tune_params

ALL = "all"
PROGRESS_S = 2.0
TraceArgument = Annotated[
    str,
    typer.Argument(
        help="File of a trace (Mooncake's JSON lines, or a CSV like Azure's or BurstGPT's; also .gz and .xz), or "
        "gen:chat|agents|docqa|hot[:key=value,…] for a made one."
    ),
]
NodesOption = Annotated[int, typer.Option(help="Nodes of the cluster.")]
ModelOption = Annotated[str, typer.Option(help="Preset of node and model, such as llama-70b or gpt-oss-120b.")]
BandwidthOption = Annotated[str, typer.Option(help="GB/s of every node's link, each way; several with commas.")]
RateOption = Annotated[str, typer.Option(help="Factors on the trace's request rate; several with commas.")]
RequestsOption = Annotated[int | None, typer.Option(help="Only so many requests from the start of the trace.")]
SeedOption = Annotated[int, typer.Option(help="Seed of faults, arrivals and random policies.")]
FaultsOption = Annotated[
    str, typer.Option(help="Faults as key=value with commas: load_death, straggler, stale (chances from 0 to 1).")
]


def simulate(
    trace: TraceArgument,
    nodes: NodesOption = 16,
    model: ModelOption = "llama-70b",
    bandwidth: BandwidthOption = "8",
    policy: Annotated[
        str,
        typer.Option(
            help="Policies with commas, or 'all'; 'oracle' is ours with the truth instead of what a router knows."
        ),
    ] = "kvpool,mooncake,dynamo,least_loaded",
    rate: RateOption = "1",
    requests: RequestsOption = None,
    seed: SeedOption = 0,
    faults: FaultsOption = "",
    host_blocks: Annotated[
        int, typer.Option(min=0, help="Blocks each node's host keeps of those that left its GPUs; 0 is no host tier.")
    ] = 0,
    routers: Annotated[int, typer.Option(min=1, max=MAX_ROUTERS, help="Routers, among which requests spread.")] = 1,
    params: Annotated[
        Path | None, typer.Option(help=f"Parameters that 'kvpool tune' wrote; adds the policy '{TUNED}'.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report with charts here.")] = None,
    spread: Annotated[bool, typer.Option(help="Spread arrivals that share a timestamp up to the next one.")] = True,
    json_: JsonOption = False,
) -> None:
    """Play a trace against a simulated cluster under several routing policies."""

    def command() -> None:
        loaded = None if params is None else load_params(params)
        if html is not None:
            _writable(html)
        sweep = Sweep(
            trace=open_trace(trace, seed=seed, spread=spread, requests=requests),
            preset=replace(get_preset(model), host_blocks=host_blocks),
            nodes=nodes,
            bandwidths_bytes_per_s=tuple(1e9 * value for value in _numbers(bandwidth, "bandwidth")),
            policies=_policies(policy, tuned=loaded is not None),
            rates=_numbers(rate, "rate"),
            seed=seed,
            faults=parse_faults(faults),
            params=loaded,
            routers=routers,
        )
        _simulate(sweep, html, json_)

    guarded(command, as_json=json_)


def _simulate(sweep: Sweep, html: Path | None, as_json: bool) -> None:
    check(sweep)
    trace = sweep.trace
    progress(f"{trace.name}: {len(trace):,} requests; {sweep.runs} runs on {sweep.nodes} nodes of {sweep.preset.name}")
    runs: list[Run] = []
    for run in run_sweep(sweep, _ticker(len(trace))):
        runs.append(run)
        report = run.report
        progress(
            f"[{len(runs)}/{sweep.runs}] {report.policy} at {report.bandwidth_gbytes_per_s:g} GB/s, rate "
            f"×{report.rate:g}: mean TTFT {report.ttft_mean_ms:,.0f} ms ({report.wall_s:.1f} s)"
        )
    if html is not None:
        _write(html, html_report(sweep, runs))
        progress(f"wrote {html}")
    if as_json:
        print_json({"trace": _trace_facts(trace), "runs": [run.to_dict() for run in runs]})
        return
    for group in cells(runs).values():
        _print_cell(sweep, group)
    for name in (OURS, TUNED):
        for loss in losses(runs, name):
            console.print(loss.text, highlight=False)
    regrets = oracle_regrets(runs)
    for (bandwidth, rate), behind in regrets.items():
        text = f"{OURS} is {behind:.1%} behind the oracle in mean TTFT at {bandwidth:g} GB/s, rate ×{rate:g}"
        console.print(text, highlight=False)
    if len(regrets) > 1:
        mean = sum(regrets.values()) / len(regrets)
        console.print(f"{OURS} is {mean:.1%} behind the oracle on average of {len(regrets)} cells", highlight=False)


_HEADER = ("policy", "mean", "p50", "p90", "p99", "good/s", "hits", "loads", "busiest")


def _print_cell(sweep: Sweep, group: list[Run]) -> None:
    first = group[0].report
    routers = f", {sweep.routers} routers" if sweep.routers > 1 else ""
    title = (
        f"{sweep.nodes} × {sweep.preset.name}{routers}, {first.bandwidth_gbytes_per_s:g} GB/s, rate ×{first.rate:g} "
        f"({number(group[0].offered_rps)} requests/s), TTFT in s"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for place, name in enumerate(_HEADER):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for run in group:
        table.add_row(*_row(run))
    console.print(table, soft_wrap=False)


def _row(run: Run) -> tuple[str, ...]:
    item = run.report
    loads = sum(count for kind, count in item.plans.items() if kind != "redo") / max(1, sum(item.plans.values()))
    ttft_ms = (item.ttft_mean_ms, item.ttft_p50_ms, item.ttft_p90_ms, item.ttft_p99_ms)
    return (
        item.policy,
        *(number(value / 1e3) for value in ttft_ms),
        f"{item.goodput_rps:.2f}",
        f"{item.hit_share:.0%}",
        f"{loads:.0%}",
        f"{item.largest_share:.1f}×",
    )


def _trace_facts(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "requests": len(trace),
        "prompt_tokens": trace.prompt_tokens,
        "duration_s": trace.duration_ns / 1e9,
    }


def _ticker(total: int) -> Callable[[str, int], None]:
    """Says every few seconds how far a run is."""
    last_s = time.monotonic()

    def tell(label: str, decided: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= PROGRESS_S:
            last_s = now_s
            progress(f"{label}: {min(decided, total):,} of {total:,} requests")

    return tell


def tune(
    trace: TraceArgument,
    out: Annotated[
        Path | None, typer.Option(help="Write the parameters here if they gain on the held-out part.")
    ] = None,
    nodes: NodesOption = 16,
    model: ModelOption = "llama-70b",
    bandwidth: BandwidthOption = "8",
    rate: RateOption = "1",
    requests: RequestsOption = None,
    trials: Annotated[int, typer.Option(help="Settings to try, the defaults included.")] = 20,
    train: Annotated[float, typer.Option(help="Share of the trace, from its start, to search on.")] = 0.5,
    goal: Annotated[str, typer.Option(help=f"What to improve: {', '.join(GOALS)}.")] = "mean",
    seed: SeedOption = 0,
    faults: FaultsOption = "",
    json_: JsonOption = False,
) -> None:
    """Search the policy's free parameters on the first part of a trace; say what they gain on the rest."""

    def command() -> None:
        if out is not None:
            _writable(out)
        tuning = Tuning(
            trace=open_trace(trace, seed=seed, requests=requests),
            preset=get_preset(model),
            nodes=nodes,
            bandwidths_bytes_per_s=tuple(1e9 * value for value in _numbers(bandwidth, "bandwidth")),
            rates=_numbers(rate, "rate"),
            goal=goal,
            trials=trials,
            train_share=train,
            seed=seed,
            faults=parse_faults(faults),
        )
        _tune(tuning, out, json_)

    guarded(command, as_json=json_)


def _tune(tuning: Tuning, out: Path | None, as_json: bool) -> None:
    result = tune_params(tuning, progress)
    written = None
    if out is not None and result.held_out_gain > 0.0:
        _write(out, json.dumps(params_to_dict(result.params), indent=2) + "\n")
        written = str(out)
    if as_json:
        print_json({**result.to_dict(), "written": written})
        return
    rows = [(name, f"{old:g}", f"{new:.4g}") for name, old, new in result.values()]
    print_table(
        f"parameters after {result.trials} trials on {tuning.trace.name}", ("parameter", "default", "best"), rows
    )
    per_cell = [
        (f"{cell.bandwidth_gbytes_per_s:g}", f"×{cell.rate:g}", cell.part, f"{cell.default:,.4g}", f"{cell.tuned:,.4g}",
         f"{cell.gain:+.1%}")
        for cell in result.cells
    ]  # fmt: skip
    print_table(f"{GOALS[tuning.goal].title}", ("GB/s", "rate", "part", "default", "best", "gain"), per_cell)
    console.print(
        f"gain: {result.train_gain:+.1%} on the part searched on, {result.held_out_gain:+.1%} on the held-out part",
        highlight=False,
    )
    if written is not None:
        console.print(f"wrote {written}; compare with: kvpool simulate … --params {written}", highlight=False)
    elif result.held_out_gain <= 0.0:
        console.print("nothing gained on the held-out part: the defaults stay, and nothing is written", highlight=False)


def replay(
    records: Annotated[Path, typer.Argument(help="Decision records that 'kvpool records' wrote (.jsonl, .parquet).")],
    policy: Annotated[str, typer.Option(help=f"Rule to decide again with: {', '.join(sorted(REPLAYABLE))}.")],
    seed: Annotated[int, typer.Option(help="Seed of a random rule.")] = 0,
    json_: JsonOption = False,
) -> None:
    """Decide recorded requests again with another policy, at the recorded prices."""

    def command() -> None:
        result = replay_records(read_records(records), policy, seed)
        if json_:
            print_json(result.to_dict())
        else:
            _print_replay(records, result)

    guarded(command, as_json=json_)


def _print_replay(records: Path, result: Replay) -> None:
    rows = [
        ("decisions", f"{result.decisions:,}"),
        ("decided by", ", ".join(f"{name} ({count:,})" for name, count in result.recorded_policies.items())),
        ("choices that change", f"{result.changed:,} ({result.changed / max(1, result.decisions):.1%})"),
        ("… another worker", f"{result.changed_workers:,}"),
        ("… another plan on the same worker", f"{result.changed - result.changed_workers:,}"),
        ("predicted TTFT, as recorded (mean)", f"{result.recorded_ms:,.1f} ms"),
        (f"predicted TTFT, {result.policy} (mean)", f"{result.replayed_ms:,.1f} ms"),
        ("difference (mean)", f"{result.difference_ms:+,.1f} ms ({result.difference_share:+.1%})"),
        ("difference where the choice changes", f"{result.changed_difference_ms:+,.1f} ms"),
        ("dearer / cheaper / equal", f"{result.dearer:,} / {result.cheaper:,} / {result.equal:,}"),
    ]
    if result.outcomes:
        rows.append(
            (
                "real TTFT against its prediction (median)",
                f"{result.median_error:+.1%} over {result.outcomes:,} outcomes",
            )
        )
    print_table(f"{records.name} decided again by {result.policy}", ("what", "value"), rows)
    for note in result.notes:
        console.print(f"· {note}", highlight=False, markup=False)


# ---- what users type


def _numbers(text: str, name: str) -> tuple[float, ...]:
    """Positive numbers with commas, each once.

    Raises:
        RequestError: something else; the message names it.
    """
    found: list[float] = []
    for part in filter(None, (item.strip() for item in text.split(","))):
        try:
            value = float(part)
        except ValueError as error:
            raise RequestError(f"--{name} takes numbers with commas between them, got {part!r}", field=name) from error
        if not 0.0 < value < float("inf"):
            raise RequestError(f"every {name} must be positive and finite, got {part}", field=name)
        found.append(value)
    if not found:
        raise RequestError(f"--{name} needs at least one number", field=name)
    return tuple(dict.fromkeys(found))


def _policies(text: str, *, tuned: bool) -> tuple[str, ...]:
    names = [item for item in (part.strip() for part in text.split(",")) if item]
    if names == [ALL]:
        names = list(POLICIES)
    if tuned:
        names = [name for name in names if name != TUNED]
        names.insert(names.index(OURS) + 1 if OURS in names else 0, TUNED)
    return tuple(dict.fromkeys(names))


def parse_faults(text: str) -> Faults:
    """Chances of faults from ``key=value`` pairs.

    Raises:
        RequestError: an unknown fault, or a chance outside [0, 1].
    """
    known = ("load_death", "straggler", "stale")
    assert set(known) <= {item.name for item in fields(Faults)}
    chances: dict[str, float] = {}
    for pair in filter(None, (item.strip() for item in text.split(","))):
        name, _, value = pair.partition("=")
        if name not in known:
            raise RequestError(f"unknown fault {name!r:.80}; known: {', '.join(known)}", field="faults")
        try:
            chances[name] = float(value)
        except ValueError:
            chances[name] = -1.0
        if not 0.0 <= chances[name] <= 1.0:
            raise RequestError(f"the chance of {name} must be from 0 to 1, got {value!r:.80}", field="faults")
    return Faults(**chances)  # type: ignore[arg-type]


def load_params(path: Path) -> Params:
    """Read parameters that ``kvpool tune`` wrote.

    Raises:
        ConfigError: the file is missing or wrong.
    """
    try:
        return params_from_dict(parse_json(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"cannot read the parameters {path}: {error.strerror}", path=str(path)) from error
    except ValueError as error:
        raise ConfigError(f"the parameters {path} are not valid JSON: {error}", path=str(path)) from error


def _writable(path: Path) -> None:
    """Fail before the work rather than after it."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise RequestError(f"cannot write {path}: its folder does not exist, or it is one", path=str(path))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}", path=str(path)) from error
