"""``scripts/setup_env``: what it says while it installs, and that it ends when that fails. Its pip only talks here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup_env"
PIP = """#!/bin/sh
for number in $(seq 60); do echo "Collecting package-$number"; done
echo "Installing collected packages: package-1"
echo "ERROR: no room" >&2
exit {code}
"""


def _set_up(venv: Path, code: int) -> subprocess.CompletedProcess[str]:
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(PIP.format(code=code))
    python.chmod(0o755)
    return subprocess.run(
        ["bash", "-c", f'source "{SCRIPT}"; echo "on we go"'],
        env={**os.environ, "KVPOOL_VENV": os.path.relpath(venv, SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_installation_says_how_far_it_is_and_is_not_repeated(tmp_path: Path) -> None:
    told = _set_up(tmp_path, 0).stdout.splitlines()
    assert told[1:] == ["== 25 packages found", "== 50 packages found", "== unpacking them", "on we go"]
    assert _set_up(tmp_path, 0).stdout.splitlines() == ["== dependencies are up to date", "on we go"]


@pytest.mark.parametrize("code", [1, 2])
def test_an_installation_that_fails_ends_the_script_with_pips_own_words(tmp_path: Path, code: int) -> None:
    done = _set_up(tmp_path, code)
    assert done.returncode == code
    assert "ERROR: no room" in done.stderr
    assert "on we go" not in done.stdout
    assert not (tmp_path / ".kvpool-installed").exists()
