"""A prefill worker computes the prompt and gives the first token, a decode worker goes on; either may die.

The model is the default one, so that a prefill takes long enough to be followed block by block.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvpool.client import TextChunk
from kvpool.cluster.launcher import Cluster
from kvpool.config import ClusterConfig, EngineConfig, MetadataConfig, SchedulerConfig, WorkerConfig
from kvpool.reports import GOODPUT_MET
from kvpool.request import GenerateResult, TokenLogprobs
from kvpool.types import Role, WorkerId
from tests.multiprocess.cluster_kit import ClusterKit, wait_until
from workers.engine.reference import PlainModel

pytestmark = [pytest.mark.cluster, pytest.mark.model]

BLOCK = 16
TOLERANCE = 1e-4
PREFILLS, DECODES = WorkerId("worker-0"), WorkerId("worker-1")
RESTART_S = 90.0


@pytest.fixture(scope="module")
def kit() -> Iterator[ClusterKit]:
    """One worker that prefills in chunks of 128 tokens and one that decodes."""
    engine, scheduler = EngineConfig(num_blocks=512), SchedulerConfig(max_step_tokens=128)
    groups = [
        WorkerConfig(count=1, role=role, engine=engine, scheduler=scheduler) for role in (Role.PREFILL, Role.DECODE)
    ]
    config = ClusterConfig(workers=tuple(groups), metadata=MetadataConfig(lease_ms=1500))
    kit = ClusterKit(Cluster.start(config, name="roles"))
    yield kit
    kit.close()


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> PlainModel:
    """The unchanged model."""
    return PlainModel(smollm2_path)


@pytest.fixture(autouse=True)
def _everybody_is_back(kit: ClusterKit) -> None:
    wait_until(lambda: kit.all_serve(2), RESTART_S, "both workers answer and are members")


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(100, 40_000) for _ in range(length))


def _assert_equal(got: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    assert [item.token for item in got] == [item.token for item in expected]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)


def _goodput(kit: ClusterKit) -> list[int]:
    """Finished requests that the prefill and the decode worker counted."""
    return [_counters(kit, worker).get(GOODPUT_MET, 0) for worker in (PREFILLS, DECODES)]


def _counters(kit: ClusterKit, worker: WorkerId) -> dict[str, int]:
    counters: dict[str, int] = kit.status()["workers"][worker]["counters"]
    return counters


@pytest.mark.parametrize("length", [600, 40 * BLOCK], ids=["with_a_rest", "ends_at_a_block_boundary"])
def test_a_handed_over_request_equals_the_plain_model_and_its_prompt_is_not_computed_twice(
    kit: ClusterKit, plain: PlainModel, length: int
) -> None:
    prompt = _prompt(length, length)
    before, finished = _counters(kit, DECODES), _goodput(kit)
    result = kit.generate(prompt, max_tokens=8, logprobs=1, ignore_eos=True)
    _assert_equal(result.logprobs, plain.greedy(prompt, 8))
    assert (result.stats.worker_id, result.stats.decoded_by) == (PREFILLS, DECODES)
    assert result.stats.tokens_redone == length
    after = _counters(kit, DECODES)
    assert after["tokens_redone"] - before.get("tokens_redone", 0) <= BLOCK
    assert [now - then for now, then in zip(_goodput(kit), finished, strict=True)] == [0, 1], "counted once"
    assert after["pulled_blocks"] > before.get("pulled_blocks", 0)  # it came while it was computed


def test_a_short_or_a_cached_prompt_is_not_handed_over(kit: ClusterKit, plain: PlainModel) -> None:
    short = _prompt(4, 3)
    result = kit.generate(short, max_tokens=4, logprobs=1, ignore_eos=True)
    _assert_equal(result.logprobs, plain.greedy(short, 4))
    assert (result.stats.worker_id, result.stats.decoded_by) == (DECODES, None)
    prompt = _prompt(320, 4)
    kit.warm(DECODES, prompt)
    result = kit.generate((*prompt, 7, 8), max_tokens=4, logprobs=1, ignore_eos=True)
    _assert_equal(result.logprobs, plain.greedy((*prompt, 7, 8), 4))
    assert (result.stats.worker_id, result.stats.decoded_by) == (DECODES, None)


def test_a_single_token_needs_no_decode_worker(kit: ClusterKit, plain: PlainModel) -> None:
    prompt = _prompt(300, 5)
    result = kit.generate(prompt, max_tokens=1, logprobs=1, ignore_eos=True)
    _assert_equal(result.logprobs, plain.greedy(prompt, 1))
    assert (result.stats.worker_id, result.stats.decoded_by) == (PREFILLS, None)


def test_many_at_once_equal_the_plain_model_and_leave_nothing_behind(kit: ClusterKit, plain: PlainModel) -> None:
    prompts = [_prompt(100 + 40 * number, 10 + number) for number in range(6)]

    async def ask() -> list[GenerateResult]:
        return await kit.client.generate_batch(prompts, max_tokens=6, logprobs=1, ignore_eos=True)

    for prompt, result in zip(prompts, kit.run(ask()), strict=True):
        _assert_equal(result.logprobs, plain.greedy(prompt, 6))
    for worker in (PREFILLS, DECODES):
        blocks = kit.status()["workers"][worker]["blocks"]
        assert (blocks["referenced"], blocks["in_flight"], blocks["pinned"]) == (0, 0, 0)


def test_a_prefill_worker_that_dies_in_mid_prompt_loses_no_token(kit: ClusterKit, plain: PlainModel) -> None:
    prompt = _prompt(1500, 20)

    async def ask() -> GenerateResult:
        pid = await kit.connection.call(PREFILLS, "pid")
        before = (await kit.connection.call(DECODES, "status"))["counters"].get("pulled_blocks", 0)
        request = asyncio.ensure_future(kit.client.generate(prompt, max_tokens=6, logprobs=1, ignore_eos=True))
        while (await kit.connection.call(DECODES, "status"))["counters"].get("pulled_blocks", 0) == before:
            await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGKILL)  # some of it was handed over
        return await request

    result = kit.run(ask())
    _assert_equal(result.logprobs, plain.greedy(prompt, 6))
    assert result.stats.attempts > 1


def test_a_decode_worker_that_dies_loses_no_token(kit: ClusterKit, plain: PlainModel) -> None:
    prompt = _prompt(500, 21)

    async def ask() -> GenerateResult:
        pid = await kit.connection.call(DECODES, "pid")
        seen: list[TextChunk] = []
        async for chunk in kit.client.stream(prompt, max_tokens=40, logprobs=1, ignore_eos=True):
            seen.append(chunk)
            if len(seen) == 5:
                os.kill(pid, signal.SIGKILL)
        assert seen[-1].result is not None
        return seen[-1].result

    result = kit.run(ask())
    _assert_equal(result.logprobs, plain.greedy(prompt, 40))
    assert result.stats.attempts > 1
