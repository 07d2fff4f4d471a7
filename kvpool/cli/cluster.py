"""``kvpool up``, ``down`` and ``status``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli.connect import open_client, running_state
from kvpool.cli.output import (
    AddressOption,
    JsonOption,
    NameOption,
    console,
    guarded,
    print_json,
    print_table,
    progress,
    readable_times,
)
from kvpool.cluster.state import DEFAULT_NAME, command, read_state
from kvpool.cluster.summary import summary
from kvpool.config import MAX_METRICS_PORT, MAX_ROUTERS, ClusterConfig, load_config, parse_config
from kvpool.errors import BY_CODE, KVPoolError, RequestError, UnavailableError
from kvpool.interrupts import at_hard_end

DOWN_TIMEOUT_S = 60.0
MAX_COLUMNS = 8
_EPOCH = re.compile(r"@\d+$")


def up(
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of workers (without --config).")] = None,
    routers: Annotated[
        int | None, typer.Option(min=1, max=MAX_ROUTERS, help="Number of routers (without --config).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Bundled name, local path or hub id (without --config).")] = None,
    http_port: Annotated[int | None, typer.Option(help="Serve the OpenAI-compatible API on this port.")] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_METRICS_PORT,
            help="Serve Prometheus metrics: routers from this port on, then metadata servers (without --config).",
        ),
    ] = None,
    name: NameOption = DEFAULT_NAME,
    ray_address: Annotated[
        str | None, typer.Option(help="Place the actors on this Ray cluster (host:port); default: an embedded one.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Start a cluster and leave it running."""
    options = _Options(workers, routers, model, http_port, metrics_port)
    guarded(lambda: _up(_settings(config, options), name, ray_address, json_), as_json=json_)


@dataclass(frozen=True, slots=True)
class _Options:
    """What can be set without a file; None is the default."""

    workers: int | None = None
    routers: int | None = None
    model: str | None = None
    http_port: int | None = None
    metrics_port: int | None = None


def _settings(path: Path | None, options: _Options) -> ClusterConfig:
    if path is not None:
        if options != _Options():
            raise RequestError(
                "--workers, --routers, --model, --http-port and --metrics-port are settings of the file when --config "
                "is given"
            )
        return load_config(path)
    group: dict[str, Any] = {} if options.workers is None else {"count": options.workers}
    if options.model is not None:
        group["engine"] = {"model": options.model}
    router: dict[str, Any] = {} if options.routers is None else {"count": options.routers}
    metadata = {}
    if options.metrics_port is not None:
        router["metrics_port"] = options.metrics_port
        metadata["metrics_port"] = options.metrics_port + (options.routers or 1)
    gateway = {"port": options.http_port}
    return parse_config({"workers": [group], "router": router, "metadata": metadata, "gateway": gateway})


def _up(config: ClusterConfig, name: str, ray_address: str | None, as_json: bool) -> None:
    arguments = [
        sys.executable,
        "-m",
        "kvpool.cluster.supervisor",
        "--name",
        name,
        "--config",
        config.model_dump_json(),
    ]
    if ray_address is not None:
        arguments += ["--ray-address", ray_address]
    supervisor = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    progress(f"cluster {name!r}: starting its supervisor")
    forget = at_hard_end(supervisor.kill)  # its guardian then ends what it has started
    try:
        ready = _wait_ready(supervisor)
    except BaseException as error:
        if not isinstance(error, KVPoolError):  # after an error of its own the supervisor cleans up and ends by itself
            progress("stopping what was started, which can take some seconds")
            supervisor.terminate()
        try:
            supervisor.wait(DOWN_TIMEOUT_S)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            supervisor.kill()
        raise
    finally:
        forget()
    if as_json:
        print_json(ready)
    else:
        end = command("down", name)
        console.print(f"cluster {name!r} is up at {ready['address']}; end it with '{end}'", highlight=False)


def _wait_ready(supervisor: subprocess.Popen[str]) -> dict[str, Any]:
    """Relay the supervisor's progress until it is ready. It bounds each of its own steps."""
    assert supervisor.stdout is not None
    for line in supervisor.stdout:
        try:
            message = json.loads(line)
        except json.JSONDecodeError:
            continue  # a library printed something
        if "progress" in message:
            progress(message["progress"])
        elif "error" in message:
            raise _error_of(message)
        elif "ready" in message:
            return dict(message["ready"])
    raise UnavailableError(f"the supervisor ended without a word (exit code {supervisor.wait(DOWN_TIMEOUT_S)})")


