"""The committed gRPC stubs are those of the contract."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_committed_stubs_are_generated_from_the_contract(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "scripts/generate_protos", tmp_path],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHON": sys.executable},
    )
    committed = ROOT / "kvpool/metadata/v1"
    fresh = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert fresh, "the generator wrote nothing"
    stale = [name for name, text in fresh.items() if (committed / name).read_text() != text]
    assert not stale, "run scripts/generate_protos and commit the result"
