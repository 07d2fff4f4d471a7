"""``kvpool inject SCENARIO``: break a cluster under load, and judge from the history whether it kept its promises."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kvpool.cli.connect import running_state
from kvpool.cli.output import (
    EXIT_FAILED,
    JsonOption,
    console,
    guarded,
    print_json,
    print_table,
    progress,
)
from kvpool.config import MAX_ROUTERS
from kvpool.errors import RequestError, UnavailableError
from kvpool.faults import beside, mooncake
from kvpool.faults.checker import Verdict, check_history
from kvpool.faults.history import HistoryWriter, history_path, read_history
from kvpool.faults.report import LEGEND, SHORT_COLUMNS, as_data, cells, html, row, verdict_line
from kvpool.faults.runner import (
    LINKS_BY,
    ClusterUnderTest,
    RunOptions,
    embedded_config,
    open_network,
    require_possible,
    run_scenarios,
)
from kvpool.faults.scenarios import SCENARIOS, Needs, Scenario, find_scenario
from kvpool.interrupts import at_hard_end

ALL, LIST, MIX, CHECK = "all", "list", "mix", "check"
MAX_RUNS_AS_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class _Where:
    """Which cluster: embedded (``workers`` to ``lease_ms``), or a running one by address or name."""

    workers: int
    routers: int
    replicas: int
    model: str | None
    lease_ms: int
    address: str | None
    name: str | None

    @property
    def embedded(self) -> bool:
        return self.address is None and self.name is None


def inject(
    scenario: Annotated[
        str,
        typer.Argument(
            help="Scenarios to run one after the other, with commas, or all; mix, list or check (a history)."
        ),
    ],
    mix: Annotated[str | None, typer.Option(help="Scenarios to combine in one run, with commas, or 'all'.")] = None,
    seed: Annotated[int, typer.Option(help="Of workload, victims and order.")] = 0,
    duration: Annotated[float, typer.Option(min=0, help="Strikes go on for at least this many seconds.")] = 20.0,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Requests per second; default: what the reference run suggests.")
    ] = None,
    force_loads: Annotated[
        float, typer.Option(min=0, max=1, help="Share of routes turned into loads where another worker holds more.")
    ] = 0.5,
    workers: Annotated[int, typer.Option(min=2, help="Workers of the embedded cluster.")] = 3,
    routers: Annotated[int, typer.Option(min=1, max=MAX_ROUTERS, help="Routers of the embedded cluster.")] = 1,
    replicas: Annotated[
        int, typer.Option(min=1, help="Metadata servers of the embedded cluster; more where a scenario needs them.")
    ] = 1,
    model: Annotated[str | None, typer.Option(help="Model of the embedded cluster.")] = None,
    lease_ms: Annotated[int, typer.Option(min=500, help="Membership lease of the embedded cluster.")] = 2000,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray address (host:port) of a running cluster; without this and --name one is started for the runs."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="A cluster that 'kvpool up' started here; it is left running.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option(help="Folder for the histories, or with 'check' the file to judge again.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with tables and timelines.")] = None,
    json_: JsonOption = False,
) -> None:
    """Inject faults under load and check every promise; exit code 1 on any violation. Histories are kept."""
    logging.getLogger("kvpool").setLevel(logging.ERROR)  # what fails on purpose would fill the screen; it is judged
    where = _Where(workers, routers, replicas, model, lease_ms, address, name)
    options = RunOptions(seed=seed, duration_s=duration, rate_rps=rate, forced_loads=force_loads)

    def command() -> None:
        if scenario == LIST:
            _list(json_)
        elif scenario == CHECK:
            _conclude([_judge(history)], report, json_)
        else:
            runs = _choose(scenario, mix)
            with contextlib.redirect_stdout(sys.stderr):  # Ray prints there what it thinks of killed processes
                judged = _run_all(runs, where, options, history)
                comparison = _beside([verdict for verdict, _ in judged])
            _conclude(judged, report, json_, comparison)

    guarded(command, as_json=json_)


def _list(as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {"name": item.name, "breaks": item.breaks, "proves": item.proves, "mechanism": item.mechanism.value}
                for item in SCENARIOS.values()
            ]
        )
        return
    rows = [(item.name, item.breaks, item.proves, item.mechanism.value) for item in SCENARIOS.values()]
    print_table("scenarios", ("name", "breaks", "proves", "mechanism"), rows)


def _choose(scenario: str, mix: str | None) -> list[tuple[Scenario, ...]]:
    """The runs to make, each with the scenarios that it combines.

    Raises:
        RequestError: an unknown scenario, or --mix without 'mix' and the other way round.
    """
    if (scenario == MIX) != (mix is not None):
        raise RequestError("'kvpool inject mix' and --mix a,b,c go together", field="mix")
    if mix is not None:
        names = list(SCENARIOS) if mix == ALL else [name.strip() for name in mix.split(",")]
        return [tuple(find_scenario(name) for name in names)]
    if scenario == ALL:
        return [(item,) for item in SCENARIOS.values()]
    return [(find_scenario(name.strip()),) for name in scenario.split(",")]


def _run_all(
    runs: Sequence[tuple[Scenario, ...]], where: _Where, options: RunOptions, folder: Path | None
) -> list[tuple[Verdict, str]]:
    """Runs that need the same embedded cluster share it, one after the other."""
    folder = folder or Path(tempfile.mkdtemp(prefix="kvpool.faults-"))
    needs = [require_possible(run, embedded=where.embedded) for run in runs]
    judged = []
    for need in dict.fromkeys(needs):
        with contextlib.ExitStack() as ending:
            under_test = _open(where, need, ending)
            for run in (run for run, its in zip(runs, needs, strict=True) if its == need):
                judged.append(_run(under_test, run, options, folder))
    return judged


def _open(where: _Where, needs: Needs, ending: contextlib.ExitStack) -> ClusterUnderTest:
    """The cluster; ``ending`` ends it, and what it stands on."""
    if where.embedded:
        under_test = _start(where, needs, ending)
    elif where.address is not None:
        under_test = ClusterUnderTest.join(where.address, where.name or "default")
    else:
        assert where.name is not None
        under_test = ClusterUnderTest.join(running_state(where.name).address, where.name)
    ending.callback(under_test.close)
    ending.callback(progress, "ending the cluster" if where.embedded else "leaving the cluster as it is")
    return under_test


def _start(where: _Where, needs: Needs, ending: contextlib.ExitStack) -> ClusterUnderTest:
    needs = replace(needs, metadata_replicas=max(needs.metadata_replicas, where.replicas))
    disk_path = None
    if needs.disk:
        disk_path = tempfile.mkdtemp(prefix="kvpool.disks-")
        ending.callback(at_hard_end(partial(shutil.rmtree, disk_path, ignore_errors=True)))
        ending.callback(shutil.rmtree, disk_path, ignore_errors=True)
    network = open_network(needs, progress)
    if network is not None:
        ending.callback(network.close)
    config = embedded_config(
        needs,
        workers=where.workers,
        routers=where.routers,
        lease_ms=where.lease_ms,
        model=where.model,
        disk_path=disk_path,
        network=network,
    )

    def start() -> ClusterUnderTest:
        name = f"inject-{uuid.uuid4().hex[:8]}"
        return ClusterUnderTest.start(config, name, progress, needs.ray_nodes, network)

    try:
        return start()
    except UnavailableError as error:  # a busy machine; what ran before must not be lost for that
        progress(f"the cluster did not start, once more: {error.message}")
        return start()


def _run(
    under_test: ClusterUnderTest, scenarios: Sequence[Scenario], options: RunOptions, folder: Path
) -> tuple[Verdict, str]:
    path = history_path(folder, [item.name for item in scenarios], options.seed)
    progress(f"{' + '.join(item.name for item in scenarios)}, seed {options.seed}; history {path}")
    with HistoryWriter(path, time.monotonic_ns) as history:
        asyncio.run(run_scenarios(under_test, scenarios, options, history, progress))
    return check_history(read_history(path), options.bounds), str(path)


def _beside(verdicts: Sequence[Verdict]) -> beside.Comparison | None:
    """The same faults on another store, once no cluster of ours takes its time; the longest lease holds for all."""
    names = {name for verdict in verdicts for name in str(verdict.story.run.get("scenario", "")).split("+")}
    lease_ns = max(int(verdict.story.run.get("lease_ns", 0)) for verdict in verdicts)
    return mooncake.compare(sorted(names), lease_ns / 1e9, progress)


def _judge(path: Path | None) -> tuple[Verdict, str]:
    if path is None:
        raise RequestError("'kvpool inject check' needs --history FILE", field="history")
    return check_history(read_history(path)), str(path)


def _conclude(
    judged: Sequence[tuple[Verdict, str]],
    report: Path | None,
    as_json: bool,
    comparison: beside.Comparison | None = None,
) -> None:
    """Print, write the page, and end with the exit code, which the comparison has no part in."""
    if report is not None:
        try:
            report.write_text(html(judged, comparison), encoding="utf-8")
        except OSError as error:
            raise RequestError(f"cannot write the report {report}: {error.strerror}", field="report") from error
    holds = all(item.holds for item, _ in judged)
    if as_json:
        data = {"holds": holds, "runs": [as_data(*item) for item in judged]}
        print_json(data if comparison is None else {**data, "beside": comparison.as_dict()})
    else:
        rows = [row(verdict) for verdict, _ in judged]
        _print_table("fault runs", SHORT_COLUMNS, rows)
        console.print(LEGEND, highlight=False)
        for verdict, path in judged:
            _print(verdict, path)
        if comparison is not None:
            print_comparison(comparison, rows)
    if not holds:
        raise typer.Exit(EXIT_FAILED)


def print_comparison(comparison: beside.Comparison, ours: Sequence[dict[str, Any]]) -> None:
    """A table a fault, ours and theirs side by side, which fits any terminal; then what numbers do not say."""
    rows = comparison.rows(ours)
    for fault in dict.fromkeys(numbers["fault"] for numbers in rows):
        _print_table(f"{fault}, beside", beside.COLUMNS[1:], [numbers for numbers in rows if numbers["fault"] == fault])
    for line in comparison.remarks():
        console.print(line, highlight=False)


def _print_table(title: str, columns: tuple[tuple[str, str], ...], rows: Sequence[dict[str, Any]]) -> None:
    """A row a run; few runs as columns, which fits any terminal."""
    header, lines = [name for _, name in columns], [cells(numbers, columns) for numbers in rows]
    if len(rows) > MAX_RUNS_AS_COLUMNS:
        print_table(title, header, lines)
        return
    first, *others = zip(header, *lines, strict=True)
    print_table(title, first, others)


def _print(verdict: Verdict, path: str) -> None:
    name = verdict.story.run.get("scenario", "?")
    fallbacks = ", ".join(f"{kind} {count}" for kind, count in verdict.fallbacks.items()) or "none"
    links = "".join(f"; {text}" for text in verdict.story.run.get("mechanisms", ()) if text.startswith(LINKS_BY))
    style = "bold green" if verdict.holds else "bold red"
    console.print(Text.assemble(f"{name}: ", (verdict_line(verdict), style)))
    console.print(f"  fallbacks {fallbacks}{links}; history {path}", highlight=False)
    for violation in verdict.violations:
        console.print(Text.assemble("  ", ("violation", "bold red"), f" {violation}"))
