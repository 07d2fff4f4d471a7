"""Eyes of a fault run: what clients see of attempts, what the router says of itself, what workers really hold.

`RecordingConnection` is an ordinary cluster connection that writes down every attempt. It can also turn some routes
into loads, so that a small model, which is never worth a load, has its data plane hit as well; such attempts are
marked as forced.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from kvpool.attempts import retry_after_s
from kvpool.cluster.connection import ClusterConnection, ClusterInfo
from kvpool.cluster.merge import merge
from kvpool.cluster.routers import ROUTER_NAME
from kvpool.errors import KVPoolError
from kvpool.faults.history import HistoryWriter, Kind
from kvpool.hashing import block_hashes
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.plan import LoadSlice, Plan, PlanKind, Route
from kvpool.request import GenerateRequest, TokenChunk
from kvpool.types import MemberState, RequestId, Tier, WorkerKey

STATE_PERIOD_S = 0.25
STATE_TIMEOUT_S = 1.0
AUDIT_TIMEOUT_S = 5.0
AUDIT_PERIOD_S = 0.5
FORCED_DEADLINE_NS = 8_000_000_000
FORCED_STALL_NS = 1_000_000_000
FORCED_EXPECTED_NS = 2_000_000
"""What a worker is told to expect of a forced load: little, so that it waits as long as computing would take."""
MIN_FORCED_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class ForcedLoads:
    """Turns a share of the routes into loads from whoever holds the longest prefix, as the directory says.

    Attributes:
        share: of the requests that another worker holds at least `MIN_FORCED_BLOCKS` more blocks for.
        info, watcher: the cluster's namespace, and a copy of its directory.
        rng: which routes.
    """

    share: float
    info: ClusterInfo
    watcher: MetadataWatcher
    rng: random.Random

    def change(self, request: GenerateRequest, route: Route) -> Route | None:
        """The route with a load in it, or None to leave it alone."""
        if route.plan.loads or request.generated or self.rng.random() >= self.share:
            return None
        alive = {key: item.info for key, item in self.watcher.members().items() if item.state is MemberState.ALIVE}
        chain = block_hashes(request.prompt, self.info.namespace.for_tenant(request.tenant))
        held = {key: max(tiers.values(), default=0) for key, tiers in self.watcher.prefixes(chain).items()}
        readers = [key for key in alive if held.get(key, 0) + MIN_FORCED_BLOCKS <= max(held.values(), default=0)]
        if not readers:
            return None
        reader = self.rng.choice(sorted(readers, key=str))
        holder = max((key for key in alive), key=lambda key: (held.get(key, 0), str(key)))
        source = alive[holder]
        start, stop = held.get(reader, 0), min(held.get(holder, 0), (len(request.prompt) - 1) // source.block_tokens)
        if stop - start < MIN_FORCED_BLOCKS:
            return None
        plan = Plan(
            kind=PlanKind.LOAD,
            loads=(LoadSlice(start, stop, holder, source.transport, source.data_address, Tier.HOST),),
            load_deadline_ns=FORCED_DEADLINE_NS,
            stall_ns=FORCED_STALL_NS,
            predicted_ttft_ns=FORCED_EXPECTED_NS,
            predicted_load_ns=FORCED_EXPECTED_NS,
        )
        return route._replace(
            worker_id=reader.worker_id,
            worker=reader,
            control_address=alive[reader].control_address,
            plan=plan,
        )


class RecordingConnection(ClusterConnection):
    """A cluster connection that writes down every attempt of every request, and tells of loads as they are decided."""

    def __init__(self, cluster: str, history: HistoryWriter, block_tokens: int, forced: ForcedLoads | None) -> None:
        super().__init__(cluster)
        self._history = history
        self._block_tokens = block_tokens
        self._forced = forced
        self._numbers: Counter[RequestId] = Counter()
        self._load_seen = asyncio.Event()
        self._last_load: tuple[WorkerKey, WorkerKey] | None = None

    async def next_load(self, timeout_s: float) -> tuple[WorkerKey, WorkerKey] | None:
        """Holder and reader of the next load that is decided; None when none is in time."""
        self._load_seen.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._load_seen.wait()
        except TimeoutError:
            return None
        return self._last_load

    async def route(self, request: GenerateRequest, exclude: frozenset[WorkerKey], timeout_s: float) -> Route:
        """Ask the router, and write down what it said."""
        number = self._numbers[request.request_id] = self._numbers[request.request_id] + 1
        try:
            route = await super().route(request, exclude, timeout_s)
        except KVPoolError as error:
            if retry_after_s(error) is None:
                self._end(request, number, error.code)
            else:  # it waits at the router, which is no attempt
                self._numbers[request.request_id] = number - 1
            raise
        changed = self._forced.change(request, route) if self._forced is not None and number == 1 else None
        route = changed or route
        holders = {piece.holder: None for piece in route.plan.loads}
        self._history.add(
            Kind.ATTEMPT,
            id=request.request_id,
            number=number,
            worker=str(route.worker),
            plan=route.plan.kind.value,
            holders=[str(key) for key in holders],
            planned_tokens=sum(piece.stop - piece.start for piece in route.plan.loads) * self._block_tokens,
            forced=changed is not None,
        )
        if holders:
            self._last_load = (next(iter(holders)), route.worker)
            self._load_seen.set()
        return route

    async def stream(
        self, route: Route, request: GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream, and write down what came and how it ended."""
        number = self._numbers[request.request_id]
        code: str | None = "abandoned"
        inner = super().stream(route, request, timeout_s)
        try:
            async for chunk in inner:
                self._history.add(Kind.CHUNK, id=request.request_id, tokens=chunk.tokens)
                code = None if chunk.finish is not None else code  # nobody has to wait for the end behind it
                yield chunk
        except KVPoolError as error:
            code = error.code
            raise
        finally:
            await inner.aclose()
            self._end(request, number, code)

    def _end(self, request: GenerateRequest, number: int, code: str | None) -> None:
        self._history.add(Kind.ATTEMPT_END, id=request.request_id, number=number, code=code)


