"""``kvpool status``: one picture of a cluster from its three kinds of parts, each of which may be down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from kvpool.cluster.connection import ENDED_OR_OTHER_NAME, ClusterConnection
from kvpool.cluster.merge import merge, router_rows
from kvpool.cluster.restarts import actor_restarts, add_restarts
from kvpool.cluster.routers import is_router
from kvpool.errors import DeadlineError, KVPoolError, UnavailableError
from kvpool.metadata.client import MetadataClient

PART_TIMEOUT_S = 3.0


async def cluster_status(connection: ClusterConnection) -> dict[str, Any]:
    """Status of routers, workers and metadata servers. A part that does not answer is named, with its error.

    Returns:
        ``{"model", "router", "routers": {name: …}, "workers": {id: …}, "metadata": {address: …}, "unknown": {…}}``; a
        dead part is ``{"error": …}``. Each has ``restarts``, how often it was started again, where that is known.
        ``router`` is what those that answer have to say together (`kvpool.cluster.merge`). ``unknown`` says of which
        kinds of parts nobody tells which there are, and why.

    Raises:
        UnavailableError: Ray runs nothing of this cluster.
    """
    status, restarts = await asyncio.gather(_parts(connection), _restarts(connection))
    add_restarts(status, restarts)
    return status


async def _restarts(connection: ClusterConnection) -> dict[str, int]:
    try:
        return await actor_restarts(connection, PART_TIMEOUT_S)
    except UnavailableError:
        return {}  # unknown of every actor, and shown as that


async def _parts(connection: ClusterConnection) -> dict[str, Any]:
    try:
        info = await connection.info(PART_TIMEOUT_S)
    except KVPoolError as error:
        return await _without_routers(connection, error)
    told, *others = await asyncio.gather(  # at once, so that what is silent costs its time once
        connection.ask_routers("status", timeout_s=PART_TIMEOUT_S),
        *(_part(_worker_status(connection, worker)) for worker in info.workers),
        *(_part(asyncio.to_thread(_describe, address)) for address in info.metadata),
    )
    workers = dict(zip(info.workers, others, strict=False))
    routers = {name: _dead(part) if isinstance(part, KVPoolError) else part for name, part in told.items()}
    alive = {name: part for name, part in routers.items() if "workers" in part}
    router = merge(alive) if alive else next(iter(routers.values()))
    joined = {item["worker"].partition("@")[0] for item in router.get("workers", [])}
    later = sorted(joined - set(info.workers))  # those that were added later are members too
    workers |= dict(
        zip(later, await asyncio.gather(*(_part(_worker_status(connection, name)) for name in later)), strict=True)
    )
    metadata = dict(zip(info.metadata, others[len(info.workers) :], strict=True))
    for part, metrics in zip(metadata.values(), info.metadata_metrics, strict=False):
        part["metrics"] = metrics
    return {
        "model": info.model,
        "router": router,
        "routers": router_rows(routers),
        "workers": workers,
        "metadata": metadata,
        "unknown": {},
    }


async def _without_routers(connection: ClusterConnection, error: KVPoolError) -> dict[str, Any]:
    """What is left to say when no router answers: Ray knows who else there is, and workers where the directory is."""
    try:
        actors = await connection.actors()
    except KVPoolError as silence:
        nobody = f"neither a router nor Ray answers: {silence.message}"
        return {
            **{"router": _dead(error), "routers": {}, "workers": {}, "metadata": {}},
            "unknown": dict.fromkeys(("routers", "workers", "metadata"), nobody),
        }
    if not actors:
        raise UnavailableError(
            f"Ray has no actor in the namespace {connection.namespace!r}: {ENDED_OR_OTHER_NAME}", gone=True
        ) from error
    routers = [name for name in actors if is_router(name)]
    workers = [name for name in actors if not is_router(name)]
    told = await asyncio.gather(*(_part(_worker_status(connection, name)) for name in workers))
    endpoints = (part.get("publisher", {}).get("endpoints", ()) for part in told)
    servers = tuple(dict.fromkeys(address for addresses in endpoints for address in addresses))
    described = await asyncio.gather(*(_part(asyncio.to_thread(_describe, address)) for address in servers))
    return {
        "router": _dead(error),
        "routers": {name: _dead(error) for name in routers},
        "workers": dict(zip(workers, told, strict=True)),
        "metadata": dict(zip(servers, described, strict=True)),
        "unknown": {} if servers else {"metadata": "no router and no worker answers that could say which there are"},
    }


async def _worker_status(connection: ClusterConnection, worker: str) -> Any:
    """A handle from before a worker was drained only says that it cannot be reached; a fresh one says that it left."""
    try:
        return await connection.call(worker, "status", timeout_s=PART_TIMEOUT_S)
    except UnavailableError as error:
        if isinstance(error, DeadlineError):
            raise
        return await connection.call(worker, "status", timeout_s=PART_TIMEOUT_S)


def _describe(address: str) -> dict[str, Any]:
    client = MetadataClient((address,))
    try:
        return dict(client.describe())
    finally:
        client.close()


async def _part(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except KVPoolError as error:
        return _dead(error)


def _dead(error: KVPoolError) -> dict[str, Any]:
    if error.details.get("gone"):
        return {"state": "left", "detail": "no such actor runs; it was drained, or ended by hand"}
    return {"error": str(error), "code": error.code}
