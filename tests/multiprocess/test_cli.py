"""The command line as a user meets it: a cluster goes up, serves, explains itself, and goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvpool.interrupts import EXIT_INTERRUPTED
from tests.multiprocess.cluster_kit import processes_of, wait_until

pytestmark = pytest.mark.cluster

KVPOOL = [sys.executable, "-m", "kvpool.cli.main"]
UP_TIMEOUT_S = 150


class Shell:
    """Runs ``kvpool`` with a state directory of its own."""

    def __init__(self, state_home: Path) -> None:
        self.environment = {**os.environ, "XDG_STATE_HOME": str(state_home)}

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command to its end; its standard output."""
        done = subprocess.run(
            [*KVPOOL, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Run a command with ``--json``."""
        value: dict[str, Any] = json.loads(self.run(*arguments, "--json", code=code))
        return value


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A shell that knows of no cluster yet."""
    return Shell(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def up(shell: Shell, tiny_model_path: Path) -> Iterator[dict[str, Any]]:
    """A cluster that ``kvpool up`` left running; ``kvpool down`` must leave nothing of it."""
    ready = shell.json("up", "--workers", "2", "--model", str(tiny_model_path))
    try:
        cluster_dir = shell.json("status")["supervisor"]["cluster_dir"]
        yield ready
    finally:
        ended = shell.json("down")
    assert ended == {"name": "default", "was_running": True}
    assert processes_of(cluster_dir) == []
    assert not Path(cluster_dir).exists()
    # It has ended; whoever inherited it when 'up' returned may take a moment to collect its exit code.
    wait_until(lambda: not psutil.pid_exists(ready["pid"]), 10, "the supervisor's process is gone")
    assert shell.json("down") == {"name": "default", "was_running": False}


def test_generate_and_explain_work_on_the_running_cluster(shell: Shell, up: dict[str, Any]) -> None:
    result = shell.json("generate", "Hello there", "--max-tokens", "4")
    assert 1 <= len(result["tokens"]) <= 4
    record = shell.json("explain", result["request_id"])
    assert record["worker"].partition("@")[0] == result["stats"]["worker_id"]
    text = shell.run("explain", result["request_id"])
    assert "chosen:" in text
    assert "outcome:" in text


def test_status_shows_members_blocks_links_decisions_and_failures(shell: Shell, up: dict[str, Any]) -> None:
    status = shell.json("status")
    assert {item["state"] for item in status["router"]["workers"]} == {"alive"}
    assert {"links", "decisions", "failures"} <= status["router"].keys()
    assert all(item["blocks"]["total"] > 0 for item in status["workers"].values())
    (server,) = status["metadata"].values()
    assert {member["worker_id"] for member in server["members"]} == {"worker-0", "worker-1"}
    assert "worker-0" in shell.run("status")


def test_a_second_up_is_refused_by_name(shell: Shell, up: dict[str, Any]) -> None:
    assert "already runs" in shell.json("up", code=2)["error"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("generate", "x", "--max-tokens", "-1"), "max_tokens"),
        (("explain", "req-unknown"), "req-unknown"),
        (("status", "--name", "elsewhere"), "kvpool up"),
        (("bench", "nonsense"), "engine"),
    ],
)
def test_mistakes_are_answered_with_the_way_out(
    shell: Shell, up: dict[str, Any], arguments: tuple[str, ...], named: str
) -> None:
    code = 1 if "elsewhere" in arguments else 2
    assert named in shell.json(*arguments, code=code)["error"]


def test_who_asks_for_another_name_at_the_address_of_a_cluster_is_told_where_names_are_given(
    shell: Shell, up: dict[str, Any]
) -> None:
    error = shell.json("generate", "x", "--address", up["address"], "--name", "nu", code=1)["error"]
    assert "of cluster 'nu'" in error
    assert "cluster= in Python" in error
    assert "--name" in error


JOINING = """
import sys
import ray
from kvpool.client import KVPoolClient
for _ in range(2):
    first, second = KVPoolClient(address=sys.argv[1]), KVPoolClient(address=sys.argv[1])
    for client in (first, second):
        client.generate("Hello", max_tokens=1)
        client.close()
    print(ray.is_initialized())
"""


def test_clients_share_the_connection_of_their_process_and_the_last_one_ends_it(
    shell: Shell, up: dict[str, Any]
) -> None:
    program = [sys.executable, "-c", JOINING, up["address"]]
    done = subprocess.run(
        program, env=shell.environment, capture_output=True, text=True, timeout=UP_TIMEOUT_S, check=False
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


EMBEDDED = """
import faulthandler, signal, sys
faulthandler.enable()
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
from kvpool.client import KVPoolClient
from kvpool.config import ClusterConfig, EngineConfig, WorkerConfig
config = ClusterConfig(workers=(WorkerConfig(count=1, engine=EngineConfig(model=sys.argv[1], num_blocks=64)),))
with KVPoolClient(config=config) as client:
    print(client._async._cluster.cluster_dir, flush=True)
    for _ in client.stream("Hello", max_tokens=800, ignore_eos=True):
        pass
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_an_embedded_cluster_ends_with_its_program_whatever_ends_it(
    number: signal.Signals, tiny_model_path: Path, tmp_path: Path
) -> None:
    said = tmp_path / "stderr"
    program = subprocess.Popen(
        [sys.executable, "-c", EMBEDDED, str(tiny_model_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said.open("w"),
        text=True,
    )
    try:
        assert program.stdout is not None
        cluster_dir = program.stdout.readline().strip()
        assert Path(cluster_dir).is_dir(), said.read_text()
        program.send_signal(number)
        try:
            program.wait(60)
        except subprocess.TimeoutExpired:
            program.send_signal(signal.SIGABRT)  # makes it say where its threads are
            program.wait(20)
            pytest.fail(f"it went on for 60 s, with its threads here:\n{said.read_text()}")
        wait_until(lambda: processes_of(cluster_dir) == [], 20, "every process of the cluster is gone")
        wait_until(lambda: not Path(cluster_dir).exists(), 20, "its directory is gone")
    finally:
        if program.poll() is None:
            program.kill()
        program.communicate()


INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
from kvpool.cli.main import main
main()
"""


def _cluster_dirs() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("kvpool-*"))


def test_an_up_that_is_interrupted_says_only_what_it_does_and_nothing_of_it_stays(
    shell: Shell, tiny_model_path: Path, tmp_path: Path
) -> None:
    before = _cluster_dirs()
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "up", "--workers", "1", "--model", str(tiny_model_path)],
        env={**shell.environment, "XDG_STATE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stderr is not None
        said = [next(line for line in program.stderr if "workers: starting" in line)]  # Ray runs
        (cluster_dir,) = _cluster_dirs() - before
        program.send_signal(signal.SIGINT)
        said += program.communicate(timeout=60)[1].splitlines()
        assert program.returncode == EXIT_INTERRUPTED, said
    finally:
        if program.poll() is None:
            program.kill()
        program.communicate()
    assert [line for line in said if not line.startswith("· ")] == []
    wait_until(lambda: processes_of(str(cluster_dir)) == [], 20, "every process of the cluster is gone")
    wait_until(lambda: not cluster_dir.exists(), 20, "its directory is gone")
