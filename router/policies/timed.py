"""Rules with a model of time: plain queue + redo, GORGO, Mooncake's algorithm 1, Preble's E2.  (pure)"""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np

from kvpool.types import WorkerKey
from router.decide import Decision
from router.kernel import Floats
from router.planning import Params
from router.policies.base import AtOnce
from router.policies.common import Facts, Rule
from router.signals import Holding, RequestView, Snapshot


class Plain(AtOnce):
    """Least ``queue + uncached / prefill speed``: the classic rule, the special case without loads."""

    name = "plain"

    def __init__(self, params: Params | None = None) -> None:
        self._rule = Rule(params or Params())

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self._rule.facts(request, snapshot)
        return self._rule.redo_on(facts, facts.least(facts.wait + facts.uncached_tokens * token_time(facts)))


def token_time(facts: Facts) -> Floats:
    """One over the prefill speed of each worker at this prompt's length, in ns per token."""
    columns, total = facts.snapshot.columns, facts.request.prompt_tokens
    whole = columns.t0_ns + total * (columns.token_ns + columns.pair_ns * (0.5 * total))
    return np.asarray(whole / total, dtype=np.float64)


class Gorgo(AtOnce):
    """Least ``rtt + P·uncached + Q·queued``; P and Q are fitted online, here by the shared prefill estimators."""

    name = "gorgo"

    def __init__(self, params: Params | None = None, rtt_ns: float = 0.0) -> None:
        self._rule = Rule(params or Params())
        self._rtt_ns = rtt_ns

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self._rule.facts(request, snapshot)
        columns = snapshot.columns
        score = self._rtt_ns + columns.token_ns * (facts.uncached_tokens + columns.queued_tokens)
        return self._rule.redo_on(facts, facts.least(score, rng))


MOONCAKE_THRESHOLD = 1.5


class Mooncake(AtOnce):
    """Algorithm 1 of the FAST'25 paper.

    Per node: when the best holder's prefix is more than ``threshold`` times its own, assume the missing part is
    fetched from that holder, and the time is transfer + queue + prefill of the rest, one after the other; else it is
    queue + prefill. Least time wins. There is one source per request and no view of the links' load.
    """

    name = "mooncake"

    def __init__(self, params: Params | None = None, threshold: float = MOONCAKE_THRESHOLD) -> None:
        self._rule = Rule(params or Params())
        self._threshold = threshold

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self._rule.facts(request, snapshot)
        best = facts.best_holder(-1)
        local = facts.wait + facts.redo
        if best is None:
            return self._rule.redo_on(facts, facts.least(local))
        fetches = facts.own * self._threshold < best.blocks
        remote = facts.wait + self._remote_ns(facts, best)
        position = facts.least(np.where(fetches, remote, local))
        if fetches[position]:
            return self._rule.load_on(facts, position, best)
        return self._rule.redo_on(facts, position)

    @staticmethod
    def _remote_ns(facts: Facts, best: Holding) -> Floats:
        snapshot, columns = facts.snapshot, facts.snapshot.columns
        row = snapshot.links.row(snapshot.workers[best.position].key.worker_id, best.tier, snapshot.now_ns)
        moved = snapshot.footprint.fixed_bytes + (best.blocks - facts.own) * snapshot.footprint.block_bytes
        cached = float(best.blocks * snapshot.footprint.block_tokens)
        rest = facts.request.prompt_tokens - cached
        prefill = columns.t0_ns + rest * (columns.token_ns + columns.pair_ns * (cached + 0.5 * rest))
        return np.asarray(row[0] + moved * row[1] + prefill, dtype=np.float64)


PREBLE_WINDOW_NS = 180_000_000_000
PREBLE_IMBALANCE = 1.5


class Preble(AtOnce):
    """E2: exploit the holder when the matched part is longer than the rest, else explore the least cost.

    Cost of exploring: the worker's load over a sliding window, the cost of evicting for this prompt, and its prefill.
    Exploiting is refused when the holder's windowed load is above 1.5 times the least one. State: what was routed
    where in the window, with its predicted prefill time.
    """

    name = "preble"

    def __init__(self, params: Params | None = None) -> None:
        self._rule = Rule(params or Params())
        self._window: deque[tuple[int, WorkerKey, float]] = deque()
        self._loads: dict[WorkerKey, float] = {}

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self._rule.facts(request, snapshot)
        self._forget(snapshot.now_ns)
        load = np.array([self._loads.get(view.key, 0.0) for view in snapshot.workers])
        position = self._pick(facts, load)
        key = snapshot.workers[position].key
        work = float(facts.redo[position])
        self._window.append((snapshot.now_ns, key, work))
        self._loads[key] = self._loads.get(key, 0.0) + work
        return self._rule.redo_on(facts, position)

    def _pick(self, facts: Facts, load: Floats) -> int:
        longest = max(float(facts.own_tokens[i]) for i in facts.candidates)
        if longest > facts.request.prompt_tokens - longest:
            holders = [i for i in facts.candidates if float(facts.own_tokens[i]) == longest]
            holder = min(holders, key=lambda i: float(load[i]))
            least = min(float(load[i]) for i in facts.candidates)
            if float(load[holder]) <= PREBLE_IMBALANCE * least or least == 0.0:
                return holder
        return facts.least(load + self._eviction_ns(facts) + facts.redo)

    @staticmethod
    def _eviction_ns(facts: Facts) -> Floats:
        """Redo time of what must leave to make room for what this prompt adds, as if reused once."""
        snapshot = facts.snapshot
        free = np.array([0 if view.load is None else view.load.free_blocks for view in snapshot.workers])
        lacking = np.maximum(facts.request.chain_blocks - facts.own - free, 0.0)
        return np.asarray(lacking * snapshot.footprint.block_tokens * snapshot.columns.token_ns, dtype=np.float64)

    def _forget(self, now_ns: int) -> None:
        while self._window and self._window[0][0] < now_ns - PREBLE_WINDOW_NS:
            _, key, work = self._window.popleft()
            self._loads[key] -= work
