"""A long prefix that lies here is copied into a view beside decodes in parts, and alone at once; tokens and
log-probabilities are those of a run without any pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.config import EngineConfig, SchedulerConfig, WorkerConfig
from kvpool.hashing import Namespace
from kvpool.plan import REDO
from kvpool.request import GenerateRequest, TokenLogprobs
from kvpool.types import WorkerEpoch, WorkerId, WorkerKey
from tests.engine_parity import save_random_model, tiny_llama
from tests.multiprocess.cluster_kit import wait_until
from tests.worker_support import Collector, FakeEngine, RecordingPublisher, make_request, reference_choices
from workers.core import CoreParts, WorkerCore
from workers.engine.reference import PlainModel
from workers.engine.torch_engine import TorchEngine
from workers.step import Step

SIZE, BUDGET, LONG_BLOCKS = 4, 16, 60
Choices = Callable[[GenerateRequest], list[TokenLogprobs]]


class HeldTorch(TorchEngine):
    """``running.clear()`` holds it before its next step."""

    running = threading.Event()

    def step(self, batch):  # type: ignore[no-untyped-def]
        assert self.running.wait(30)
        return super().step(batch)


@pytest.fixture(params=["fake", "torch"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FakeEngine | HeldTorch, Choices]:
    if request.param == "fake":
        return FakeEngine(block_tokens=SIZE), reference_choices
    path = save_random_model(tiny_llama(), tmp_path)
    model = PlainModel(path)
    HeldTorch.running.set()
    return HeldTorch(path, block_tokens=SIZE), lambda wanted: model.greedy(wanted.prompt, wanted.sampling.max_tokens)


def test_a_long_cached_prefix_is_filled_in_parts_beside_decodes_and_at_once_alone(
    engine: tuple[FakeEngine | HeldTorch, Choices],
) -> None:
    made, choices = engine
    core = started(made)
    fills: list[tuple[bool, int, float]] = []  # beside decodes, blocks, and what fills and prefills cost in tokens
    run, gate = core._loop._run, core._gate

    def watched(step: Step) -> None:
        decodes = any(work.sequence.decoding for work in step.work)
        others = [work for work in step.work if not work.sequence.decoding]
        cost = sum(gate.fill_tokens(len(work.fill), BUDGET) * bool(work.fill) + work.count for work in others)
        fills.append((decodes, sum(len(work.fill) for work in step.work), cost))
        run(step)

    core._loop._run = watched  # type: ignore[method-assign]
    document = [index * 7 % 90 for index in range(LONG_BLOCKS * SIZE)]
    asked: dict[str, tuple[GenerateRequest, Collector]] = {}

    def submit(name: str, prompt: list[int], max_tokens: int) -> Collector:
        request, sink = make_request(name, prompt, max_tokens, ignore_eos=True, logprobs=1), Collector()
        asked[name] = (request, sink)
        core.submit(request, REDO, "d", sink)
        return sink

    try:
        submit("warm", document, 1).result()
        assert core.wait_idle(20 * 10**9)
        made.running.clear()
        submit("first", [1, 3, 5], 120)
        wait_until(lambda: core.status()["running"] == 1, 20, "its prompt is computed")
        submit("second", [2, 3, 5], 120)
        submit("beside", [*document, 11], 4)
        made.running.set()
        for _, sink in asked.values():
            sink.result()
        fills_beside = [fill for fill in fills if fill[0]]
        submit("alone", [*document, 12], 4).result()
    finally:
        made.running.set()
        core.close()
    for request, sink in asked.values():
        expected = choices(request)
        assert sink.tokens == [choice.token for choice in expected], request.request_id
        assert [choice.logprob for choice in sink.logprobs] == pytest.approx(
            [choice.logprob for choice in expected], abs=1e-4
        )
    assert sum(blocks for _, blocks, _ in fills_beside) == LONG_BLOCKS
    assert sum(blocks > 0 for _, blocks, _ in fills_beside) > 1, "in parts"
    assert all(cost <= BUDGET for _, _, cost in fills_beside), "fills and prefills together"
    assert (False, LONG_BLOCKS) in [fill[:2] for fill in fills], "at once when nobody decodes"


def started(engine: FakeEngine | HeldTorch) -> WorkerCore:
    layout = engine.layout
    return WorkerCore(
        CoreParts(
            key=WorkerKey(WorkerId("w"), WorkerEpoch(1)),
            engine=engine,
            config=WorkerConfig(
                engine=EngineConfig(num_blocks=4 * LONG_BLOCKS, block_tokens=SIZE),
                scheduler=SchedulerConfig(mixed_prefill_tokens=BUDGET),
            ),
            namespace_for=lambda tenant: Namespace(
                "tiny", layout.dtype, layout.fingerprint(), layout.block_tokens, tenant=tenant
            ),
            publisher=RecordingPublisher(),
        )
    )
