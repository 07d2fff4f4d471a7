"""The demo's comparison: both columns tell where every prompt token came from."""

from __future__ import annotations

import pytest

from kvpool.cli.demo import _print, _report, _Run, _Served
from kvpool.request import FinishReason, GenerateResult, RequestStats, TokenLogprobs
from kvpool.types import RequestId, WorkerId


def _served(chat: str, plan: str, cached: int, loaded: int, redone: int) -> _Served:
    stats = RequestStats(WorkerId("worker-0"), plan, cached + loaded + redone, cached, loaded, redone)
    result = GenerateResult(RequestId(chat), (7,), "x", FinishReason.LENGTH, stats, logprobs=(TokenLogprobs(7, -1.0),))
    return _Served(chat, 0, (1,) * stats.prompt_tokens, result, 0.5)


OURS = _Run((_served("Astrid", "redo", 0, 0, 1500), _served("Bjarne", "load", 0, 1376, 164)), {})
REDO = _Run((_served("Astrid", "redo", 0, 0, 1500), _served("Bjarne", "redo", 1376, 0, 164)), {})


def test_cached_loaded_and_redone_add_up_to_the_prompts_in_both_columns(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(OURS, REDO, [((7,), -1.0)] * 2)
    for run, cached, loaded in (("", 0, 1376), ("_redo_only", 1376, 0)):
        parts = [report[f"tokens_{part}{run}"] for part in ("cached", "loaded", "redone")]
        assert parts == [cached, loaded, 1664]
        assert sum(parts) == report[f"prompt_tokens{run}"]
    _print(report)
    printed = capsys.readouterr().out
    for words in (["prompt", "tokens", "3040", "3040"], ["cache", "0", "1376"], ["loaded", "1376", "0"]):
        assert any(all(word in line for word in words) for line in printed.splitlines()), words
    assert "start at once" in printed


def test_a_run_without_loads_claims_nothing_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    _print(_report(REDO, REDO, [((7,), -1.0)] * 2))
    assert "start at once" not in capsys.readouterr().out
