"""Ray's token authentication, without touching the user's home directory.

Ray asks every process of a cluster for a token. For an embedded cluster we make one, once per process, and hand it on
in the environment; ``kvpool up`` keeps it in the cluster's state file (readable by its owner only), where clients on
this machine find it by address. Whoever sets ``RAY_AUTH_MODE`` decides for himself and is left alone.
"""

from __future__ import annotations

import os
import secrets
import sys

from kvpool.cluster.state import all_states

MODE_VARIABLE = "RAY_AUTH_MODE"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
TOKEN_BYTES = 32


def provide_token() -> None:
    """Before an embedded cluster starts: make sure this process and its children have a token."""
    if MODE_VARIABLE not in os.environ:
        _use(secrets.token_hex(TOKEN_BYTES))


def find_token(address: str) -> None:
    """Before connecting: use the token of the cluster at ``address`` when ``kvpool up`` started it here."""
    if MODE_VARIABLE in os.environ:
        return
    for state in all_states():
        if state.address == address and state.ray_token:
            _use(state.ray_token)


def current_token() -> str:
    """The token this process uses, empty when authentication is off or set up by the user."""
    return os.environ.get(TOKEN_VARIABLE, "")


def _use(token: str) -> None:
    os.environ[MODE_VARIABLE] = "token"
    os.environ[TOKEN_VARIABLE] = token
    if "ray" in sys.modules:
        # Ray reads its settings from the environment when it is imported; this makes it read them again.
        from ray import _raylet

        _raylet.Config.initialize("")  # type: ignore[attr-defined]
