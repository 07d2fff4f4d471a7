"""Cache-aware rules of other routers: SGLang, Dynamo, llm-d.  (pure)

Each follows the published rule with its defaults, on the same signals ours gets.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from random import Random

import numpy as np

from kvpool.types import BlockHash, WorkerKey
from router.decide import Decision
from router.kernel import Floats
from router.planning import Params
from router.policies.base import AtOnce
from router.policies.common import Facts, Rule
from router.signals import RequestView, Snapshot

SGLANG_BALANCE_ABS = 64
SGLANG_BALANCE_REL = 1.5
SGLANG_CACHE_THRESHOLD = 0.3
SGLANG_TREE_BLOCKS = 2**20


class SGLangCacheAware(AtOnce):
    """Shortest queue when the fleet is out of balance, else the best match above a threshold, else the smallest tree.

    State: an approximate tree per worker of the prompts this router sent there, never told of evictions; the quirk
    that with few requests in flight every cold prompt follows a shared first block to one worker comes from there.
    """

    name = "sglang"

    def __init__(self, params: Params | None = None) -> None:
        self._rule = Rule(params or Params())
        self._trees: dict[WorkerKey, OrderedDict[BlockHash, None]] = {}

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self._rule.facts(request, snapshot)
        position = self._pick(facts)
        self._remember(snapshot.workers[position].key, request.chain)
        return self._rule.redo_on(facts, position)

    def _pick(self, facts: Facts) -> int:
        requests = facts.snapshot.columns.requests
        loads = [float(requests[i]) for i in facts.candidates]
        if max(loads) - min(loads) > SGLANG_BALANCE_ABS and max(loads) > SGLANG_BALANCE_REL * min(loads):
            return facts.least(requests)
        matched = {i: self._match(facts, i) for i in facts.candidates}
        best = max(facts.candidates, key=lambda i: matched[i])
        if facts.request.chain and matched[best] / len(facts.request.chain) > SGLANG_CACHE_THRESHOLD:
            return best
        return min(facts.candidates, key=lambda i: len(self._tree(facts, i)))

    def _tree(self, facts: Facts, position: int) -> OrderedDict[BlockHash, None]:
        return self._trees.get(facts.snapshot.workers[position].key, OrderedDict())

    def _match(self, facts: Facts, position: int) -> int:
        tree = self._tree(facts, position)
        for i, block in enumerate(facts.request.chain):
            if block not in tree:
                return i
        return len(facts.request.chain)

    def _remember(self, worker: WorkerKey, chain: tuple[BlockHash, ...]) -> None:
        tree = self._trees.setdefault(worker, OrderedDict())
        for block in chain:
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > SGLANG_TREE_BLOCKS:
            tree.popitem(last=False)


DYNAMO_CREDITS = (1.0, 0.75, 0.25)


@dataclass(frozen=True, slots=True)
class Dynamo(Rule):
    """Least ``scale · max(prefill blocks − credits, 0) + decode blocks``; ties at random; no bandwidth, no transfer."""

    name: str = "dynamo"
    scale: float = 1.0

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self.facts(request, snapshot)
        block_tokens = snapshot.footprint.block_tokens
        credits = np.zeros(len(snapshot.columns))
        for holding in facts.held:
            credits[holding.position] = DYNAMO_CREDITS[holding.tier] * holding.blocks
        prefill = snapshot.columns.queued_tokens / block_tokens + request.prompt_tokens / block_tokens - credits
        score = self.scale * np.maximum(prefill, 0.0) + used_blocks(snapshot)
        return self.redo_on(facts, facts.least(score, rng))


def used_blocks(snapshot: Snapshot) -> Floats:
    """Blocks in use by running requests, 0 where nothing was reported."""
    used = [0 if view.load is None else view.load.total_blocks - view.load.free_blocks for view in snapshot.workers]
    return np.array(used, dtype=np.float64)


LLMD_WEIGHTS = (3.0, 2.0, 2.0)
LLMD_QUEUE_LIMIT = 128
LLMD_AFFINITY = 0.8
LLMD_TTFT_PENALTY_NS = 18e9
LLMD_PULL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class LLMD(Rule):
    """Weighted scores: prefix 3 (matched / total), queue 2 (0.5 → 0 at 128), KV use 2; with a sticky filter.

    Workers that match at least 0.8 of the prompt are preferred, unless the best of them is predicted to be more than
    18 s later than the best worker. ``pull_tokens`` turns on the peer pull: load from a peer that leads by at least
    so many tokens.
    """

    name: str = "llm-d"
    pull_tokens: int | None = None

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self.facts(request, snapshot)
        score = self._score(facts)
        matched = facts.own_tokens / request.prompt_tokens
        sticky = [i for i in facts.candidates if float(matched[i]) >= LLMD_AFFINITY]
        if sticky:
            ttft = facts.wait + facts.redo
            best_sticky = min(float(ttft[i]) for i in sticky)
            if best_sticky - min(float(ttft[i]) for i in facts.candidates) <= LLMD_TTFT_PENALTY_NS:
                score = np.where(np.isin(np.arange(len(score)), sticky), score, -1.0)
        position = facts.least(-score, rng)
        source = facts.best_holder(position)
        if self.pull_tokens is not None and source is not None:
            lead = source.blocks * snapshot.footprint.block_tokens - float(facts.own_tokens[position])
            if lead >= self.pull_tokens:
                return self.load_on(facts, position, source)
        return self.redo_on(facts, position)

    @staticmethod
    def _score(facts: Facts) -> Floats:
        snapshot = facts.snapshot
        waiting = np.array([0 if v.load is None else v.load.waiting_requests for v in snapshot.workers])
        total = np.array([1 if v.load is None else max(1, v.load.total_blocks) for v in snapshot.workers])
        queue = 0.5 * np.clip(1.0 - waiting / LLMD_QUEUE_LIMIT, 0.0, 1.0)
        free = 1.0 - np.clip(used_blocks(snapshot) / total, 0.0, 1.0)
        prefix_weight, queue_weight, use_weight = LLMD_WEIGHTS
        matched = facts.own_tokens / facts.request.prompt_tokens
        return np.asarray(prefix_weight * matched + queue_weight * queue + use_weight * free, dtype=np.float64)


def llmd_pull() -> LLMD:
    """llm-d with the peer pull switched on."""
    return LLMD(name="llm-d-pull", pull_tokens=LLMD_PULL_TOKENS)
