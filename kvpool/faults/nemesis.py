"""The hand that breaks things: real signals, and links cut in the kernel or made to misbehave in a worker's transport.

Every strike writes a fault before it acts and a healing afterwards, and undoes what it did on every path. What was
*killed* is healed when its successor serves; what was *paused* or *shaped* is healed when that ends. Signals reach only
processes of this machine; a strike on a process elsewhere is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from kvpool.cluster.launcher import Cluster
from kvpool.cluster.routers import is_router
from kvpool.config import WorkerConfig
from kvpool.errors import KVPoolError, RequestError, UnavailableError
from kvpool.faults.disks import damage_files, no_space
from kvpool.faults.history import CORRUPTING, DRAINED, KILLED, STOPPED, HistoryWriter, Kind
from kvpool.faults.network import Network, has_network
from kvpool.faults.probe import RecordingConnection
from kvpool.faults.processes import listener, send, stopped
from kvpool.metadata.client import MetadataClient
from kvpool.metadata.disturbance import CALM, Disturbance
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.transport.shaping import CLEAR, LinkShape
from kvpool.types import MemberState, WorkerId, WorkerKey
from kvpool.wallclock import set_offset

HEAL_LIMIT_S = 120.0
DRAIN_LIMIT_S = 60.0
LOAD_WAIT_S = 3.0
DAMAGE_PERIOD_S = 0.25
PAUSE_LEASES = 2.5
POLL_S = 0.05
CALL_TIMEOUT_S = 2.0
NOMINAL_LINK_BYTES_PER_S = 1_000_000_000.0
NAMESPACES, SHAPING = "network namespaces", "shaping transport"

Flood = Callable[[int, int], Awaitable[None]]
"""Sends that many requests with unique prompts of that many tokens, and waits for their answers."""


@dataclass(frozen=True, slots=True)
class Arena:
    """What a nemesis works with.

    Attributes:
        connection: of the cluster; also tells of loads as they are decided.
        history: where faults are written.
        watcher: a copy of the directory.
        metadata: addresses of the metadata servers.
        lease_ns: membership lease.
        rng: chooses victims.
        flood: see `Flood`.
        cluster: the embedded cluster, None when it is somebody else's.
        network: what its data planes hang on; None where links are shaped.
    """

    connection: RecordingConnection
    history: HistoryWriter
    watcher: MetadataWatcher
    metadata: tuple[str, ...]
    lease_ns: int
    rng: random.Random
    flood: Flood
    cluster: Cluster | None
    network: Network | None = None


class Nemesis:
    """Strikes. Several may run at once; two on one victim wait for each other."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._numbers = itertools.count(1)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._pids: dict[str, int] = {}

    @property
    def pause_s(self) -> float:
        """How long a pause lasts: well past the membership lease."""
        return PAUSE_LEASES * self.arena.lease_ns / 1e9

    # ── victims ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def pair(self) -> tuple[WorkerId, WorkerId]:
        """Holder and reader of a load that was just decided; two live workers by chance when none comes soon.

        Their process ids are asked for beforehand, so that a signal can still find the load under way.
        """
        self._pids = {}
        for worker in self.workers():
            with contextlib.suppress(UnavailableError):  # another strike was first; it is asked again if chosen
                self._pids[worker] = await self.pid_of(worker)
        load = await self.arena.connection.next_load(LOAD_WAIT_S)
        if load is not None:
            return load[0].worker_id, load[1].worker_id
        await self._wait(self._two_live, "two workers live")  # none are known while a directory comes back
        first, second = self.arena.rng.sample(self.workers(), 2)
        return first, second

    async def _two_live(self) -> bool:
        return len(self.workers()) >= 2

    async def a_router(self) -> str:
        """One of the routers, by chance."""
        return self.arena.rng.choice(await self.arena.connection.routers())

    def workers(self) -> list[WorkerId]:
        """Live members, by name."""
        members = self.arena.watcher.members().items()
        return sorted(key.worker_id for key, member in members if member.state is MemberState.ALIVE)

    def key_of(self, worker_id: WorkerId) -> WorkerKey | None:
        """The live incarnation of a worker."""
        keys = [key for key in self.arena.watcher.members() if key.worker_id == worker_id]
        return max(keys, key=lambda key: key.worker_epoch, default=None)

    async def pid_of(self, actor: str) -> int:
        """Process id of an actor on this machine.

        Raises:
            UnavailableError: it does not answer, or its process is not on this machine.
        """
        pid: int = await self.arena.connection.call(actor, "pid", timeout_s=CALL_TIMEOUT_S)
        title = "RouterActor" if is_router(actor) else "WorkerActor"
        with contextlib.suppress(psutil.Error):
            if title in "".join(psutil.Process(pid).cmdline()[:1]):
                return pid
        raise UnavailableError(f"{actor} (pid {pid}) does not run on this machine; strike it from its own node")

    async def _victim(self, actor: str) -> int:
        """Process id of an actor, at once when `pair` has just asked for it; waits for one that just starts."""
        pid = self._pids.pop(actor, None)
        if pid is not None and psutil.pid_exists(pid):
            return pid

        async def answers() -> bool:
            self._pids[actor] = await self.pid_of(actor)
            return True

        await self._wait(answers, f"{actor} says its process id")
        return self._pids.pop(actor)

    # ── strikes on actors ────────────────────────────────────────────────────────────────────────────────────────────

    async def kill_actor(self, name: str, actor: str) -> None:
        """SIGKILL; healed when a new process serves in its place."""
        async with self._locks[actor]:
            pid = await self._victim(actor)
            old_key = self.key_of(WorkerId(actor))
            fault = self._fault(name, actor, KILLED, key=old_key, pid=pid)
            send(pid, signal.SIGKILL)
            await self._wait(lambda: self._serves(actor, old_key, pid), f"{actor} serves again")
            self._heal(fault, "a new process serves")

    async def pause_actor(self, name: str, actor: str) -> None:
        """SIGSTOP for longer than the lease; healed when it runs on. Its fenced incarnation is replaced after that."""
        async with self._locks[actor]:
            pid = await self._victim(actor)
            fault = self._fault(name, actor, STOPPED, key=self.key_of(WorkerId(actor)), pid=pid)
            await self._pause(pid)
            self._heal(fault, "SIGCONT")
            await self._wait(lambda: self._serves(actor, None, 0), f"{actor} serves again")

    async def drain_worker(self, name: str, worker_id: WorkerId) -> None:
        """Drain under load, end the process once it is idle, and wait for its successor."""
        async with self._locks[worker_id]:
            pid = await self._victim(worker_id)
            key = self.key_of(worker_id)
            fault = self._fault(name, worker_id, f"{DRAINED} through the metadata service", key=key, pid=pid)
            await asyncio.to_thread(self._drain, worker_id)
            await self._wait(lambda: self._is_idle(worker_id), f"{worker_id} is idle", DRAIN_LIMIT_S)
            send(pid, signal.SIGKILL)
            await self._wait(lambda: self._serves(worker_id, key, pid), f"{worker_id} serves again")
            self._heal(fault, "drained, ended and replaced")

    def _drain(self, worker_id: WorkerId) -> None:
        """The directory's part only: an administrator's drain ends the worker for good, and here Ray replaces it."""
        with MetadataClient(self.arena.metadata) as client:
            client.drain(worker_id)

    async def _is_idle(self, worker_id: WorkerId) -> bool:
        audit = await self.arena.connection.call(worker_id, "audit", timeout_s=CALL_TIMEOUT_S)
        return not audit["active"]

    async def _serves(self, actor: str, old_key: WorkerKey | None, old_pid: int) -> bool:
        """A process other than the old one answers; for a worker, one that every router knows."""
        if await self.pid_of(actor) == old_pid:
            return False
        if is_router(actor):
            connected, alive = await self._known_to(actor)
            return connected and set(map(str, self.arena.watcher.members())) <= alive
        own: str = (await self.arena.connection.call(actor, "audit", timeout_s=CALL_TIMEOUT_S))["key"]
        views = [await self._known_to(router) for router in await self.arena.connection.routers()]
        return own != str(old_key) and all(own in alive for _, alive in views)

    async def _known_to(self, router: str) -> tuple[bool, set[str]]:
        """Whether a router hears a directory, and the workers that live for all it knows."""
        status = await self.arena.connection.call(router, "status", timeout_s=CALL_TIMEOUT_S)
        alive = {item["worker"] for item in status["workers"] if item["state"] == MemberState.ALIVE.value}
        return status["metadata"]["connected"], alive

    # ── strikes on Ray nodes ─────────────────────────────────────────────────────────────────────────────────────────

    async def kill_node(self, name: str) -> None:
        """SIGKILL to a whole Ray node of an embedded cluster; healed when everybody who lived there serves again.

        Ray needs 15 to 20 s to declare the node dead and starts its actors elsewhere then; the pool does not wait for
        that. With no other node left nothing is struck.
        """
        cluster = self.arena.cluster
        if cluster is None:
            raise RequestError("a Ray node is killed in an embedded cluster only; leave --address out")
        async with self._locks["nodes"]:
            if not cluster.nodes:
                return
            node = cluster.nodes[0]
            pids = await asyncio.to_thread(node.pids)
            actors: list[str] = [*await self.arena.connection.routers(), *self.workers()]
            here = {actor: pid for actor in actors if (pid := await self.pid_of(actor)) in pids}
            keys = {actor: self.key_of(WorkerId(actor)) for actor in here}
            faults = [
                self._fault(name, actor, f"{KILLED} to its Ray node", key=keys[actor], pid=pid)
                for actor, pid in here.items()
            ] or [self._fault(name, "a Ray node without actors", KILLED)]
            cluster.nodes.remove(node)
            await asyncio.to_thread(node.kill)
            for actor, pid in here.items():
                await self._wait(partial(self._serves, actor, keys[actor], pid), f"{actor} serves again")
            for fault in faults:
                self._heal(fault, "new processes serve on another node")

    # ── strikes on metadata servers ──────────────────────────────────────────────────────────────────────────────────

    async def kill_metadata(self, name: str, index: int) -> None:
        """SIGKILL; healed when the server is back on its port and every live worker has joined it again."""
        address = self.arena.metadata[index]
        async with self._locks[address]:
            pid = listener(address)
            fault = self._fault(name, f"metadata-{index}", KILLED, pid=pid)
            send(pid, signal.SIGKILL)
            await self._wait(lambda: self._has_everybody(address, pid), f"{address} is whole again")
            self._heal(fault, "a new process serves")

    async def pause_metadata(self, name: str, index: int) -> None:
        """SIGSTOP for longer than the lease; healed when it runs on."""
        address = self.arena.metadata[index]
        async with self._locks[address]:
            pid = listener(address)
            fault = self._fault(name, f"metadata-{index}", STOPPED, pid=pid)
            await self._pause(pid)
            self._heal(fault, "SIGCONT")
            await self._wait(lambda: self._has_everybody(address, 0), f"{address} is whole again")

    async def _has_everybody(self, address: str, old_pid: int) -> bool:
        if listener(address) == old_pid:
            return False
        members = await asyncio.to_thread(_members_at, address)
        actors = await asyncio.gather(
            *(self.arena.connection.call(name, "audit", timeout_s=CALL_TIMEOUT_S) for name in sorted(members))
        )
        return bool(members) and all(item["key"] in members.values() for item in actors)

    # ── strikes on links ─────────────────────────────────────────────────────────────────────────────────────────────

    async def slow_links(self, name: str, holder: WorkerId, factor: float, seconds: float) -> None:
        """Everybody's links from a holder carry a fraction of what the router has learned they carry."""
        rate, network = await self._learned_rate(holder) / factor, self.arena.network
        if network is None:
            await self.shape_links(name, holder, LinkShape(rate_bytes_per_s=rate), seconds)
        else:
            what = f"what it sends leaves it at {rate / 1e6:.3f} MB/s"
            await self._cut(name, holder, what, lambda pid: network.slowed(pid, rate), seconds)

    async def drop_links(self, name: str, holder: WorkerId, seconds: float) -> None:
        """No reader gets anything from a holder."""
        network = self.arena.network
        if network is None:
            await self.shape_links(name, holder, LinkShape(loss=1.0), seconds)
        else:
            await self._cut(name, holder, "nothing reaches or leaves it", network.dropped, seconds)

    async def mute_link(self, name: str, reader: WorkerId, holder: WorkerId, seconds: float) -> None:
        """One reader gets nothing from one holder; the other direction stays clear."""
        network = self.arena.network
        if network is None:
            await self._shape(name, holder, [(reader, holder)], LinkShape(loss=1.0), seconds)
        else:
            to = await self._victim(reader)
            what = f"what it sends to {reader} goes to nobody"
            await self._cut(name, holder, what, lambda pid: network.muted(pid, to), seconds)

    async def shape_links(self, name: str, holder: WorkerId, shape: LinkShape, seconds: float) -> None:
        """Every reader's link from a holder has a shape for a while."""
        others = [worker for worker in self.workers() if worker != holder]
        await self._shape(name, holder, [(other, holder) for other in others], shape, seconds)

    async def shape_answers(self, name: str, holder: WorkerId, shape: LinkShape, seconds: float) -> None:
        """What a holder offers to every reader has a shape for a while: corruption acts on this side."""
        others = [worker for worker in self.workers() if worker != holder]
        await self._shape(name, holder, [(holder, other) for other in others], shape, seconds)

    async def _cut(
        self, name: str, holder: WorkerId, what: str, cut: Callable[[int], AbstractContextManager[None]], seconds: float
    ) -> None:
        """The kernel does that to a holder's link for a while."""
        async with self._locks[f"links-{holder}"]:
            pid = await self._victim(holder)
            fault = self._fault(name, holder, f"{NAMESPACES}: {what}", key=self.key_of(holder), pid=pid)
            with contextlib.ExitStack() as until_healed:
                try:
                    until_healed.enter_context(cut(pid))
                except UnavailableError:
                    if has_network(pid):
                        raise
                    # Another strike was first; its successor has a link of its own, which is clear.
                await asyncio.sleep(seconds)
            self._heal(fault, "clear")

    async def _shape(
        self, name: str, holder: WorkerId, ends: list[tuple[WorkerId, WorkerId]], shape: LinkShape, seconds: float
    ) -> None:
        async with self._locks[f"links-{holder}"]:
            for at, peer in ends:  # refused here when the transport cannot be shaped, before anything is broken
                await self._wait(partial(self._shape_end, at, peer, CLEAR), f"the links of {at} can be shaped")
            target = ",".join(f"{at}<-{peer}" for at, peer in ends)
            mechanism = f"{CORRUPTING if shape.corruption == 1.0 else SHAPING}: {shape}"
            fault = self._fault(name, target, mechanism, key=self.key_of(holder))
            try:
                for at, peer in ends:
                    with contextlib.suppress(UnavailableError):  # another strike was first; its successor is clear
                        await self._shape_end(at, peer, shape)
                await asyncio.sleep(seconds)
            finally:
                for at, peer in ends:
                    await self._wait(partial(self._shape_end, at, peer, CLEAR), f"the links of {at} are clear")
            self._heal(fault, "clear")

    async def _shape_end(self, at: WorkerId, peer: WorkerId, shape: LinkShape) -> bool:
        await self.arena.connection.call(at, "shape_link", peer, shape, timeout_s=CALL_TIMEOUT_S)
        return True

    async def _learned_rate(self, holder: WorkerId) -> float:
        """Bytes per second of the slowest known link from a holder; a nominal rate when none is known."""
        status = await self.arena.connection.ask_router("status", timeout_s=CALL_TIMEOUT_S)
        rates = [item["beta_gbytes_per_s"] * 1e9 for item in status["links"] if item["holder"] == holder]
        rate = min(rates, default=NOMINAL_LINK_BYTES_PER_S)
        return rate if math.isfinite(rate) and rate > 0 else NOMINAL_LINK_BYTES_PER_S

    # ── strikes on clocks ────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def wall_clock(self, name: str, offset_ns: int) -> AsyncIterator[None]:
        """Inside, the wall clock of every process of the cluster is off by so much."""
        cluster = self.arena.cluster
        if cluster is None:
            raise RequestError("clocks jump in an embedded cluster only; leave --address out")
        async with self._locks["wall clock"]:
            fault = self._fault(name, "wall clock", f"an offset of {offset_ns / 1e9:+.0f} s to every wall clock")
            set_offset(cluster.cluster_dir, offset_ns)
            try:
                yield
            finally:
                set_offset(cluster.cluster_dir, 0)
            self._heal(fault, "the clock is right")

    # ── strikes on disks ─────────────────────────────────────────────────────────────────────────────────────────────

    async def damage_disks(self, name: str, seconds: float) -> None:
        """Every block file of every worker is damaged again and again; healed when that ends."""
        folder = self._disk_folder()
        async with self._locks["disks"]:
            fault = self._fault(
                name, "every disk tier", "block files flipped, cut, emptied, swapped or removed in place"
            )
            for _ in range(max(1, round(seconds / DAMAGE_PERIOD_S))):
                await asyncio.to_thread(damage_files, folder, self.arena.rng)
                await asyncio.sleep(DAMAGE_PERIOD_S)
            self._heal(fault, "new files stay as they are written")

    async def fill_disks(self, name: str, seconds: float) -> None:
        """No worker can write a block file for a while; healed when they can."""
        self._disk_folder()
        async with self._locks["disks"]:
            pids = [await self.pid_of(worker) for worker in self.workers()]
            fault = self._fault(name, "every disk tier", "RLIMIT_FSIZE: writes fail as on a full disk")
            with no_space(pids):
                await asyncio.sleep(seconds)
            self._heal(fault, "the limit is lifted")

    def _disk_folder(self) -> Path:
        cluster = self.arena.cluster
        path = None if cluster is None else cluster.config.workers[0].store.disk_path
        if path is None:
            raise RequestError("disks are struck in an embedded cluster with a disk tier only; leave --address out")
        return Path(path)

    # ── strikes on the index ─────────────────────────────────────────────────────────────────────────────────────────

    async def disturb_events(self, name: str, worker: WorkerId, disturbance: Disturbance, seconds: float) -> None:
        """A worker's block events are lost, repeated or late for a while; healed when they flow again."""
        async with self._locks[f"events-{worker}"]:
            await self._wait(partial(self._disturb, worker, CALM), f"the events of {worker} can be disturbed")
            fault = self._fault(name, worker, f"the worker's publisher: {disturbance}", key=self.key_of(worker))
            try:
                with contextlib.suppress(UnavailableError):  # another strike was first; its successor is calm
                    await self._disturb(worker, disturbance)
                await asyncio.sleep(seconds)
            finally:
                await self._wait(partial(self._disturb, worker, CALM), f"the events of {worker} flow again")
            self._heal(fault, "every event is sent once, at once")

    async def _disturb(self, worker: WorkerId, disturbance: Disturbance) -> bool:
        await self.arena.connection.call(worker, "disturb_events", disturbance, timeout_s=CALL_TIMEOUT_S)
        return True

    # ── strikes by load and growth ───────────────────────────────────────────────────────────────────────────────────

    async def flood(self, name: str, requests: int, tokens: int) -> None:
        """Unique prompts that push everything else out of the segments; healed when they are answered."""
        fault = self._fault(name, "every segment", f"{requests} unique prompts of {tokens} tokens at once")
        await self.arena.flood(requests, tokens)
        self._heal(fault, "the last of them was answered")

    async def join_workers(self, name: str, count: int) -> None:
        """New workers join at once under load; healed when they serve. They stay."""
        cluster = self.arena.cluster
        if cluster is None:
            raise RequestError("new workers can join an embedded cluster only; leave --address out")
        group: WorkerConfig = cluster.config.workers[0].model_copy(update={"count": count})
        fault = self._fault(name, f"{count} new workers", "Cluster.add_workers")
        await asyncio.to_thread(cluster.add_workers, group)
        self._heal(fault, "they serve")

    # ── common ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fault(self, name: str, target: str, mechanism: str, key: WorkerKey | None = None, pid: int = 0) -> str:
        fault = f"f-{next(self._numbers)}"
        shown = None if key is None else str(key)
        self.arena.history.add(
            Kind.FAULT, fault=fault, name=name, target=target, key=shown, pid=pid, mechanism=mechanism
        )
        return fault

    def _heal(self, fault: str, how: str) -> None:
        self.arena.history.add(Kind.HEAL, fault=fault, how=how)

    async def _pause(self, pid: int) -> None:
        async with stopped(pid):
            await asyncio.sleep(self.pause_s)

    async def _wait(self, condition: Callable[[], Awaitable[bool]], what: str, limit_s: float = HEAL_LIMIT_S) -> None:
        """Poll until true; what does not answer is not true yet.

        Raises:
            UnavailableError: it did not become true within the limit.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + limit_s
        last = "it answers, but not so"
        while True:
            try:
                if await condition():
                    return
            except RequestError:
                raise  # asking again will not help
            except KVPoolError as error:
                last = str(error)
            if loop.time() > deadline_s:
                raise UnavailableError(f"not within {limit_s:.0f} s: {what}; {last}")
            await asyncio.sleep(POLL_S)


def _members_at(address: str) -> dict[str, str]:
    """Live members that one metadata server knows: control address → key."""
    with MetadataClient((address,), timeout_s=CALL_TIMEOUT_S) as client:
        members = client.describe()["members"]
    return {item["control_address"]: f"{item['worker_id']}@{item['worker_epoch']}" for item in members}
