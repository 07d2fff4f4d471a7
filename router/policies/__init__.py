"""Routing policies by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from kvpool.errors import ConfigError
from router.policies.base import Policy
from router.policies.ours import KVPoolPolicy, redo_only

POLICIES: dict[str, Callable[[], Policy]] = {
    "kvpool": KVPoolPolicy,
    "redo_only": redo_only,
}


def make_policy(name: str) -> Policy:
    """A fresh policy with its default parameters.

    Raises:
        ConfigError: there is no such policy; the message names the nearest one.
    """
    maker = POLICIES.get(name)
    if maker is None:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown routing policy {name!r}{hint} Known: {', '.join(sorted(POLICIES))}", policy=name)
    return maker()


__all__ = ["POLICIES", "KVPoolPolicy", "Policy", "make_policy", "redo_only"]
