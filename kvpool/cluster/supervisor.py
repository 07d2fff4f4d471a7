"""The process behind ``kvpool up``: owns one cluster until it is told to end.

It speaks JSON lines on standard output until the cluster is ready or has failed: ``{"progress": …}``, then
``{"ready": {…}}`` or ``{"error": …, "code": …}``. SIGTERM and SIGINT end the cluster in order.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import psutil

from kvpool.cluster.launcher import Cluster
from kvpool.cluster.ray_auth import current_token
from kvpool.cluster.state import ClusterState, claim, command, read_state, remove_state, require_writable, write_state
from kvpool.config import ClusterConfig
from kvpool.errors import KVPoolError, RequestError


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def _listen() -> None:
    """A signal that asks for the end unwinds whatever is going on. Ray, when it starts, puts handlers of its own in
    place, which print a stack; and waiting for it ends with no exception but this one."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def main() -> int:
    """Run the supervisor; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="the settings, as JSON")
    parser.add_argument("--name", required=True)
    parser.add_argument("--ray-address")
    arguments = parser.parse_args()
    _listen()
    try:
        config = ClusterConfig.model_validate_json(arguments.config)
        _require_none_runs(arguments.name)
        require_writable(arguments.name)
        with claim(arguments.name):  # two that start at once would not see each other's state
            return _run(config, arguments.name, arguments.ray_address)
    except KVPoolError as error:
        _say({"error": error.message, "code": error.code})
        return 2 if isinstance(error, RequestError) else 1
    except KeyboardInterrupt:
        return 0


def _require_none_runs(name: str) -> None:
    if (other := read_state(name)) is not None:
        raise RequestError(
            f"cluster {name!r} already runs (pid {other.pid}); end it with '{command('down', name)}', or start another "
            "one with --name"
        )


def _run(config: ClusterConfig, name: str, ray_address: str | None) -> int:
    def tell(line: str) -> None:
        _listen()  # with the first step after Ray's start at the latest
        _say({"progress": line})

    cluster = Cluster.start(config, ray_address=ray_address, name=name, progress=tell)
    try:
        process = psutil.Process()
        state = ClusterState(
            name=name,
            address=cluster.address,
            metadata=cluster.metadata.addresses,
            pid=process.pid,
            pid_created_s=process.create_time(),
            cluster_dir=str(cluster.cluster_dir),
            ray_token=current_token(),
        )
        write_state(state)
        _listen()
        _say({"ready": {"name": name, "address": state.address, "metadata": state.metadata, "pid": state.pid}})
        _detach_output(cluster)
        threading.Event().wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a second signal must not cut the clean-up short
        remove_state(name)
        cluster.close()
    return 0


def _detach_output(cluster: Cluster) -> None:
    """Whoever started us stops listening now; what we print from here on goes to the log."""
    log = os.open(cluster.cluster_dir / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)


def stop_supervisor(state: ClusterState, timeout_s: float) -> bool:
    """Ask a supervisor to end and wait; True when it is gone. One that was stopped goes on to do so."""
    try:
        os.kill(state.pid, signal.SIGTERM)
        os.kill(state.pid, signal.SIGCONT)
    except ProcessLookupError:
        return True
    deadline_s = time.monotonic() + timeout_s
    while state.alive:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


if __name__ == "__main__":
    sys.exit(main())
