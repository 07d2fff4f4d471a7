"""How often the parts of a cluster were started again, for ``kvpool status``.

An actor that was started again remembers nothing, and one that cannot start tells nobody: only Ray knows. It has no
public call for it that works without its dashboard, so this file reads the table behind that one; where a version of
Ray has no such table, the number is unknown. Metadata servers are told by the launcher which start it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from kvpool.cluster.connection import ClusterConnection
from kvpool.errors import UnavailableError

RESTARTS = "restarts"


async def actor_restarts(connection: ClusterConnection, timeout_s: float) -> dict[str, int]:
    """Restarts of every actor of a cluster by name, those that were ended for good left out.

    Returns:
        Those that Ray knows; actors that go while it is asked are missing.

    Raises:
        UnavailableError: Ray does not say, or not in time.
    """
    found: dict[str, int] = await connection.ask_ray("restarts", lambda: _look(connection.namespace), timeout_s)
    return found


def _look(namespace: str) -> dict[str, int]:
    try:
        from ray._private.state import actors
    except ImportError as error:
        raise UnavailableError(f"this version of Ray does not tell: {error}") from error
    if not ray.is_initialized():  # else Ray would start a cluster to ask
        raise UnavailableError("the connection to the Ray cluster is closed", gone=True)
    found = {}
    for item in ray.util.list_named_actors(all_namespaces=True):
        if item["namespace"] != namespace:
            continue
        try:
            actor = ray.get_actor(item["name"], namespace=namespace)
        except ValueError:
            continue  # it has gone meanwhile
        count = actors(actor._actor_id.hex()).get("NumRestarts")
        if count is not None:
            found[item["name"]] = int(count)
    return found


def add_restarts(status: Mapping[str, Any], actors: Mapping[str, int]) -> None:
    """Put ``restarts`` into every part of a `kvpool.cluster.status.cluster_status` that it is known of."""
    for name, part in {**status["routers"], **status["workers"]}.items():
        if name in actors:
            part[RESTARTS] = actors[name]
    for part in status["metadata"].values():
        if RESTARTS in part.get("counters", {}):
            part[RESTARTS] = part["counters"].pop(RESTARTS)
