"""The router of a real cluster splits a prefill over a link of about B*, loads over two faster ones at once, and says
so; outputs equal the plain model's.

The links are shaped; the router is told nothing and learns their speed from what loads really took.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.cluster.launcher import Cluster
from kvpool.config import ClusterConfig, EngineConfig, SchedulerConfig, WorkerConfig
from kvpool.plan import PlanKind, Route
from kvpool.request import GenerateRequest
from kvpool.transport.shaping import LinkShape
from kvpool.types import WorkerId, WorkerKey
from tests.multiprocess.cluster_kit import ClusterKit, Served, wait_until
from workers.engine.reference import PlainModel

pytestmark = [pytest.mark.cluster, pytest.mark.model]

BLOCK = 16
PREFIX_TOKENS = 400
TOLERANCE = 1e-4
LOADS_TO_LEARN = 2
RESTART_S = 60.0
_seeds = itertools.count(900)
HOLDER, READER, SECOND_READER = WorkerId("worker-0"), WorkerId("worker-1"), WorkerId("worker-2")
STRIPE_TOKENS, STRIPE_SPEED = 640, 4.0
"""Long and fast enough that two holders beat one, and a split, though their learned speeds differ by a factor."""


@pytest.fixture(scope="module")
def kit() -> Iterator[ClusterKit]:
    """Three workers with the default model: a link of about B* into one, two of `STRIPE_SPEED` times that into
    another."""
    group = WorkerConfig(
        count=3,
        transport="shaped:ucx",
        engine=EngineConfig(num_blocks=256),
        scheduler=SchedulerConfig(max_step_tokens=128),
    )
    kit = ClusterKit(Cluster.start(ClusterConfig(workers=(group,)), name="split"))
    try:
        _slow_the_link(kit, HOLDER, READER, 1.0)
        for holder in (HOLDER, READER):
            _slow_the_link(kit, holder, SECOND_READER, STRIPE_SPEED)
        yield kit
    finally:
        kit.close()


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> PlainModel:
    """The unchanged model."""
    return PlainModel(smollm2_path)


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(100, 40_000) for _ in range(length))


def _slow_the_link(kit: ClusterKit, holder: WorkerId, reader: WorkerId, speed: float) -> None:
    """Shape a link so that a block is loaded ``speed`` times as fast as computed; let loads teach the router so."""
    found = next(item for item in kit.status()["router"]["workers"] if item["worker"].startswith(reader))
    block_ns = found["prefill_us_per_token"] * 1e3 * BLOCK
    rate = speed * kit.routes.member(holder).block_bytes / block_ns * 1e9
    kit.run(kit.connection.call(reader, "shape_link", holder, LinkShape(rate_bytes_per_s=rate)))
    for _ in range(LOADS_TO_LEARN):
        prompt = _prompt(10 * BLOCK + 1, next(_seeds))
        kit.warm(holder, prompt)
        request = kit.request(prompt, max_tokens=1)
        kit.run(kit.follow(kit.routes.load(request.request_id, reader, holder=holder, blocks=(0, 10)), request))
    wait_until(lambda: _samples(kit, holder, reader) >= LOADS_TO_LEARN, 10.0, "the router has learned the link")


def _samples(kit: ClusterKit, holder: WorkerId, reader: WorkerId) -> int:
    links = kit.status()["router"]["links"]
    return sum(item["samples"] for item in links if (item["holder"], item["reader"]) == (holder, reader))


def _learned_link(kit: ClusterKit) -> dict[str, Any]:
    links: list[dict[str, Any]] = kit.status()["router"]["links"]
    (found,) = [item for item in links if (item["holder"], item["reader"]) == (HOLDER, READER)]
    return found


def _route_to(kit: ClusterKit, reader: WorkerId, request: GenerateRequest) -> Route:
    """The real router's answer for a request that the other workers have just failed, while this one has nothing to
    do."""
    wait_until(lambda: _wait_ms(kit, reader) == 0.0, 20.0, "the reader reports that it is idle")
    route: Route = kit.run(kit.connection.route(request, _all_but(kit, reader), 10.0))
    assert route.worker_id == reader
    return route


def _all_but(kit: ClusterKit, reader: WorkerId) -> frozenset[WorkerKey]:
    return frozenset(kit.routes.member(name).key for name in (HOLDER, READER, SECOND_READER) if name != reader)


def _wait_ms(kit: ClusterKit, reader: WorkerId) -> float:
    workers = kit.status()["router"]["workers"]
    return sum(float(item["wait_ms"]) for item in workers if item["worker"].startswith(reader))


def _record(kit: ClusterKit, request: GenerateRequest) -> dict[str, Any]:
    """The decision record, once its outcome has come."""

    def record() -> dict[str, Any]:
        found: dict[str, Any] = kit.run(kit.client.explain(request.request_id))
        return found

    wait_until(lambda: record()["outcome"] is not None, 10.0, "the outcome of the request is reported")
    return record()


def _assert_equals(served: Served, plain: PlainModel, prompt: tuple[int, ...], count: int) -> None:
    expected = plain.greedy(prompt, count)
    assert served.tokens == tuple(item.token for item in expected)
    for ours, theirs in zip(served.logprobs, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)


def test_the_router_splits_over_a_link_of_b_star_and_the_record_shows_plan_split_and_both_times(
    kit: ClusterKit, plain: PlainModel
) -> None:
    prompt = _prompt(PREFIX_TOKENS + 5, 1)
    kit.warm(HOLDER, prompt)
    request = kit.request(prompt, max_tokens=4, logprobs=1, ignore_eos=True)
    route = _route_to(kit, READER, request)
    assert route.plan.kind is PlanKind.SPLIT
    assert route.plan.split_tokens is not None
    assert 0 < route.plan.split_tokens < PREFIX_TOKENS
    (piece,) = route.plan.loads
    assert (piece.holder.worker_id, piece.start) == (HOLDER, route.plan.split_tokens // BLOCK)
    served = kit.run(kit.follow(route, request))
    _assert_equals(served, plain, prompt, 4)
    assert served.stats is not None
    assert served.stats.plan == PlanKind.SPLIT.value
    assert served.stats.tokens_loaded > 0
    assert served.stats.tokens_redone > len(prompt) - PREFIX_TOKENS // BLOCK * BLOCK
    record = _record(kit, request)
    assert (record["plan"], record["split_tokens"]) == ("split", route.plan.split_tokens)
    assert record["predicted_ttft_ns"] > 0
    assert record["outcome"]["ttft_ns"] == served.stats.ttft_ns
    assert {"redo", "load", "split"} <= {item["plan"] for item in record["candidates"]}
    assert "split: compute the first" in record["text"]


def test_two_holders_over_slow_links_are_read_at_once_and_the_record_shows_both(
    kit: ClusterKit, plain: PlainModel
) -> None:
    prompt = _prompt(STRIPE_TOKENS + 5, 2)
    for holder in (HOLDER, READER):
        kit.warm(holder, prompt)
    request = kit.request(prompt, max_tokens=4, logprobs=1, ignore_eos=True)
    route = _route_to(kit, SECOND_READER, request)
    told = json.dumps(kit.status()["router"]["links"]) + kit.run(kit.client.explain(request.request_id))["text"]
    assert {piece.holder.worker_id for piece in route.plan.loads} == {HOLDER, READER}, told
    served = kit.run(kit.follow(route, request))
    _assert_equals(served, plain, prompt, 4)
    assert served.stats is not None
    assert served.stats.tokens_loaded > 0
    record = _record(kit, request)
    assert {piece["holder"].partition("@")[0] for piece in record["loads"]} == {HOLDER, READER}, record["loads"]
    assert record["outcome"]["tokens_loaded"] == served.stats.tokens_loaded


def test_plans_of_several_requests_at_once_behind_prefixes_of_their_own_equal_the_plain_model(
    kit: ClusterKit, plain: PlainModel
) -> None:
    prompts = [_prompt(20 * BLOCK + 3 * number, 10 + number) for number in range(2)]
    for prompt in prompts:
        kit.warm(HOLDER, prompt)
        kit.warm(READER, prompt[: 5 * BLOCK])
    requests = [kit.request(prompt, max_tokens=3, logprobs=1, ignore_eos=True) for prompt in prompts]
    others = _all_but(kit, READER)
    routes = [kit.run(kit.connection.route(request, others, 10.0)) for request in requests]
    assert all(route.plan.loads[0].start >= 5 for route in routes if route.plan.loads)
    served = kit.run(kit.gather(kit.follow(route, request) for route, request in zip(routes, requests, strict=True)))
    for prompt, item in zip(prompts, served, strict=True):
        _assert_equals(item, plain, prompt, 3)
        assert item.stats.tokens_cached == 5 * BLOCK


def test_a_killed_router_comes_back_with_its_speeds(kit: ClusterKit) -> None:
    before = _learned_link(kit)
    wait_until(lambda: kit.status()["router"]["learned"]["saves"] > 0, 20.0, "what was learned is saved")
    pid = kit.signal("router", signal.SIGKILL)

    def is_back() -> bool:
        router = kit.status()["router"]
        return "error" not in router and len(router["workers"]) == 3 and kit.pid_of("router") != pid

    wait_until(is_back, RESTART_S, "the router serves again and knows all workers")
    status = kit.status()["router"]
    assert status["learned"]["started_from"].startswith("saved state")
    after = _learned_link(kit)
    assert after["samples"] >= LOADS_TO_LEARN
    assert after["beta_gbytes_per_s"] == pytest.approx(before["beta_gbytes_per_s"], rel=0.5)  # the prior is far off
    prompt = _prompt(20 * BLOCK + 1, 30)
    kit.warm(HOLDER, prompt)
    assert _route_to(kit, READER, kit.request(prompt, max_tokens=1)).plan.kind is PlanKind.SPLIT


def test_a_link_that_dies_in_mid_split_costs_its_help_only(kit: ClusterKit, plain: PlainModel) -> None:
    prompt = _prompt(PREFIX_TOKENS, 3)
    kit.warm(HOLDER, prompt)
    request = kit.request(prompt, max_tokens=4, logprobs=1, ignore_eos=True)
    route = _route_to(kit, READER, request)
    assert route.plan.kind is PlanKind.SPLIT
    kit.run(kit.connection.call(READER, "shape_link", HOLDER, LinkShape(stalled=True)))
    served = kit.run(kit.follow(route, request))
    _assert_equals(served, plain, prompt, 4)
    assert served.stats is not None
    assert served.stats.tokens_loaded == 0
