"""A cluster's outputs equal the plain model's, tokens and log-probabilities, whatever way the prefix became whole."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpool.cluster.launcher import Cluster
from kvpool.config import ClusterConfig, EngineConfig, SchedulerConfig, WorkerConfig
from kvpool.errors import RequestError
from kvpool.request import FinishReason, GenerateResult, TokenLogprobs
from kvpool.types import WorkerId
from tests.multiprocess.cluster_kit import ClusterKit, wait_until
from workers.engine.reference import PlainModel

pytestmark = [pytest.mark.cluster, pytest.mark.model]

BLOCK = 16
TOLERANCE = 1e-4
OVERLOAD_S = 7.0
"""Prefill work for each of two workers: more than twice what makes requests wait at the router."""
OVERLOAD_TOKENS = 400
TWO_TOKENS: dict[str, Any] = {"max_tokens": 2, "logprobs": 1, "ignore_eos": True}
FIRST, SECOND = WorkerId("worker-0"), WorkerId("worker-1")


@pytest.fixture(scope="module")
def kit() -> Iterator[ClusterKit]:
    """Two workers with the default model; the second group's pages are few, so that it preempts under load."""
    config = ClusterConfig(
        workers=(
            WorkerConfig(count=2, engine=EngineConfig(num_blocks=512)),
            WorkerConfig(count=1, engine=EngineConfig(num_blocks=20), scheduler=SchedulerConfig(max_step_tokens=128)),
        )
    )
    kit = ClusterKit(Cluster.start(config, name="parity"))
    yield kit
    kit.close()


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> PlainModel:
    """The unchanged model."""
    return PlainModel(smollm2_path)


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(100, 40_000) for _ in range(length))


def _assert_equal(got: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    assert [item.token for item in got] == [item.token for item in expected]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)


@pytest.mark.parametrize("length", [5, BLOCK, BLOCK + 1, 5 * BLOCK, 203], ids=lambda n: f"{n}_tokens")
def test_cold_prompts_of_any_length_equal_the_plain_model(kit: ClusterKit, plain: PlainModel, length: int) -> None:
    prompt = _prompt(length, length)
    result = kit.generate(prompt, max_tokens=8, logprobs=1, ignore_eos=True)
    _assert_equal(result.logprobs, plain.greedy(prompt, 8))


def test_a_local_hit_equals_the_plain_model_and_redoes_only_the_rest(kit: ClusterKit, plain: PlainModel) -> None:
    prompt = _prompt(150, 1)
    kit.warm(FIRST, prompt)
    request = kit.request(prompt, max_tokens=8, logprobs=1, ignore_eos=True)
    served = kit.run(kit.follow(kit.routes.redo(request.request_id, FIRST), request))
    _assert_equal(served.logprobs, plain.greedy(prompt, 8))
    assert (served.stats.tokens_cached, served.stats.tokens_redone) == (144, 6)


