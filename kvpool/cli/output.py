"""What all commands share: tables or one JSON object on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpool.errors import KVPoolError, RequestError
from kvpool.interrupts import second_interrupt_ends

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
AddressOption = Annotated[
    str | None, typer.Option(help="Ray address (host:port) of a running cluster; default: the one 'kvpool up' started.")
]
NameOption = Annotated[str, typer.Option(help="Name of the cluster.")]

# What is printed holds paths, errors and a model's words: brackets and colons in it are no markup and no emoji.
# Lines stay whole: a terminal wraps them itself, and a log or a pipe is no terminal of 80 columns. Tables are folded.
console = Console(markup=False, emoji=False, soft_wrap=True)
stderr = Console(stderr=True, markup=False, emoji=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON object on standard output. A number that is none, as of a link never measured, becomes null."""
    typer.echo(json.dumps(_without_nan(value), indent=2, default=str, allow_nan=False))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on standard output."""
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table, soft_wrap=False)


def readable_times(value: Any) -> Any:
    """Nested data for a reader: what is called ``…_ns`` loses that ending, and says its unit behind the number."""
    if isinstance(value, list | tuple):
        return [readable_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    told = {}
    for key, item in value.items():
        name = str(key).removesuffix("_ns")
        if name == key or name in value or isinstance(item, bool) or not isinstance(item, int | float):
            told[key] = readable_times(item)
        else:
            told[name] = duration(item)
    return told


def duration(value_ns: float) -> str:
    """Nanoseconds as three digits and the unit that suits them."""
    for unit_ns, unit in ((3.6e12, "h"), (6e10, "min"), (1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(value_ns) >= 0.9995 * unit_ns:  # what would be rounded up to it
            value = value_ns / unit_ns
            return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:.0f} {unit}"
    return f"{value_ns:.3g} ns" if value_ns else "0 s"


def progress(line: str) -> None:
    """Say on standard error what is going on."""
    stderr.print(f"· {line}", highlight=False)


def fail(error: KVPoolError, *, as_json: bool) -> NoReturn:
    """Print an error and its notes and end: exit code 2 for the caller's mistakes, 1 for everything else."""
    if as_json:
        print_json({"error": error.message, "code": error.code, "details": error.details})
    stderr.print(Text.assemble(("error", "bold red"), f" ({error.code}): {error}"))
    for note in getattr(error, "__notes__", ()):
        progress(note)
    raise typer.Exit(EXIT_BAD_INPUT if isinstance(error, RequestError) else EXIT_FAILED)


def guarded(command: Callable[[], None], *, as_json: bool) -> None:
    """Run a command; a typed error becomes a message and an exit code, never a traceback. A second Ctrl-C ends it."""
    try:
        with second_interrupt_ends():
            command()
    except KVPoolError as error:
        fail(error, as_json=as_json)
