"""Where a cluster's actors go, and its end: every step runs, whatever becomes of the others, and only in the process
that owns it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from kvpool.cluster import launcher
from kvpool.cluster.guardian import spawn_guardian
from kvpool.cluster.launcher import Cluster, _Launched, _placement
from kvpool.cluster.state import ClusterState
from kvpool.cluster.supervisor import stop_supervisor
from kvpool.config import ClusterConfig
from kvpool.errors import ConfigError, ModelError


class _Interrupted:
    """Metadata servers whose end is interrupted by Ctrl-C."""

    def close(self) -> None:
        raise KeyboardInterrupt


def _half_started(metadata: Any = None) -> tuple[Cluster, _Launched]:
    cluster_dir = Path(tempfile.mkdtemp(prefix="kvpool-"))
    launched = _Launched(cluster_dir, spawn_guardian(cluster_dir), metadata)
    return Cluster(ClusterConfig(), "c", launched), launched


def test_an_interrupted_close_still_leaves_nothing() -> None:
    cluster, launched = _half_started(_Interrupted())
    with pytest.raises(KeyboardInterrupt):
        cluster.close()
    assert launched.guardian.poll() is not None
    assert not launched.cluster_dir.exists()
    cluster.close()


def test_a_model_that_is_not_here_yet_is_not_fetched_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, *, report: Callable[[str], None]) -> None:
        report(f"{name}: downloading")
        raise ModelError("no room")

    said: list[str] = []
    monkeypatch.setattr(launcher, "resolve_model", fetch)
    with pytest.raises(ModelError):
        Cluster.start(ClusterConfig(), progress=said.append)
    assert said[-1].endswith(": downloading")


def test_a_forked_child_cannot_end_the_cluster() -> None:
    cluster, launched = _half_started()
    pid = os.fork()
    if not pid:
        cluster.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert launched.cluster_dir.exists()
    assert launched.guardian.poll() is None
    cluster.close()
    assert not launched.cluster_dir.exists()


def test_a_guardian_that_cannot_start_leaves_no_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model_path: Path
) -> None:
    def refuse(_: Path) -> Any:
        raise OSError("no process left")

    monkeypatch.setattr("kvpool.cluster.launcher.spawn_guardian", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = ClusterConfig.model_validate({"workers": [{"count": 1, "engine": {"model": str(tiny_model_path)}}]})
    with pytest.raises(OSError, match="no process left"):
        Cluster.start(config)
    assert list(tmp_path.iterdir()) == []


def test_actors_of_a_kind_go_to_every_living_node_in_turn_this_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    own, first, second, dead = (letter * 56 for letter in "eabd")
    nodes = [{"NodeID": name, "Alive": name != dead} for name in (second, dead, own, first)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: own))
    placements = [_placement(number) for number in range(4)]
    assert [item["scheduling_strategy"].node_id for item in placements] == [own, first, second, own]
    for item in placements:
        assert item["scheduling_strategy"].soft, "when its node is dead, an actor is started again elsewhere"
        assert item["memory"] > 0, "Ray places what reserves nothing by chance"


def test_an_unknown_policy_is_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.cluster.launcher.resolve_model", lambda _: pytest.fail("too late"))
    with pytest.raises(ConfigError, match="did you mean 'kvpool'"):
        Cluster.start(ClusterConfig.model_validate({"router": {"policy": "kvpol"}}))


def test_a_supervisor_that_was_stopped_goes_on_and_ends_when_it_is_asked_to() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        created_s = psutil.Process(process.pid).create_time()
        state = ClusterState("c", "127.0.0.1:1", (), process.pid, created_s, "/tmp/x")
        process.send_signal(signal.SIGSTOP)
        assert stop_supervisor(state, 30.0)
    finally:
        process.kill()
        process.wait()
