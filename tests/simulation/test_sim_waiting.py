"""Late binding in simulated clusters: no worker idles while somebody waits for it, and long overloads stay ordered."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from kvpool.cluster.routers import first_asked
from kvpool.plan import Route
from kvpool.reports import PrefillSample
from kvpool.types import RequestId
from router.door import RequestMeta
from router.planning import Params
from router.policies import KVPoolPolicy, make_policy
from router.signals import RequestView
from router.simulation.cluster import Cluster, Served
from router.simulation.presets import get_preset
from router.simulation.routers import SeveralRouters
from router.simulation.trace import Trace, TraceRequest
from router.waiting import NEVER, POLL_NS, Hold

S = 1_000_000_000
SAMPLE_NS = 20_000_000
BLOCK = 512
LONGEST_BLOCKS = 240
"""Of a prompt: 12 s of prefill."""
LLAMA = get_preset("llama-70b")
CALIBRATION = tuple(
    PrefillSample(tokens, 0, round(LLAMA.curve.time_ns(tokens, 0))) for tokens in (2_048, 8_192, 32_768)
)


def prompts(seed: int, number: int, every_ns: int) -> Trace:
    """Prompts without a common prefix, a few very long ones among many short ones, at random moments."""
    rng, made, at_ns = Random(seed), [], 0
    for index in range(number):
        length = round(LONGEST_BLOCKS ** rng.random())
        blocks = tuple(index * 1000 + block for block in range(length))
        made.append(TraceRequest(at_ns, length * BLOCK, 8, blocks))
        at_ns += round(rng.expovariate(1.0) * every_ns)
    return Trace("prompts", BLOCK, tuple(made))


class Watched(Cluster):
    """Looks many times a second for workers that idle while a request waits that would now choose them."""

    def __init__(self, trace: Trace, nodes: int, hold: Hold) -> None:
        policy = KVPoolPolicy(replace(Params(), hold=hold))
        preset = get_preset("llama-70b")
        known = tuple(
            PrefillSample(tokens, 0, round(preset.curve.time_ns(tokens, 0))) for tokens in (2048, 8192, 32_768)
        )
        super().__init__(trace, preset, nodes=nodes, bandwidth_bytes_per_s=8e9, policy=policy, calibration=known)
        self._asked: dict[RequestId, RequestMeta] = {}
        self._since_ns = [0] * nodes
        self.idled_ns = 0
        self.most_waiting = 0
        route = self.core.route

        def asked(meta: RequestMeta) -> Route:
            self._asked[meta.request_id] = meta
            decided = route(meta)
            del self._asked[meta.request_id]
            return decided

        self.core.route = asked  # type: ignore[method-assign]
        self.loop.at(0, self._look)

    def _look(self) -> None:
        now_ns = self.loop.now_ns
        self.most_waiting = max(self.most_waiting, len(self._asked))
        idle = {node.number for node in self.nodes if node.engine.idle and not node.engine.waiting}
        wanted = {self._choice(meta) for meta in self._asked.values()} if idle else set()
        for number in range(len(self.nodes)):
            if number not in idle & wanted:
                self._since_ns[number] = now_ns
            self.idled_ns = max(self.idled_ns, now_ns - self._since_ns[number])
        if any(item.ttft_ns is None for item in self.served):
            self.loop.after(SAMPLE_NS, self._look)

    def _choice(self, meta: RequestMeta) -> int:
        snapshot = self.core.snapshot(meta.chain, self.loop.now_ns)
        view = RequestView(meta.request_id, meta.prompt_tokens, len(meta.chain), chain=meta.chain)
        worker = KVPoolPolicy().choose(view, snapshot, Random(0)).worker
        return self._by_key[worker].number


@pytest.mark.parametrize("seed", [1, 2, 4, 5])
def test_no_worker_idles_while_a_request_waits_at_the_router_that_would_choose_it(seed: int) -> None:
    cluster = Watched(prompts(seed, 120, every_ns=S // 6), nodes=2 + seed % 3, hold=Hold())
    served = cluster.run()
    assert all(item.ttft_ns is not None for item in served)
    assert cluster.most_waiting > 10
    assert cluster.idled_ns <= 2 * POLL_NS  # from one ask to the next


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_a_long_overload_nobody_is_bound_early_for_having_waited_long(seed: int) -> None:
    trace = prompts(seed, 300, every_ns=S // 6)
    late, at_once = (Watched(trace, nodes=2, hold=hold).run() for hold in (Hold(), NEVER))
    assert sum(item.waited_ns > 100 * S for item in late) > 10
    assert mean_ttft_ns(late) < 0.87 * mean_ttft_ns(at_once)


def mean_ttft_ns(served: list[Served]) -> float:
    """Of requests that were all served."""
    return fmean(item.ttft_ns for item in served if item.ttft_ns is not None)


class Shared(Cluster):
    """A cluster with several routers; looks how much work nodes have while requests wait at any router."""

    def __init__(self, trace: Trace, nodes: int, routers: int) -> None:
        policy = make_policy("kvpool")
        super().__init__(
            trace,
            LLAMA,
            nodes=nodes,
            bandwidth_bytes_per_s=8e9,
            policy=policy,
            calibration=CALIBRATION,
            routers=routers,
        )
        self.cores = self.core.cores if isinstance(self.core, SeveralRouters) else [self.core]
        self.backlogs_ns: list[float] = []
        self.loop.at(0, self._look)

    def _look(self) -> None:
        if any(core.vitals().queued for core in self.cores):
            self.backlogs_ns.append(fmean(node.engine.work_ns() for node in self.nodes))
        if any(item.ttft_ns is None for item in self.served):
            self.loop.after(POLL_NS, self._look)


@pytest.mark.parametrize("seed", [1, 4])
def test_several_routers_with_a_room_each_lose_little_against_one(seed: int) -> None:
    trace = prompts(seed, 200, every_ns=S // 10)
    one, three = (Shared(trace, nodes=4, routers=routers) for routers in (1, 3))
    alone, together = one.run(), three.run()
    assert mean_ttft_ns(together) < 1.1 * mean_ttft_ns(alone)
    assert len(three.backlogs_ns) > 100
    assert fmean(three.backlogs_ns) < 2.0 * fmean(one.backlogs_ns)  # now and then two send to the same free worker
    own = [first_asked(3, f"q{number}") for number in range(len(together))]
    by_router = [[item for item, number in zip(together, own, strict=True) if number == router] for router in range(3)]
    means_ns = [mean_ttft_ns(items) for items in by_router]
    assert max(means_ns) < 2.0 * min(means_ns)  # nobody's queue starves
