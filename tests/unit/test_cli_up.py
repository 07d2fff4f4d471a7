"""``kvpool up``: what its options mean, and what it says when somebody changes their mind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.cli import cluster
from kvpool.config import ClusterConfig
from kvpool.errors import RequestError


def test_the_options_are_settings_and_a_file_has_its_own() -> None:
    config = cluster._settings(None, cluster._Options(workers=2, routers=3, metrics_port=9100))
    assert (config.num_workers, config.router.count) == (2, 3)
    assert (config.router.metrics_port, config.metadata.metrics_port) == (9100, 9103)
    assert cluster._settings(None, cluster._Options()) == ClusterConfig()
    with pytest.raises(RequestError, match="--routers"):
        cluster._settings(Path("kvpool.toml"), cluster._Options(routers=2))


class _Supervisor:
    """A start that is interrupted after its first word; notes what was done to it, and what had been said by then."""

    def __init__(self, capture: pytest.CaptureFixture[str], *, twice: bool = False) -> None:
        self.twice = twice
        self.stdout = self._lines()
        self.said_before: dict[str, str] = {}
        self._capture = capture

    def _lines(self) -> Iterator[str]:
        yield '{"progress": "ray: starting"}'
        raise KeyboardInterrupt

    def terminate(self) -> None:
        self.said_before["terminate"] = self._capture.readouterr().err

    def wait(self, _timeout_s: float) -> int:
        self.said_before["wait"] = ""
        if self.twice:
            raise KeyboardInterrupt
        return 0

    def kill(self) -> None:
        self.said_before["kill"] = ""


@pytest.mark.parametrize("twice", [False, True])
def test_an_interrupted_up_says_at_once_that_it_stops_and_waits_for_the_end_unless_it_is_interrupted_again(
    twice: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = _Supervisor(capsys, twice=twice)

    def start(*_: Any, **__: Any) -> _Supervisor:
        return supervisor

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        cluster._up(ClusterConfig(), "c", None, False)
    assert list(supervisor.said_before) == ["terminate", "wait", *["kill"][: int(twice)]]
    said = supervisor.said_before["terminate"].splitlines()
    assert [line.split()[1] for line in said] == ["cluster", "ray:", "stopping"]


def _many(worker: str, **cells: Any) -> dict[str, Any]:
    return {"worker": worker, **dict.fromkeys("abcdefgh", 1), **cells}


def test_tables_of_the_status_name_workers_without_epoch_and_say_none_where_there_is_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    epoch = 1796076074297640324
    rows = [_many(f"worker-0@{epoch}", error=None), _many(f"worker-1@{epoch}", error="")]
    cluster._print_rows("workers", rows)
    printed = capsys.readouterr().out
    assert "worker-0 " in printed
    assert "@" not in printed
    assert printed.count("none") == 2
    twins = [_many("worker-0@1"), _many("worker-0@2")]
    cluster._print_rows("workers", twins)
    assert "worker-0@1" in capsys.readouterr().out
    assert cluster._short({"links": [], "last_error": "", "written": 0}) == "links none, last_error none, written 0"


@pytest.mark.parametrize(("name", "end"), [("default", "kvpool down"), ("nu", "kvpool down --name nu")])
def test_up_says_how_this_cluster_is_ended(
    name: str, end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = SimpleNamespace(stdout=['{"ready": {"address": "127.0.0.1:1"}}'], kill=None)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: started)
    cluster._up(ClusterConfig(), name, None, False)
    assert capsys.readouterr().out == f"cluster {name!r} is up at 127.0.0.1:1; end it with '{end}'\n"
