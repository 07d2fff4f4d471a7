"""The `kvpool` command: one file per group of subcommands, put together here."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from kvpool.cli import administer, bench, cluster, demo, inject, request, simulate
from kvpool.cli.output import JsonOption, console, guarded, print_json, progress
from kvpool.config import DEFAULT_MODEL

app = typer.Typer(
    name="kvpool",
    help="A distributed KV-cache pool for LLM inference: redo the prefill or load the blocks, whichever is sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(cluster.up)
app.command()(cluster.down)
app.command()(cluster.status)
app.command()(administer.drain)
app.command()(administer.evict)
app.command()(administer.pin)
app.command()(administer.unpin)
app.command()(administer.pins)
app.command()(request.generate)
app.command()(request.explain)
app.command()(request.records)
app.command()(demo.demo)
app.command()(bench.bench)
app.command()(inject.inject)
app.command()(simulate.simulate)
app.command()(simulate.tune)
app.command()(simulate.replay)


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(help="Bundled name, local path or hub id.")] = DEFAULT_MODEL,
    json_: JsonOption = False,
) -> None:
    """Get a model ready on this machine, once."""
    guarded(lambda: _fetch(model, json_), as_json=json_)


def _fetch(model: str, as_json: bool) -> None:
    from workers.engine.models import resolve_model

    resolved = resolve_model(model, report=progress)
    if as_json:
        print_json({"name": resolved.name, "path": str(resolved.path), "revision": resolved.revision})
    else:
        console.print(f"model {resolved.name} is ready", highlight=False)


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main() -> None:
    """Entry point. SIGTERM unwinds like Ctrl-C, so that every command cleans up behind itself."""
    signal.signal(signal.SIGTERM, _terminated)
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch is imported; see kvpool.cluster.launcher
    try:
        app()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing more to say
        raise SystemExit(128 + signal.SIGPIPE) from None


if __name__ == "__main__":
    main()
