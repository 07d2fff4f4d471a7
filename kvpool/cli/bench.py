"""``kvpool bench NAME``: run one benchmark, or all, and print its report."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Annotated

import typer

import kvpool.bench
from kvpool.bench.report import Row, table
from kvpool.cli.output import EXIT_FAILED, JsonOption, guarded, print_json, print_table, progress
from kvpool.errors import RequestError


def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark; 'list' names them.")],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, for a first look.")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="Measure installed peers beside ours.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit non-zero when a row falls short of its bar.")] = False,
    json_: JsonOption = False,
) -> None:
    """Measure a part against its reference in the same run."""
    guarded(lambda: _bench(name, quick, peers, check, json_), as_json=json_)


def names() -> list[str]:
    """Benchmarks there are: modules with a ``run``, which is looked for without importing what they measure."""
    (folder,) = kvpool.bench.__path__
    sources = {module.name: Path(folder, f"{module.name}.py") for module in pkgutil.iter_modules([folder])}
    return sorted(name for name, source in sources.items() if "\ndef run(" in source.read_text(encoding="utf-8"))


def _bench(name: str, quick: bool, peers: bool, check: bool, as_json: bool) -> None:
    known = names()
    if name == "list":
        print_json(known) if as_json else typer.echo("\n".join(known))
        return
    if name not in known:
        raise RequestError(f"no benchmark {name!r}; there are: {', '.join(known)}", field="name")
    progress(f"bench {name}: measuring")
    rows: list[Row] = importlib.import_module(f"kvpool.bench.{name}").run(quick=quick, peers=peers)
    if as_json:
        print_json({"bench": name, "rows": [row.as_dict() for row in rows]})
    else:
        header, *lines = table(rows)
        print_table(f"bench {name} (ratio above 1 is better than the reference)", header, lines)
    if check and any(row.holds is False for row in rows):
        raise typer.Exit(EXIT_FAILED)
