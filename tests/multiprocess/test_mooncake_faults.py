"""Real faults on a real Mooncake Store, where one is installed; and what is said where none is."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import psutil
import pytest

from kvpool.bench.metadata_peers import peer_python
from kvpool.errors import UnavailableError
from kvpool.faults.mooncake import FAULTS, compare
from kvpool.faults.scenarios import SCENARIOS

VARIABLE = "KVPOOL_MOONCAKE_PYTHON"


def _silent(_: str) -> None:
    return


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_every_fault_is_a_scenario_of_ours_and_others_are_not_compared() -> None:
    assert set(FAULTS) <= set(SCENARIOS)
    assert compare(["kill-router"], 1.0, _silent) is None


def test_a_python_without_mooncake_ends_in_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    before = _children()
    comparison = compare(["kill-holder"], 1.0, _silent)
    assert comparison is not None
    assert any("did not start" in line for line in comparison.remarks())
    assert comparison.rows([]) == []
    assert _children() == before


def test_a_master_does_not_outlive_an_owner_that_is_killed() -> None:
    code = (
        "import os, subprocess, sys; from kvpool.bench.peer_tools import tied; "
        "child = subprocess.Popen(tied('/bin/sh', '-c', 'echo up; exec sleep 3600'), stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(10.0)


def test_without_mooncake_the_report_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    try:
        peer_python("mooncake")
    except UnavailableError:
        comparison = compare(["kill-holder"], 1.0, _silent)
        assert comparison is not None
        assert VARIABLE in comparison.remarks()[0]
    else:
        pytest.skip("mooncake is installed beside kvpool")


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python that has Mooncake")
def test_mooncake_goes_through_the_same_faults_and_nothing_is_left() -> None:
    before = _children()
    comparison = compare(list(FAULTS), 1.0, _silent)
    assert comparison is not None
    assert [outcome.fault for outcome in comparison.outcomes] == list(FAULTS)
    for outcome in comparison.outcomes:
        assert outcome.note is None
        assert outcome.ok > 0
        assert outcome.wrong == 0
        ends = outcome.ok + outcome.missed + outcome.failed + outcome.wrong + outcome.hung
        assert outcome.requests == ends
        assert outcome.lost_keys > 0  # whatever was struck, the keys were gone
    assert _children() == before
