"""The demo is the main job on real input: its own checks must hold, and its report must have what users read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.model]

TIMEOUT_S = 600


@pytest.mark.timeout(TIMEOUT_S)
def test_the_demo_loads_prefixes_and_equals_the_run_without_a_pool() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli.main", "demo", "--chats", "3", "--json"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["outputs_equal"] is True
    assert report["requests"] == len(report["per_request"]) == 6
    assert {"bytes_loaded", "tokens_redone", "tokens_loaded", "ttft_ms_p50", "ttft_ms_p50_redo_only"} <= report.keys()
    for run in ("", "_redo_only"):
        parts = sum(report[f"tokens_{part}{run}"] for part in ("cached", "loaded", "redone"))
        assert parts == report[f"prompt_tokens{run}"]
    assert "plain model: 6 of 6" in done.stderr
    assert report["loads"] > 0
    assert report["bytes_loaded"] > 0
