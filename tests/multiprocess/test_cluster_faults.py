"""Real signals to real processes of a cluster: every accepted request still ends with the right tokens.

A tiny random model keeps this quick; its greedy outputs are compared with the plain model's like everywhere.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.cluster.connection import ClusterConnection
from kvpool.cluster.launcher import Cluster
from kvpool.cluster.status import cluster_status
from kvpool.config import ClusterConfig, EngineConfig, MetadataConfig, StoreConfig, WorkerConfig
from kvpool.errors import UnavailableError
from kvpool.hashing import block_hashes
from kvpool.types import Tier, WorkerId
from tests.multiprocess.cluster_kit import ClusterKit, wait_until
from workers.engine.reference import PlainModel

pytestmark = pytest.mark.cluster

FIRST, SECOND = WorkerId("worker-0"), WorkerId("worker-1")
RESTART_S = 60.0


@pytest.fixture(scope="module")
def kit(tiny_model_path: Path) -> Iterator[ClusterKit]:
    """Two workers with a tiny model and a device tier, and one metadata server."""
    engine = EngineConfig(model=str(tiny_model_path), num_blocks=512)
    group = WorkerConfig(count=2, engine=engine, store=StoreConfig(device_blocks=128))
    config = ClusterConfig(workers=(group,), metadata=MetadataConfig(lease_ms=1500))
    kit = ClusterKit(Cluster.start(config, name="faults"))
    yield kit
    kit.close()


@pytest.fixture(scope="module")
def plain(tiny_model_path: Path) -> PlainModel:
    """The unchanged model."""
    return PlainModel(tiny_model_path)


@pytest.fixture(autouse=True)
def _everybody_is_back(kit: ClusterKit) -> None:
    """Each test begins with two live members and a router."""
    wait_until(lambda: kit.all_serve(2), RESTART_S, "both workers answer and are members")


def _alive(kit: ClusterKit) -> set[str]:
    status = kit.status()["router"]
    return {item["worker"].partition("@")[0] for item in status.get("workers", []) if item["state"] == "alive"}


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(100, 40_000) for _ in range(length))


def _expected(plain: PlainModel, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(item.token for item in plain.greedy(prompt, count))


def test_what_lies_in_device_memory_is_announced_counted_and_read_from_host_memory_by_peers(
    kit: ClusterKit, plain: PlainModel
) -> None:
    prompt, wanted = _prompt(321, 30), {"max_tokens": 4, "ignore_eos": True}
    kit.warm(FIRST, prompt)
    key, chain = kit.routes.member(FIRST).key, block_hashes(prompt, kit.info.namespace)
    wait_until(lambda: kit.watcher.prefixes(chain).get(key) == {Tier.DEVICE: 20}, 10, "the directory shows the copies")
    here = kit.request(prompt, **wanted)
    hit = kit.run(kit.follow(kit.routes.redo(here.request_id, FIRST), here))
    there = kit.request(prompt, **wanted)
    route = kit.run(kit.connection.route(there, frozenset({key}), 10.0))
    assert {(part.holder, part.tier) for part in route.plan.loads} <= {(key, Tier.HOST)}
    assert hit.tokens == kit.run(kit.follow(route, there)).tokens == _expected(plain, prompt, 4)
    worker = kit.status()["workers"][FIRST]
    assert worker["device"]["total_blocks"] == 128
    assert worker["device"]["blocks"] >= 20
    assert worker["counters"]["device_fills"] >= 20


def test_a_holder_killed_in_mid_load_costs_time_but_no_token(kit: ClusterKit, plain: PlainModel) -> None:
    prompt = _prompt(1600, 1)
    kit.warm(FIRST, prompt)
    request = kit.request(prompt, max_tokens=8, ignore_eos=True)
    route = kit.routes.load(request.request_id, SECOND, holder=FIRST, blocks=(0, 99), stall_ns=2_000_000_000)
    pid = kit.signal(FIRST, signal.SIGSTOP)  # the load is under way and cannot end ...

    async def kill_it_meanwhile() -> object:
        follow = asyncio.ensure_future(kit.follow(route, request))
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGKILL)  # ... when its holder dies
        return await follow

    served = kit.run(kill_it_meanwhile())
    assert served.tokens == _expected(plain, prompt, 8)
    assert served.stats.tokens_redone > 0


def test_a_paused_holder_delays_a_load_by_its_stall_bound_at_most(kit: ClusterKit, plain: PlainModel) -> None:
    prompt = _prompt(1600, 2)
    kit.warm(FIRST, prompt)
    request = kit.request(prompt, max_tokens=4, ignore_eos=True)
    route = kit.routes.load(request.request_id, SECOND, holder=FIRST, blocks=(0, 99), stall_ns=500_000_000)
    pid = kit.signal(FIRST, signal.SIGSTOP)
    try:
        start_s = time.monotonic()
        served = kit.run(kit.follow(route, request))
        assert served.tokens == _expected(plain, prompt, 4)
        assert time.monotonic() - start_s < 20.0  # a hang bound, not a speed claim
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_worker_killed_while_it_generates_is_replaced_without_losing_or_repeating_a_token(
    kit: ClusterKit, plain: PlainModel
) -> None:
    prompt = _prompt(64, 3)

    async def kill_it_after_some_tokens() -> object:
        killed = False
        async for chunk in kit.client.stream(prompt, max_tokens=200, ignore_eos=True):
            if chunk.result is not None:
                return chunk.result
            if not killed:
                killed = True
                record = await kit.client.explain(chunk.request_id)
                pid = await kit.connection.call(record["worker"].partition("@")[0], "pid")
                os.kill(pid, signal.SIGKILL)
        raise AssertionError("no result")

    result = kit.run(kill_it_after_some_tokens())
    assert result.tokens == _expected(plain, prompt, 200)
    assert result.stats.attempts > 1


def test_a_killed_metadata_service_loses_no_request_and_comes_back_whole(kit: ClusterKit, plain: PlainModel) -> None:
    prompt = _prompt(160, 4)
    kit.warm(FIRST, prompt)
    (address,) = kit.info.metadata
    restarts = kit.cluster.metadata.restarts
    os.kill(kit.cluster.metadata.pids[0], signal.SIGKILL)
    results = [kit.generate(prompt + _prompt(5, seed), max_tokens=4, ignore_eos=True) for seed in range(40, 44)]
    for seed, result in zip(range(40, 44), results, strict=True):
        assert result.tokens == _expected(plain, prompt + _prompt(5, seed), 4)
    wait_until(lambda: kit.cluster.metadata.restarts > restarts, RESTART_S, "the metadata server is started again")
    wait_until(
        lambda: kit.status()["metadata"][address].get("restarts") == kit.cluster.metadata.restarts,
        RESTART_S,
        "status tells of it",
    )
    kit.routes.wait_held(FIRST, prompt, 10, timeout_s=RESTART_S)  # the owner registered its blocks again by itself


def test_a_killed_router_loses_no_request_and_comes_back(kit: ClusterKit, plain: PlainModel) -> None:
    prompt = _prompt(48, 5)

    async def kill_it_meanwhile() -> list[object]:
        running = [
            asyncio.ensure_future(kit.client.generate(prompt + _prompt(3, seed), max_tokens=60, ignore_eos=True))
            for seed in range(50, 54)
        ]
        await asyncio.sleep(0.05)
        os.kill(await kit.connection.call("router", "pid"), signal.SIGKILL)
        later = [kit.client.generate(prompt + _prompt(3, 54), max_tokens=60, ignore_eos=True)]
        return list(await asyncio.gather(*running, *later))

    for seed, result in zip(range(50, 55), kit.run(kill_it_meanwhile()), strict=True):
        assert result.tokens == _expected(plain, prompt + _prompt(3, seed), 60)
    wait_until(lambda: _alive(kit) == {FIRST, SECOND}, RESTART_S, "the router knows both workers again")
    wait_until(lambda: kit.status()["routers"]["router"].get("restarts", 0) >= 1, RESTART_S, "status tells of it")


def test_status_names_what_is_down(kit: ClusterKit) -> None:
    pid = kit.signal(FIRST, signal.SIGSTOP)
    try:
        wait_until(lambda: "error" in kit.status()["workers"][FIRST], RESTART_S, "the paused worker shows an error")
        wait_until(lambda: FIRST not in _alive(kit), RESTART_S, "the paused worker is no longer offered")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: "error" not in kit.status()["workers"][FIRST], RESTART_S, "it answers again")


def test_without_a_router_status_asks_the_servers_that_workers_name_and_another_cluster_is_not_taken_for_a_dead_one(
    kit: ClusterKit,
) -> None:
    def told() -> bool:
        status = kit.status()
        assert "error" in status["router"]
        answering = tuple(address for address, part in status["metadata"].items() if "members" in part)
        return "error" in status["routers"].get("router", {}) and answering == kit.info.metadata

    pid = kit.signal("router", signal.SIGSTOP)
    try:
        wait_until(told, RESTART_S, "the directory's server is asked all the same")
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(UnavailableError, match="another name"):
        kit.run(cluster_status(ClusterConnection("elsewhere")))


def test_failed_loads_are_counted_by_kind_and_link(kit: ClusterKit) -> None:
    prompt = _prompt(320, 6)
    kit.warm(FIRST, prompt)
    request = kit.request(prompt, max_tokens=1)
    route = kit.routes.load(request.request_id, SECOND, holder=FIRST, blocks=(0, 19), stall_ns=300_000_000)
    pid = kit.signal(FIRST, signal.SIGSTOP)
    try:
        kit.run(kit.follow(route, request))
        wait_until(lambda: bool(kit.status()["router"]["failures"]), RESTART_S, "the router counts the failure")
        links = kit.status()["router"]["failures_by_link"]
        assert (FIRST, SECOND) in {(item["holder"], item["reader"]) for item in links}
    finally:
        os.kill(pid, signal.SIGCONT)
