"""The Ray shell around the router core: feeds it the directory's news, answers clients. No decision lives here.

A restarted actor watches the metadata service again and is whole as soon as the first snapshot is in; what it had
learned comes from a file (`router.keeper`); what it had promised and recorded is gone, which costs accuracy, never a
request. Several routers of one cluster share nothing but what they hear (`router.peers`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ray

from kvpool.cluster.routers import first_asked
from kvpool.config import RouterConfig
from kvpool.errors import ConfigError, UnavailableError
from kvpool.hashing import Namespace, block_hashes
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.metrics import MetricsServer
from kvpool.plan import Route
from kvpool.reports import WorkerReport
from kvpool.request import NO_LIMITS, GenerateRequest
from kvpool.types import MemberInfo, MemberState, RequestId, WorkerKey
from kvpool.wallclock import unix_ns
from router.compiled import kernels
from router.core import RouterCore
from router.door import RequestMeta
from router.keeper import Keeper
from router.metrics import RouterCollector
from router.record import DecisionRecord
from router.signals import Features

MAX_CONCURRENT_CALLS = 1000
NO_METRICS = "not served; set router.metrics_port"
READY_POLL_S = 0.05
MAX_STRIPES = 4  # holders that one load may come from at once
READY_TIMEOUT_S = 60.0

log = logging.getLogger(__name__)


class ServedModel(Protocol):
    """What the router must know of the cluster; clients get the whole value from `RouterActor.info`."""

    @property
    def namespace(self) -> Namespace:
        """Namespace of block hashes, without a tenant."""

    @property
    def metadata(self) -> tuple[str, ...]:
        """Addresses of the metadata servers."""

    @property
    def routers(self) -> tuple[str, ...]:
        """Names of the routers."""


@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=MAX_CONCURRENT_CALLS)
class RouterActor:
    """One router. The core is guarded by a lock, since news comes on the watcher's thread.

    Args:
        config: its settings.
        info: what the cluster serves.
        cluster_dir: where to keep what was learned, if that directory exists on this node.
        name: of this router among those of the cluster.
    """

    def __init__(
        self, config: RouterConfig, info: ServedModel, cluster_dir: str | None = None, name: str = "router"
    ) -> None:
        kernels()  # before the first request: compiling takes seconds, once on a machine
        self._info = info
        self._name = name
        self._started_ns = unix_ns()
        self._lock = threading.Lock()
        self._watcher = MetadataWatcher(info.metadata, on_member=self._on_member, on_report=self._on_report, name=name)
        self._core = RouterCore(
            self._watcher,
            time.monotonic_ns,
            policy=config.policy,
            features=Features(split=True, stripes=MAX_STRIPES),
            max_records=config.max_records,
            router_id=f"{name}-{self._started_ns:x}",
            routers=len(info.routers),
        )
        directory = None if cluster_dir is None else Path(cluster_dir)
        self._metrics_note = ""
        self._metrics = self._serve_metrics(config)
        self._keeper = Keeper(directory, self._learned, self._core.restore, file_name=f"{name}-learned")
        self._watcher.start()

    def _serve_metrics(self, config: RouterConfig) -> MetricsServer | None:
        """A router whose port is taken routes all the same, and says so in ``kvpool status``."""
        if config.metrics_port is None:
            return None
        collector = RouterCollector(self._core, self._lock, self._watcher)
        try:
            server = MetricsServer(collector, config.metrics_host, config.metrics_port)
        except ConfigError as error:
            self._metrics_note = error.message
            log.warning("%s", error)
            return None
        self._metrics_note = f"http://{server.address}/metrics"
        return server

    def _learned(self) -> tuple[int, dict[str, Any]]:
        with self._lock:
            return self._core.learned()

    def _on_member(self, info: MemberInfo, state: MemberState | None) -> None:
        with self._lock:
            self._core.on_member_change(info, state)

    def _on_report(self, report: WorkerReport) -> None:
        with self._lock:
            self._core.on_report(report)

    async def ready(self, num_workers: int) -> None:
        """Wait until ``num_workers`` members are known.

        Raises:
            UnavailableError: they do not show up in time.
        """
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while len(self._watcher.members()) < num_workers:
            if time.monotonic() > deadline_s:
                known = len(self._watcher.members())
                raise UnavailableError(f"the router knows {known} of {num_workers} workers", timeout_s=READY_TIMEOUT_S)
            await asyncio.sleep(READY_POLL_S)

    async def info(self) -> ServedModel:
        """What the cluster serves."""
        return self._info

    async def route(self, request: GenerateRequest, exclude: frozenset[WorkerKey]) -> Route:
        """Choose a worker and a plan for a request, and reserve them.

        Raises:
            UnavailableError: no worker can take it now.
            OverloadError: its limits cannot be met.
            CapacityError: it should ask again after ``details["retry_after_s"]``.
        """
        started_ns = time.perf_counter_ns()
        namespace = self._info.namespace.for_tenant(request.tenant)
        context = request.prompt + request.generated
        chain = block_hashes(context, namespace)
        left = request.sampling.max_tokens - len(request.generated)
        limits = request.limits
        if request.generated:  # its first token has long come
            limits = replace(limits, ttft_ns=None) if limits.ttft_ns is not None else limits
        if limits == NO_LIMITS:
            limits = NO_LIMITS
        meta = RequestMeta(request.request_id, len(context), chain, left, exclude, limits, request.elapsed_ns)
        own = self._info.routers[first_asked(len(self._info.routers), request.request_id)]
        with self._lock:
            route = self._core.route(meta)
            tally = self._core.tally
            if own != self._name:
                tally.failovers["router"] += 1
            tally.decision_s.add((time.perf_counter_ns() - started_ns) / 1e9)
        return route

    async def release(self, request_id: RequestId, followed: bool = False) -> None:
        """Give back what a decision promised that nobody follows, since another router's answer came first, or that
        nobody goes on following (``followed``). May be repeated; fine when there is none."""
        with self._lock:
            (self._core.release if followed else self._core.give_back)(request_id)

    async def is_member(self, key: WorkerKey) -> bool:
        """False when the directory positively knows that this incarnation is gone; True when unsure."""
        return not self._watcher.connected or key in self._watcher.members()

    async def explain(self, request_id: RequestId) -> dict[str, Any]:
        """This router's newest decision about a request as data, and all of them as text under ``text``.

        Raises:
            RequestError: none is kept.
        """
        with self._lock:
            lines = self._core.explain(request_id)
            record = self._core.record(request_id)
        assert record is not None
        return {**_told(record, self._name, _clock_offset_ns()), "text": "\n".join(lines)}

    async def records(self) -> list[str]:
        """All kept decision records, oldest first, as JSON lines."""
        offset_ns = _clock_offset_ns()
        with self._lock:
            return [json.dumps(_told(record, self._name, offset_ns)) for record in self._core.records()]

    async def status(self) -> dict[str, Any]:
        """Counters, learned curves, and whether the directory is reachable."""
        with self._lock:
            status = self._core.status()
        return {
            **status,
            "learned": self._keeper.status(),
            "metadata": self._watcher.status(),
            "metrics": self._metrics_note or NO_METRICS,
        }

    async def audit(self) -> dict[str, str]:
        """For every member, a digest of the blocks that this router believes it holds; see `WorkerActor.audit`."""
        digests = await asyncio.to_thread(self._watcher.digests)
        return {str(key): digest for key, digest in digests.items()}

    async def pid(self) -> int:
        """Process id, for operators and fault injection."""
        return os.getpid()

    async def stop(self) -> None:
        """Stop watching, and save what was learned. May be repeated."""
        await asyncio.to_thread(self._watcher.close)
        await asyncio.to_thread(self._keeper.stop)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)


def _told(record: DecisionRecord, router: str, offset_ns: int) -> dict[str, Any]:
    """A record as others need it: whose it is, and when it was made on a clock that all nodes share."""
    return {**record.to_dict(), "router": router, "at_unix_ns": record.at_ns + offset_ns}


def _clock_offset_ns() -> int:
    return unix_ns() - time.monotonic_ns()
