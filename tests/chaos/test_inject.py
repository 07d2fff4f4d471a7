"""A short mix of real faults under load, judged from its history: what CI runs of `kvpool inject`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

import pytest

from kvpool.faults.checker import check_history
from kvpool.faults.history import HistoryWriter, read_history
from kvpool.faults.nemesis import NAMESPACES, SHAPING
from kvpool.faults.runner import (
    ClusterUnderTest,
    RunOptions,
    embedded_config,
    open_network,
    require_possible,
    run_scenarios,
)
from kvpool.faults.scenarios import find_scenario
from kvpool.faults.workload import WorkloadConfig, label, plan_chats
from workers.engine.reference import PlainModel

pytestmark = pytest.mark.cluster

MIX = ("kill-holder", "link-corrupt", "link-drop", "kill-metadata", "pause-router")
OPTIONS = RunOptions(seed=4, duration_s=0.0, baseline_s=3.0, rate_rps=4.0)


def _silent(_: str) -> None:
    return


def test_a_mix_of_faults_under_load_loses_nothing_and_changes_no_token(tiny_model_path: Path, tmp_path: Path) -> None:
    scenarios = [find_scenario(name) for name in MIX]
    needs = require_possible(scenarios, embedded=True)
    path = tmp_path / "history.jsonl"
    with contextlib.ExitStack() as ending:
        network = open_network(needs, _silent)
        if network is not None:
            ending.callback(network.close)
        config = embedded_config(needs, workers=3, lease_ms=1500, model=str(tiny_model_path), network=network)
        under_test = ClusterUnderTest.start(config, "chaos", _silent, network=network)
        ending.callback(under_test.close)
        with HistoryWriter(path, time.monotonic_ns) as history:
            asyncio.run(run_scenarios(under_test, scenarios, OPTIONS, history, _silent))
    verdict = check_history(read_history(path), OPTIONS.bounds)
    assert [str(item) for item in verdict.violations] == []
    made = {fault.name: fault.mechanism for fault in verdict.story.faults.values()}
    assert set(made) == set(MIX)
    assert made["link-drop"].startswith(SHAPING if network is None else NAMESPACES)
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
