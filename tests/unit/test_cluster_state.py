"""The state file of ``kvpool up``: found while its process lives, gone afterwards."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kvpool.cli.connect import running_state
from kvpool.cluster.state import (
    DEFAULT_NAME,
    ClusterState,
    all_states,
    claim,
    command,
    read_state,
    remove_state,
    require_writable,
    state_path,
    write_state,
)
from kvpool.cluster.supervisor import _require_none_runs
from kvpool.errors import ConfigError, RequestError, UnavailableError


@pytest.fixture(autouse=True)
def _own_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def _state() -> ClusterState:
    return ClusterState("c", "127.0.0.1:1", ("127.0.0.1:2",), os.getpid(), psutil.Process().create_time(), "/tmp/x")


def test_a_running_cluster_is_found_and_forgotten_again() -> None:
    write_state(_state())
    assert read_state("c") == _state()
    remove_state("c")
    remove_state("c")
    assert read_state("c") is None


def test_the_file_of_a_dead_supervisor_is_removed() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    created_s = psutil.Process(process.pid).create_time()
    process.wait()
    write_state(replace(_state(), pid=process.pid, pid_created_s=created_s))
    assert read_state("c") is None
    assert not state_path("c").exists()


def test_a_reused_pid_is_not_taken_for_the_supervisor() -> None:
    write_state(replace(_state(), pid_created_s=psutil.Process().create_time() - 100))
    assert read_state("c") is None


def test_a_damaged_file_is_named() -> None:
    state_path("c").parent.mkdir(parents=True)
    state_path("c").write_text("{")
    with pytest.raises(UnavailableError, match=r"c\.json"):
        read_state("c")


@pytest.mark.parametrize("name", ["", "../x", "a b"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="cluster name"):
        state_path(name)


def test_the_file_is_readable_by_its_owner_only_because_it_holds_a_token() -> None:
    write_state(_state())
    assert state_path("c").stat().st_mode & 0o077 == 0
    assert all_states() == [_state()]


@pytest.mark.parametrize("text", ["{", "[]", "{}", "5", '{"metadata": 5}'])
def test_a_broken_file_of_one_cluster_does_not_hide_the_others(text: str) -> None:
    write_state(_state())
    state_path("broken").write_text(text)
    state_path("c").with_name("strange name.json").write_text("{}")
    with pytest.raises(UnavailableError, match="remove it"):
        read_state("broken")
    assert all_states() == [_state()]


def test_a_name_is_claimed_by_one_process_and_free_when_that_ends() -> None:
    with claim("c"):
        with pytest.raises(RequestError, match=r"'c' is starting.*'kvpool down --name c'"):
            claim("c")
        claim("d").close()
    claim("c").close()


def test_a_place_that_cannot_be_written_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_writable("c")
    assert list(state_path("c").parent.iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    for refused in (lambda: require_writable("c"), lambda: write_state(_state())):
        with pytest.raises(ConfigError, match="Not a directory; make room there, or set XDG_STATE_HOME"):
            refused()


def test_who_names_a_cluster_that_does_not_run_is_told_which_ones_do() -> None:
    with pytest.raises(UnavailableError, match="no cluster 'd' runs here; start one with 'kvpool up --name d'"):
        running_state("d")
    write_state(_state())
    with pytest.raises(UnavailableError, match=r"no cluster .d. runs here; here run: c \(give --name\)"):
        running_state("d")


def test_a_hint_names_the_cluster_unless_it_is_the_default_one() -> None:
    assert command("down", DEFAULT_NAME) == "kvpool down"
    assert command("down", "nu") == "kvpool down --name nu"
    assert command("explain r", "nu", "h:1") == "kvpool explain r --address h:1 --name nu"


def test_a_second_start_of_a_cluster_is_told_how_to_end_the_first() -> None:
    write_state(_state())
    with pytest.raises(RequestError, match="'kvpool down --name c', or start another one with --name"):
        _require_none_runs("c")
