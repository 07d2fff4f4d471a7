"""What all commands share: tables or one JSON object on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from kvpool.errors import KVPoolError, RequestError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
AddressOption = Annotated[
    str | None, typer.Option(help="Ray address (host:port) of a running cluster; default: the one 'kvpool up' started.")
]
NameOption = Annotated[str, typer.Option(help="Name of the cluster.")]

console = Console()
stderr = Console(stderr=True)


def print_json(value: Any) -> None:
    """Print one JSON object on standard output."""
    typer.echo(json.dumps(value, indent=2, default=str))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on standard output."""
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)


def progress(line: str) -> None:
    """Say on standard error what is going on."""
    stderr.print(f"· {line}", highlight=False)


def fail(error: KVPoolError, *, as_json: bool) -> NoReturn:
    """Print an error and end: exit code 2 for the caller's mistakes, 1 for everything else."""
    if as_json:
        print_json({"error": error.message, "code": error.code, "details": error.details})
    stderr.print(f"[bold red]error[/] ({error.code}): {error}", highlight=False)
    raise typer.Exit(EXIT_BAD_INPUT if isinstance(error, RequestError) else EXIT_FAILED)


def guarded(command: Callable[[], None], *, as_json: bool) -> None:
    """Run a command; a typed error becomes a message and an exit code, never a traceback."""
    try:
        command()
    except KVPoolError as error:
        fail(error, as_json=as_json)