def _error_of(message: dict[str, Any]) -> KVPoolError:
    return BY_CODE.get(message["code"], KVPoolError)(message["error"])


def down(name: NameOption = DEFAULT_NAME, json_: JsonOption = False) -> None:
    """End the cluster that 'kvpool up' started. Fine when none runs."""
    guarded(lambda: _down(name, json_), as_json=json_)


def _down(name: str, as_json: bool) -> None:
    from kvpool.cluster.supervisor import stop_supervisor

    state = read_state(name)
    if state is not None:
        progress(f"cluster {name!r}: ending its workers, routers and metadata servers")
    if state is not None and not stop_supervisor(state, DOWN_TIMEOUT_S):
        raise UnavailableError(
            f"cluster {name!r} did not end within {DOWN_TIMEOUT_S:.0f} s; 'kill -9 {state.pid}' ends its supervisor, "
            "and all it started ends with that"
        )
    if as_json:
        print_json({"name": name, "was_running": state is not None})
    else:
        console.print(f"cluster {name!r} " + ("ended" if state is not None else "was not running"), highlight=False)


def status(address: AddressOption = None, name: NameOption = DEFAULT_NAME, json_: JsonOption = False) -> None:
    """Members, blocks, links, decisions and failures of a cluster."""
    guarded(lambda: _status(address, name, json_), as_json=json_)


def _status(address: str | None, name: str, as_json: bool) -> None:
    with open_client(address, name) as client:
        value = client.status()
    if address is None:
        value["supervisor"] = {"pid": running_state(name).pid, "cluster_dir": running_state(name).cluster_dir}
    if as_json:
        print_json(value)
        return
    for word, text in summary(value):
        console.print(f"{word:<10} {text}", highlight=False)
    value = readable_times(value)
    console.print()
    if len(value["routers"]) > 1:
        _print_rows("routers", _rows(value["routers"]))
    for part in ("router", "workers", "metadata"):
        _print_part(part, value.get(part, {}))


def _print_part(title: str, part: dict[str, Any]) -> None:
    """Plain values become one table, rows of equal things a table of their own."""
    if title in ("workers", "metadata"):
        for name, item in part.items():
            _print_part(name, item)
        return
    tables = {key: rows for key, item in part.items() if (rows := _rows(item))}
    plain = [(key, _short(item)) for key, item in part.items() if key not in tables]
    print_table(title, ("what", "value"), plain)
    for key, rows in tables.items():
        _print_rows(f"{title}: {key}", rows)


def _print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if len(columns) <= MAX_COLUMNS:
        print_table(title, columns, [[_cell(row, column) for column in columns] for row in rows])
        return
    names = _heads([_cell(row, columns[0]) for row in rows])  # too wide for a terminal: one column an entry instead
    flipped = [[column, *(_cell(row, column) for row in rows)] for column in columns[1:]]
    print_table(title, (columns[0], *names), flipped)


def _cell(row: dict[str, Any], column: str) -> str:
    return _short(row[column]) if column in row else ""


def _heads(names: list[str]) -> list[str]:
    """Workers without the epoch, which would break in a narrow column; with it where two have the same id."""
    ids = [_EPOCH.sub("", name) for name in names]
    return ids if len(set(ids)) == len(names) else names


def _rows(item: Any) -> list[dict[str, Any]]:
    """The rows of a list of mappings or a mapping of mappings; empty when it is neither."""
    if isinstance(item, dict) and item and all(isinstance(row, dict) for row in item.values()):
        return [{"": name, **row} for name, row in item.items()]
    if isinstance(item, list) and item and all(isinstance(row, dict) for row in item):
        return item
    return []


def _short(item: Any) -> str:
    if isinstance(item, float):
        return f"{item:.4g}"
    if isinstance(item, dict):
        return ", ".join(f"{key} {_short(value)}" for key, value in item.items()) or "–"
    return "none" if item is None or item in ("", [], ()) else str(item)
