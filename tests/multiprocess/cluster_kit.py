"""What cluster tests share: a running cluster with hands on its routes, and the plain model to compare with."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from kvpool.client import AsyncKVPoolClient
from kvpool.cluster.connection import ClusterInfo
from kvpool.cluster.guardian import cluster_processes
from kvpool.cluster.launcher import Cluster
from kvpool.cluster.manual import ManualRouter
from kvpool.cluster.routers import is_router
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.plan import Route
from kvpool.request import GenerateRequest, GenerateResult, RequestStats, SamplingParams, TokenLogprobs
from kvpool.types import MemberState, RequestId, WorkerId

_numbers = itertools.count()


class ClusterKit:
    """A cluster under test. Made inside a fixture, closed by it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.loop = asyncio.new_event_loop()
        self.connection = cluster.connection()
        self.client = AsyncKVPoolClient.of(self.connection)
        self.info: ClusterInfo = self.run(self.connection.info())
        self.watcher = MetadataWatcher(self.info.metadata)
        self.watcher.start()
        assert self.watcher.wait_ready(10.0)
        self.routes = ManualRouter(self.watcher, self.info.namespace)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end on the kit's loop."""
        return self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        """End the cluster."""
        self.watcher.close()
        self.cluster.close()
        self.loop.close()

    def request(self, prompt: Sequence[int], **sampling: Any) -> GenerateRequest:
        """A request with an id of its own."""
        return GenerateRequest(RequestId(f"t-{next(_numbers)}"), tuple(prompt), SamplingParams(**sampling))

    async def follow(self, route: Route, request: GenerateRequest) -> Served:
        """Send a request along a given route, as the client does after the router has answered."""
        served = Served()
        async for chunk in self.connection.stream(route, request, 60.0):
            served.tokens += chunk.tokens
            served.logprobs += chunk.logprobs
            served.stats = chunk.stats or served.stats
        return served

    async def gather(self, coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        """All at once; results in order."""
        return list(await asyncio.gather(*coroutines))

    def warm(self, worker_id: WorkerId, prompt: Sequence[int]) -> None:
        """Make a worker hold the full blocks of ``prompt``."""
        request = self.request(prompt, max_tokens=1)
        self.run(self.follow(self.routes.redo(request.request_id, worker_id), request))
        self.routes.wait_held(worker_id, request.prompt, len(prompt) // self.info.namespace.block_tokens)

    def generate(self, prompt: Any, **options: Any) -> GenerateResult:
        """Through the client, the router and whatever they choose."""
        result: GenerateResult = self.run(self.client.generate(prompt, **options))
        return result

    def status(self) -> dict[str, Any]:
        """`kvpool status`."""
        status: dict[str, Any] = self.run(self.client.status())
        return status

    def all_serve(self, count: int) -> bool:
        """Whether ``count`` workers answer, and watcher and router know exactly these incarnations."""
        status = self.status()
        answering = {item.get("key") for item in status["workers"].values()}
        members = {str(key) for key, member in self.watcher.members().items() if member.state is MemberState.ALIVE}
        known = {item["worker"] for item in status["router"].get("workers", []) if item["state"] == "alive"}
        return len(answering) == count and answering == members == known

    def pid_of(self, actor: str) -> int:
        """Process id of a worker or a router of this cluster."""
        kind = "RouterActor" if is_router(actor) else "WorkerActor"
        pid: int = self.run(self.connection.call(actor, "pid"))
        assert kind in psutil.Process(pid).cmdline()[0]
        return pid

    def signal(self, actor: str, number: signal.Signals) -> int:
        """Send a real signal to an actor's process."""
        pid = self.pid_of(actor)
        os.kill(pid, number)
        return pid


class Served:
    """What a followed route delivered."""

    def __init__(self) -> None:
        self.tokens: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.stats: RequestStats | None = None


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until true; fails the test, naming ``what``, when it does not become true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def free_ports(count: int) -> int:
    """The first of ``count`` neighbouring ports that are free, as far as anybody can know."""
    while True:
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(count)]
            probes[0].bind(("127.0.0.1", 0))
            first = int(probes[0].getsockname()[1])
            try:
                for number, probe in enumerate(probes[1:], start=1):
                    probe.bind(("127.0.0.1", first + number))
            except (OSError, OverflowError):
                continue
            return first


def processes_of(cluster_dir: str) -> list[str]:
    """Command lines of processes that belong to a cluster directory."""
    found = []
    for process in cluster_processes(Path(cluster_dir)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(process.cmdline())[:120])
    return found
