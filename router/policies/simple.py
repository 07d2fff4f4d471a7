"""Rules without a model of time: random, round robin, least loaded, affinity, LMetric.  (pure)"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from router.decide import Decision
from router.policies.base import AtOnce
from router.policies.common import Rule
from router.signals import RequestView, Snapshot


@dataclass(frozen=True, slots=True)
class RandomRule(Rule):
    """Any eligible worker, all equally likely."""

    name: str = "random"

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self.facts(request, snapshot)
        return self.redo_on(facts, rng.choice(facts.candidates))


class RoundRobin(AtOnce):
    """Eligible workers in turn, in key order. State: how many requests were routed."""

    name = "round_robin"

    def __init__(self) -> None:
        self._rule = Rule()
        self._turn = 0

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self._rule.facts(request, snapshot)
        position = facts.candidates[self._turn % len(facts.candidates)]
        self._turn += 1
        return self._rule.redo_on(facts, position)


@dataclass(frozen=True, slots=True)
class LeastLoaded(Rule):
    """Fewest requests in flight; ties at random."""

    name: str = "least_loaded"

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self.facts(request, snapshot)
        return self.redo_on(facts, facts.least(snapshot.columns.requests, rng))


@dataclass(frozen=True, slots=True)
class Affinity(Rule):
    """Always the longest cached prefix, however busy; without any, the fewest requests in flight."""

    name: str = "affinity"

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self.facts(request, snapshot)
        if max(float(facts.own[i]) for i in facts.candidates) > 0.0:
            return self.redo_on(facts, facts.least(-facts.own))
        return self.redo_on(facts, facts.least(snapshot.columns.requests))


@dataclass(frozen=True, slots=True)
class LMetric(Rule):
    """Least product of prefill tokens the worker would have and its batch size with this request."""

    name: str = "lmetric"

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.policies.base.Policy`."""
        facts = self.facts(request, snapshot)
        tokens = snapshot.columns.queued_tokens + facts.uncached_tokens
        return self.redo_on(facts, facts.least(tokens * (snapshot.columns.requests + 1.0), rng))