@pytest.mark.parametrize("length", [310, 19 * BLOCK], ids=["with_a_rest", "ends_at_a_block_boundary"])
def test_a_prefix_loaded_from_a_peer_equals_the_plain_model(kit: ClusterKit, plain: PlainModel, length: int) -> None:
    prompt = _prompt(length, 2 + length)
    kit.warm(FIRST, prompt)
    request = kit.request(prompt, max_tokens=8, logprobs=1, ignore_eos=True)
    route = kit.routes.load(request.request_id, SECOND, holder=FIRST, blocks=(0, (length - 1) // BLOCK))
    served = kit.run(kit.follow(route, request))
    _assert_equal(served.logprobs, plain.greedy(prompt, 8))
    assert served.stats.tokens_loaded == (length - 1) // BLOCK * BLOCK
    assert served.stats.bytes_loaded > 0


def test_a_prefix_partly_local_and_partly_loaded_equals_the_plain_model(kit: ClusterKit, plain: PlainModel) -> None:
    prompt = _prompt(200, 3)
    kit.warm(FIRST, prompt)
    kit.warm(SECOND, prompt[:64])
    request = kit.request(prompt, max_tokens=8, logprobs=1, ignore_eos=True)
    served = kit.run(kit.follow(kit.routes.load(request.request_id, SECOND, holder=FIRST, blocks=(4, 12)), request))
    _assert_equal(served.logprobs, plain.greedy(prompt, 8))
    assert (served.stats.tokens_cached, served.stats.tokens_loaded, served.stats.tokens_redone) == (64, 128, 8)


def test_a_worker_that_loaded_blocks_becomes_their_holder(kit: ClusterKit, plain: PlainModel) -> None:
    prompt = _prompt(100, 4)
    kit.warm(FIRST, prompt)
    request = kit.request(prompt, max_tokens=1)
    kit.run(kit.follow(kit.routes.load(request.request_id, SECOND, holder=FIRST, blocks=(0, 6)), request))
    kit.routes.wait_held(SECOND, prompt, 6)


def test_a_batch_of_eight_equals_the_plain_model_one_by_one(kit: ClusterKit, plain: PlainModel) -> None:
    shared = _prompt(64, 5)
    prompts = [shared + _prompt(10 + 7 * index, 100 + index) for index in range(8)]
    results = kit.run(kit.client.generate_batch(prompts, max_tokens=6, logprobs=1, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        _assert_equal(result.logprobs, plain.greedy(prompt, 6))


def test_in_overload_requests_wait_at_the_router_and_equal_the_plain_model(kit: ClusterKit, plain: PlainModel) -> None:
    prompts = _overload(kit, seed=1000)
    asked = [kit.client.generate(prompt, **TWO_TOKENS) for prompt in prompts]
    *results, ended = kit.run(kit.gather([*asked, _give_up_waiting(kit, _prompt(OVERLOAD_TOKENS, 999))]))
    assert (ended.finish, ended.stats.attempts) == (FinishReason.CANCELLED, 0)
    records = [kit.run(kit.client.explain(result.request_id)) for result in results]
    waited = sorted(range(len(prompts)), key=lambda index: records[index]["waited_ns"])
    assert records[waited[0]]["waited_ns"] < 0.5 * records[waited[-1]]["waited_ns"]
    assert records[waited[-1]]["waited_ns"] > 1e9
    for index in (*waited[:2], *waited[-2:]):
        _assert_equal(results[index].logprobs, plain.greedy(prompts[index], 2))
    admissions = kit.status()["router"]["admissions"]
    assert admissions["queue"] > 0
    assert admissions["queued_now"] == 0


async def _give_up_waiting(kit: ClusterKit, prompt: Sequence[int]) -> GenerateResult:
    """What a request ends with that is cancelled while it waits at the router."""
    asked = asyncio.ensure_future(kit.client.generate(prompt, request_id="given-up", priority=-100))
    while not asked.done():
        try:
            await kit.client.explain("given-up")
        except RequestError as error:
            if "waiting_s" in error.details:
                await kit.client.cancel("given-up")
        await asyncio.sleep(0.02)
    return await asked


def _overload(kit: ClusterKit, seed: int) -> list[tuple[int, ...]]:
    """Prompts that keep two workers busy for `OVERLOAD_S`; the small one cannot hold them."""
    workers = kit.status()["router"]["workers"]
    token_us = min(row["prefill_us_per_token"] for row in workers)
    number = min(100, math.ceil(2 * OVERLOAD_S * 1e6 / (OVERLOAD_TOKENS * token_us)))
    return [_prompt(OVERLOAD_TOKENS, seed + index) for index in range(number)]


def test_preempted_and_resumed_requests_equal_the_plain_model(kit: ClusterKit, plain: PlainModel) -> None:
    small = WorkerId("worker-2")  # 20 blocks; four prompts take 12 of them, their outputs want 12 more
    prompts = [_prompt(48, 200 + index) for index in range(4)]
    requests = [kit.request(prompt, max_tokens=49, logprobs=1, ignore_eos=True) for prompt in prompts]

    async def all_at_once() -> list[object]:
        routes = [kit.routes.redo(request.request_id, small) for request in requests]
        return await kit.gather(kit.follow(route, request) for route, request in zip(routes, requests, strict=True))

    served = kit.run(all_at_once())
    assert sum(item.stats.preemptions for item in served) > 0
    for prompt, item in zip(prompts, served, strict=True):
        _assert_equal(item.logprobs, plain.greedy(prompt, 49))


def test_sampling_with_a_seed_does_not_depend_on_the_worker_or_the_way_the_prefix_came(kit: ClusterKit) -> None:
    prompt = _prompt(100, 6)
    options = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 5, "ignore_eos": True}
    kit.warm(FIRST, prompt)
    outputs = []
    for route in (
        lambda request: kit.routes.redo(request.request_id, FIRST),
        lambda request: kit.routes.load(request.request_id, SECOND, holder=FIRST, blocks=(0, 6)),
    ):
        request = kit.request(prompt, **options)
        outputs.append(kit.run(kit.follow(route(request), request)).tokens)
    outputs.append(kit.generate(prompt, **options).tokens)
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_router_loads_elsewhere_when_the_holder_is_busy_and_the_record_says_why(
    kit: ClusterKit, plain: PlainModel
) -> None:
    prompt = _prompt(300, 7)
    kit.warm(FIRST, prompt[:288])

    async def ask_while_the_holder_prefills() -> tuple[GenerateResult, dict[str, Any]]:
        cold = [kit.request(_prompt(1500, 300 + index), max_tokens=1) for index in range(3)]
        busy = [asyncio.ensure_future(kit.follow(kit.routes.redo(item.request_id, FIRST), item)) for item in cold]
        while not _queued_tokens(kit, FIRST):
            await asyncio.sleep(0.02)
        result = await kit.client.generate(prompt, max_tokens=4, logprobs=1, ignore_eos=True)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        return result, await kit.client.explain(result.request_id)

    result, record = kit.run(ask_while_the_holder_prefills())
    _assert_equal(result.logprobs, plain.greedy(prompt, 4))
    assert (result.stats.worker_id, result.stats.tokens_loaded) == (SECOND, 288)
    dearer = [item for item in record["candidates"] if item["worker"].startswith(f"{FIRST}@")]
    assert all(item["price_ns"] > record["price_ns"] for item in dearer)


def test_requests_that_wait_outlive_their_router(kit: ClusterKit, plain: PlainModel) -> None:
    prompts = _overload(kit, seed=2000)

    async def kill_the_router_among_them() -> list[GenerateResult]:
        tasks = [asyncio.ensure_future(kit.client.generate(prompt, **TWO_TOKENS)) for prompt in prompts]
        while not (await kit.connection.call("router", "status"))["admissions"]["queued_now"]:
            await asyncio.sleep(0.05)
        os.kill(await kit.connection.call("router", "pid"), signal.SIGKILL)
        return await asyncio.gather(*tasks)

    results = kit.run(kill_the_router_among_them())
    assert all(len(result.tokens) == 2 for result in results)
    for index in (0, len(prompts) // 2, -1):
        _assert_equal(results[index].logprobs, plain.greedy(prompts[index], 2))
    wait_until(lambda: kit.all_serve(3), 60.0, "the router knows all workers again")


def _queued_tokens(kit: ClusterKit, worker_id: WorkerId) -> int:
    """Prompt tokens the worker says it still has to compute."""
    members = kit.watcher.members().values()
    report = next((member.report for member in members if member.info.key.worker_id == worker_id), None)
    return 0 if report is None else report.load.queued_prefill_tokens
