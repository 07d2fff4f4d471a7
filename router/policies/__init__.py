"""Routing policies by name: ours, and the rules of other routers as baselines."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from kvpool.errors import ConfigError
from router.policies.base import Policy
from router.policies.cache_aware import LLMD, Dynamo, SGLangCacheAware, llmd_pull
from router.policies.ours import KVPoolPolicy, redo_only
from router.policies.simple import Affinity, LeastLoaded, LMetric, RandomRule, RoundRobin
from router.policies.timed import Gorgo, Mooncake, Plain, Preble

POLICIES: dict[str, Callable[[], Policy]] = {
    "kvpool": KVPoolPolicy,
    "redo_only": redo_only,
    "random": RandomRule,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "affinity": Affinity,
    "plain": Plain,
    "sglang": SGLangCacheAware,
    "dynamo": Dynamo,
    "llm-d": LLMD,
    "llm-d-pull": llmd_pull,
    "mooncake": Mooncake,
    "preble": Preble,
    "lmetric": LMetric,
    "gorgo": Gorgo,
}

NEVER_LOADS = frozenset(POLICIES) - {"kvpool", "mooncake", "llm-d-pull"}
"""Policies that only redo."""


def make_policy(name: str) -> Policy:
    """A fresh policy with its default parameters.

    Raises:
        ConfigError: there is no such policy; the message names the nearest one.
    """
    maker = POLICIES.get(name)
    if maker is None:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"unknown routing policy {name!r}{hint} Known: {', '.join(sorted(POLICIES))}", policy=name)
    return maker()


__all__ = ["NEVER_LOADS", "POLICIES", "KVPoolPolicy", "Policy", "make_policy", "redo_only"]
