"""A short mix of real faults under load, judged from its history: what CI runs of `kvpool inject`."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from kvpool.faults.checker import check_history
from kvpool.faults.history import HistoryWriter, read_history
from kvpool.faults.runner import ClusterUnderTest, RunOptions, embedded_config, require_possible, run_scenarios
from kvpool.faults.scenarios import find_scenario
from kvpool.faults.workload import WorkloadConfig, label, plan_chats
from workers.engine.reference import PlainModel

pytestmark = pytest.mark.cluster

MIX = ("kill-holder", "link-corrupt", "kill-metadata", "pause-router")
OPTIONS = RunOptions(seed=11, duration_s=0.0, baseline_s=3.0, rate_rps=4.0)


def _silent(_: str) -> None:
    return


def test_a_mix_of_faults_under_load_loses_nothing_and_changes_no_token(tiny_model_path: Path, tmp_path: Path) -> None:
    scenarios = [find_scenario(name) for name in MIX]
    needs = require_possible(scenarios, embedded=True)
    config = embedded_config(needs, workers=3, lease_ms=1500, model=str(tiny_model_path))
    path = tmp_path / "history.jsonl"
    under_test = ClusterUnderTest.start(config, "chaos", _silent)
    try:
        with HistoryWriter(path, time.monotonic_ns) as history:
            asyncio.run(run_scenarios(under_test, scenarios, OPTIONS, history, _silent))
    finally:
        under_test.close()
    verdict = check_history(read_history(path), OPTIONS.bounds)
    assert [str(item) for item in verdict.violations] == []
    assert {fault.name for fault in verdict.story.faults.values()} == set(MIX)
    assert any(request.attempts[-1].holders for request in verdict.story.requests.values() if request.attempts)
    _check_reference(verdict.story.references, tiny_model_path)


def _check_reference(references: dict[str, tuple[int, ...]], model: Path) -> None:
    """What the run was compared with is itself what the plain model says."""
    plain = PlainModel(model)
    workload = WorkloadConfig(seed=OPTIONS.seed)
    chat = random.Random(OPTIONS.seed).choice(plan_chats(workload))
    context = chat.system
    for turn, question in enumerate(chat.questions):
        context += question
        answer = references[label(chat.name, turn)]
        assert answer == tuple(item.token for item in plain.greedy(context, workload.answer_tokens))
        context += answer
