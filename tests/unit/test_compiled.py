"""How the arithmetic becomes machine code, and that nothing depends on where it can be kept."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from router import compiled, kernel

SIGNATURE = "float64(float64)"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a module that can be imported, as numba does it to build again what it kept, and of which it keeps nothing
    yet."""
    import numba

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "twice.py"


def twice_from(path: Path) -> Callable[[float], float]:
    """The function of that module, as a new process would have it: nothing of the last one is in memory."""
    gc.collect()
    path.write_text("def twice(value):\n    return 2.0 * value\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[float], float] = module.twice
    return function


def test_no_call_compiles_later() -> None:
    for function in compiled.kernels():
        assert len(function.signatures) == 1
        with pytest.raises(TypeError, match="No matching definition"):
            function(*["text"] * len(function.signatures[0]))
        assert len(function.signatures) == 1


def test_arrays_that_do_not_fit_are_refused() -> None:
    table, work, kept = (np.zeros((rows, 3)) for rows in (kernel.TABLE_ROWS, kernel.WORK_ROWS, kernel.KEPT_ROWS))
    sheet = np.zeros(kernel.TERMS + kernel.HELD_COLUMNS)
    score_redo, best_load, first_holders, stripes_reach, best_stripes = compiled.kernels()
    with pytest.raises(AssertionError):
        first_holders(table, np.array([0, 3]), np.zeros(4), 0.0)
    for wrong in (np.zeros((kernel.KEPT_ROWS, 2)), np.zeros((kernel.KEPT_ROWS, 4))):
        with pytest.raises(AssertionError):
            score_redo(table, work, wrong, sheet)
        with pytest.raises(AssertionError):
            stripes_reach(table, work, wrong, sheet, np.zeros((5, 3)), np.zeros(4), 1.0, 4)
    sheet[kernel.TERMS] = 3.0
    with pytest.raises(AssertionError):
        score_redo(table, work, kept, sheet)
    for row, at in ((np.zeros((2, 2)), 0), (np.zeros((2, 3)), 1), (np.zeros((2, 3)), -1)):
        with pytest.raises(AssertionError):
            best_load(table, work, kept, sheet, row, at, 0.0, 1.0, 1)
    found, ways, links, wide = np.zeros((2, 3)), np.zeros((5, 4)), np.zeros((5, 2)), np.zeros((5, 3))
    for alphas, bytes_ns, shares in (
        (wide, links, np.ones(2)),
        (links, wide, np.ones(2)),
        (links, links, np.ones(3)),
        (links[:4].copy(), links, np.ones(2)),
    ):
        with pytest.raises(AssertionError):
            best_stripes(table, work, kept, sheet, found, ways, alphas, bytes_ns, shares, np.zeros(4), 1.0)
    found[:, 0] = 3.0
    with pytest.raises(AssertionError):
        best_stripes(table, work, kept, sheet, found, ways, links, links, np.ones(2), np.zeros(4), 1.0)


def test_what_was_kept_of_other_sources_is_compiled_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.compile_loop(twice_from(source), SIGNATURE)
    again = compiled.compile_loop(twice_from(source), SIGNATURE)
    assert sum(again.stats.cache_hits.values()) == 1
    monkeypatch.setattr(compiled, "_sources", lambda: 1)  # one of the files that it inlines has changed
    anew = compiled.compile_loop(twice_from(source), SIGNATURE)
    assert sum(anew.stats.cache_hits.values()) == 0


def test_what_cannot_be_kept_is_compiled_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    space: dict[str, Callable[[float], float]] = {}
    exec("def twice(value):\n    return 2.0 * value\n", space)  # a function without a file has nowhere to be kept
    assert compiled.compile_loop(space["twice"], SIGNATURE)(4.0) == 8.0
    assert "without a cache" in caplog.text


def _emptied(_: bytes) -> bytes:
    return b""


def _garbage(_: bytes) -> bytes:
    return b"\x80\x05garbage"


def _cut(whole: bytes) -> bytes:
    return whole[:40]


def _with_a_hole(whole: bytes) -> bytes:
    half = len(whole) // 2
    return whole[:half] + bytes(min(4096, len(whole) - half)) + whole[half + 4096 :]


def test_what_was_kept_and_is_damaged_is_compiled_anew(source: Path) -> None:
    assert compiled.compile_loop(twice_from(source), SIGNATURE)(4.0) == 8.0
    kept = [path for path in (source.parent / "kept").rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} == {".nbi", ".nbc", ".crc"}
    whole = {path: path.read_bytes() for path in kept}
    for spoil in (_emptied, _garbage, _cut, _with_a_hole):  # a hole in the code ends whoever loads it
        for path in kept:
            path.write_bytes(spoil(whole[path]))
        assert compiled.compile_loop(twice_from(source), SIGNATURE)(4.0) == 8.0
        again = compiled.compile_loop(twice_from(source), SIGNATURE)
        assert sum(again.stats.cache_hits.values()) == 1, "what was damaged is kept again"


@pytest.mark.parametrize("module", ["kvpool.cli.main", "kvpool.client", "router.core", "workers.core"])
def test_who_does_not_decide_does_not_load_the_compiler(module: str) -> None:
    code = f"import sys, {module}; sys.exit('numba' in sys.modules or 'llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_without_a_compiler_on_purpose_one_line_says_what_that_costs_and_what_to_do() -> None:
    code = "from router import kernel; from router.compiled import kernels; assert kernels()[0] is kernel.score_redo"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr.count("\n") == 1
    assert "unset it" in done.stderr
