"""Find the cluster a command is about, and open a client on it."""

from __future__ import annotations

from kvpool.client import KVPoolClient
from kvpool.cluster.state import ClusterState, all_states, command, read_state
from kvpool.errors import UnavailableError


def running_state(name: str) -> ClusterState:
    """State of the cluster ``kvpool up`` started.

    Raises:
        UnavailableError: there is none.
    """
    state = read_state(name)
    if state is None:
        others = ", ".join(sorted(state.name for state in all_states()))
        running = f"; here run: {others} (give --name)" if others else ""
        raise UnavailableError(
            f"no cluster {name!r} runs here{running}; start one with '{command('up', name)}' or give --address"
        )
    return state


def open_client(address: str | None, name: str) -> KVPoolClient:
    """A client on the cluster at ``address``, or on the one that runs here."""
    return KVPoolClient(address or running_state(name).address, cluster=name)