async def watch_states(connection: ClusterConnection, history: HistoryWriter, stop: asyncio.Event) -> None:
    """Write down what the routers say of their workers, a few times a second, until told to stop."""
    while not stop.is_set():
        try:
            answers = await connection.ask_routers("status", timeout_s=STATE_TIMEOUT_S)
        except KVPoolError as error:  # nobody has said yet which routers there are
            answers = {ROUTER_NAME: error}
        history.add(Kind.STATE, **_state(answers))
        await asyncio.sleep(STATE_PERIOD_S)


def _state(answers: dict[str, Any]) -> dict[str, Any]:
    """A worker lives as long as one router that answers offers it."""
    statuses = {name: answer for name, answer in answers.items() if not isinstance(answer, KVPoolError)}
    if not statuses:
        return {"error": next(iter(answers.values())).code}
    merged = merge(statuses)
    states = {(item["worker"], item["state"]) for status in statuses.values() for item in status["workers"]}
    alive = {worker for worker, state in states if state == MemberState.ALIVE.value}
    return {
        "alive": sorted(alive),
        "others": {worker: state for worker, state in sorted(states) if worker not in alive},
        "connected": all(status["metadata"]["connected"] for status in statuses.values()),
        "decisions": merged["decisions"],
        "failures": merged["failures"],
    }


class Auditor:
    """Compares what workers hold with what router and directories believe. `close` when done.

    Args:
        connection: of the cluster.
        directories: addresses of the metadata servers; each is watched on its own.
    """

    def __init__(self, connection: ClusterConnection, directories: tuple[str, ...]) -> None:
        self._connection = connection
        self._watchers = {address: MetadataWatcher((address,), name="auditor") for address in directories}
        for watcher in self._watchers.values():
            watcher.start()

    async def audit_until_equal(self, workers: tuple[str, ...], history: HistoryWriter, timeout_s: float) -> bool:
        """Audit again and again until everything is equal and at rest; False when the time is over before."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            audit = await self.audit(workers)
            history.add(Kind.AUDIT, **audit)
            if _is_settled(audit):
                return True
            if loop.time() > deadline_s:
                return False
            await asyncio.sleep(AUDIT_PERIOD_S)

    async def audit(self, workers: tuple[str, ...]) -> dict[str, Any]:
        """One look at everybody: the fields of a `Kind.AUDIT` record. Who does not answer is named with its error.

        Routers beyond the first stand among the directories: theirs are copies as well.
        """
        first, *others = await self._connection.routers()
        router, *answers = await asyncio.gather(*(self._ask(name) for name in (first, *workers)))
        directories = {name: await self._ask(name) for name in others}
        for address, watcher in self._watchers.items():
            if watcher.connected:
                digests = await asyncio.to_thread(watcher.digests)
                directories[address] = {str(key): digest for key, digest in digests.items()}
            else:
                directories[address] = {"error": "not connected"}
        return {"workers": dict(zip(workers, answers, strict=True)), "router": router, "directories": directories}

    async def _ask(self, actor: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = await self._connection.call(actor, "audit", timeout_s=AUDIT_TIMEOUT_S)
        except KVPoolError as error:
            return {"error": error.code}
        return answer

    def close(self) -> None:
        """Stop watching."""
        for watcher in self._watchers.values():
            watcher.close()


def _is_settled(audit: dict[str, Any]) -> bool:
    workers = audit["workers"].values()
    if any("error" in item or item["active"] for item in workers):
        return False
    truth = {item["key"]: item["digest"] for item in workers}
    return all(belief == truth for belief in (audit["router"], *audit["directories"].values()))
