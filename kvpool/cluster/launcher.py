"""Starts a whole cluster and ends it: metadata servers, Ray, the routers and the workers.

By default Ray is an embedded local one that lives and dies with this process; with ``ray_address`` the actors are
placed on a running Ray cluster, which is left running. Whatever happens, `Cluster.close` leaves no process, port,
shared-memory segment or temp file; if the launcher is killed, the guardian process does the same.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvpool.cluster.connection import (
    ClusterConnection,
    ClusterInfo,
    be_quiet,
    connect_ray,
    map_ray_error,
    namespace_of,
)
from kvpool.cluster.gateway import require_free_port, start_gateway, stop_gateway
from kvpool.cluster.guardian import reap, spawn_guardian
from kvpool.cluster.nodes import ExtraNode
from kvpool.cluster.processes import MetadataProcesses
from kvpool.cluster.ray_auth import provide_token
from kvpool.cluster.routers import router_name
from kvpool.cluster.state import DEFAULT_NAME
from kvpool.config import ClusterConfig, RouterConfig, WorkerConfig
from kvpool.errors import ConfigError, KVPoolError, UnavailableError
from kvpool.interrupts import at_hard_end
from kvpool.types import WorkerId
from kvpool.wallclock import CLUSTER_DIR_VARIABLE
from router.actor import RouterActor
from router.policies import make_policy
from workers.actor import WorkerActor
from workers.assemble import WorkerReady, WorkerSpec
from workers.engine.models import ResolvedModel, resolve_model

OBJECT_STORE_BYTES = 128 * 1024 * 1024  # control messages and tokens only; blocks never go through it
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 10.0
HARD_GRACE_S = 1.0
"""What processes have to end by themselves when the user has interrupted twice."""

QUIET_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Several engines share the cores here: an OpenMP thread that spins at a barrier takes the core from the one it waits
for. Measured under load, spinning made two-threaded decoding 3.5 times slower."""

Progress = Callable[[str], None]


def _silent(_: str) -> None:
    return


@dataclass
class _Launched:
    """What was started so far, in order, so that `close` can undo a half-made start."""

    cluster_dir: Path
    guardian: subprocess.Popen[bytes]
    metadata: MetadataProcesses | None = None
    owns_ray: bool = False
    gateway: bool = False
    nodes: list[ExtraNode] = field(default_factory=list)
    routers: dict[str, Any] = field(default_factory=dict)
    workers: dict[WorkerId, Any] | None = None
    placed: Iterator[int] = field(default_factory=itertools.count)


class Cluster:
    """A running cluster, owned by this process. Create with `Cluster.start`; `close` may be repeated."""

    def __init__(self, config: ClusterConfig, name: str, launched: _Launched) -> None:
        self.config = config
        self.name = name
        self._launched = launched
        self._closed = False
        self._pid = os.getpid()
        self._model: ResolvedModel | None = None
        self._forget = at_hard_end(partial(reap, launched.cluster_dir, grace_s=HARD_GRACE_S))
        atexit.register(self.close)

    @classmethod
    def start(
        cls,
        config: ClusterConfig,
        *,
        ray_address: str | None = None,
        name: str = DEFAULT_NAME,
        ray_nodes: int = 1,
        progress: Progress = _silent,
    ) -> Cluster:
        """Start everything and wait until every worker serves.

        Args:
            config: the settings.
            ray_address: a running Ray cluster (``host:port``); None starts an embedded one.
            name: namespace of the actors, so that several clusters can share a Ray cluster.
            ray_nodes: nodes of an embedded Ray cluster, all on this machine.
            progress: called with one line before each step.

        Raises:
            ConfigError: settings contradict each other or a port is in use.
            ModelError: the model is unknown or not supported.
            IncompatibleError: two workers have different layouts.
            UnavailableError: something did not start in time.
        """
        _require_one_layout(config)
        make_policy(config.router.policy)  # names the nearest, before anything is started
        if ray_address is None:  # elsewhere it is Ray's head that binds it
            _require_free_ports(config)
        progress(f"model {config.workers[0].engine.model}: resolving")
        model = resolve_model(config.workers[0].engine.model, report=progress)
        cluster_dir = Path(tempfile.mkdtemp(prefix="kvpool-"))
        try:
            guardian = spawn_guardian(cluster_dir)
        except BaseException:
            shutil.rmtree(cluster_dir, ignore_errors=True)
            raise
        cluster = cls(config, name, _Launched(cluster_dir, guardian))
        cluster._model = model
        try:
            cluster._start(ray_address, ray_nodes, progress)
        except BaseException:
            cluster.close()
            raise
        return cluster

    @property
    def address(self) -> str:
        """Ray address that clients connect to."""
        return str(ray.get_runtime_context().gcs_address)

    @property
    def cluster_dir(self) -> Path:
        """Temporary files and logs; removed by `close`."""
        return self._launched.cluster_dir

    @property
    def metadata(self) -> MetadataProcesses:
        """The metadata servers."""
        assert self._launched.metadata is not None
        return self._launched.metadata

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Names of the workers, in order."""
        return tuple(self._launched.workers or ())

    def connection(self) -> ClusterConnection:
        """A connection for clients in this process."""
        return ClusterConnection(self.name)

    def add_workers(self, group: WorkerConfig) -> tuple[WorkerId, ...]:
        """Start more workers and wait until they serve; the running ones are not disturbed.

        Raises:
            IncompatibleError: their layout differs from the pool's; none of them stays.
        """
        workers = self._launched.workers
        assert workers is not None
        created = {worker_id: self._create_worker(worker_id, group) for worker_id in self._new_ids(group.count)}
        try:
            _wait_ready(created)
        except BaseException:
            for actor in created.values():
                ray.kill(actor)
            raise
        workers.update(created)
        return tuple(created)

    @property
    def nodes(self) -> list[ExtraNode]:
        """Ray nodes besides the head's; those that were killed are taken out by whoever killed them."""
        return self._launched.nodes

    def add_node(self) -> ExtraNode:
        """One more Ray node on this machine.

        Raises:
            UnavailableError: it did not join in time.
        """
        node = ExtraNode(
            self.address,
            self.cluster_dir,
            num_cpus=max(4, os.cpu_count() or 1),
            object_store_bytes=OBJECT_STORE_BYTES,
        )
        self._launched.nodes.append(node)
        return node

    def close(self) -> None:
        """End everything that was started; waits at most about half a minute.

        A step that fails or is interrupted does not keep the later ones from running. In a forked child nothing is
        ended: the cluster belongs to the process that started it.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        launched = self._launched
        with contextlib.ExitStack() as steps:  # the last one first
            steps.callback(self._forget)
            steps.callback(shutil.rmtree, launched.cluster_dir, ignore_errors=True)
            steps.callback(_end_guardian, launched.guardian)
            steps.callback(reap, launched.cluster_dir)
            if launched.metadata is not None:
                steps.callback(launched.metadata.close)
            if ray.is_initialized():
                if launched.owns_ray:
                    steps.callback(ray.shutdown)
                for node in launched.nodes:
                    steps.callback(node.kill)
                steps.callback(_stop_actors, [*(launched.workers or {}).values(), *launched.routers.values()])
                if launched.gateway:
                    steps.callback(stop_gateway, self.name)

    def _start(self, ray_address: str | None, ray_nodes: int, progress: Progress) -> None:
        launched = self._launched
        before = {name: os.environ.get(name) for name in (CLUSTER_DIR_VARIABLE, *QUIET_THREADS)}
        os.environ[CLUSTER_DIR_VARIABLE] = str(launched.cluster_dir)
        for name, value in QUIET_THREADS.items():
            os.environ.setdefault(name, value)
        try:
            progress(f"metadata service: starting {self.config.metadata.replicas}")
            launched.metadata = MetadataProcesses(self.config.metadata, launched.cluster_dir)
            launched.metadata.start()
            progress("ray: " + (f"connecting to {ray_address}" if ray_address else "starting an embedded cluster"))
            launched.owns_ray = _start_ray(ray_address, launched.cluster_dir)
            for _ in range(ray_nodes - 1 if launched.owns_ray else 0):
                self.add_node()
        finally:
            for name, old in before.items():
                if old is None:
                    os.environ.pop(name, None)
        progress(f"workers: starting {self.config.num_workers} (each loads the model)")
        launched.workers = {}
        for group in self.config.workers:
            for worker_id in self._new_ids(group.count):
                launched.workers[worker_id] = self._create_worker(worker_id, group)
        ready = _wait_ready(launched.workers)
        progress(f"router: starting {self.config.router.count} (the first on a machine compiles for some seconds)")
        self._start_routers(ready)
        if self.config.gateway.port is not None:
            progress(f"gateway: starting on port {self.config.gateway.port}")
            launched.gateway = True
            start_gateway(self.config.gateway, self.name)
        progress("ready")

    def _new_ids(self, count: int) -> list[WorkerId]:
        taken = len(self._launched.workers or ())
        return [WorkerId(f"worker-{index}") for index in range(taken, taken + count)]

    def _create_worker(self, worker_id: WorkerId, group: WorkerConfig) -> Any:
        assert self._model is not None
        threads = group.engine.torch_threads or max(1, (os.cpu_count() or 1) // self.config.num_workers)
        spec = WorkerSpec(
            worker_id=worker_id,
            config=group,
            metadata=self.metadata.addresses,
            threads=threads,
        )
        # Ray's decorator adds `options` at run time; its types do not say so.
        options = WorkerActor.options(  # type: ignore[attr-defined]
            name=str(worker_id), namespace=namespace_of(self.name), **_placement(next(self._launched.placed))
        )
        return options.remote(spec)

    def _start_routers(self, ready: list[WorkerReady]) -> None:
        """Start all and wait until each knows every worker."""
        assert self._model is not None
        names = tuple(router_name(number) for number in range(self.config.router.count))
        info = ClusterInfo(
            model=self._model.name,
            max_context_tokens=min(item.max_context_tokens for item in ready),
            namespace=ready[0].namespace,
            metadata=self.metadata.addresses,
            workers=self.worker_ids,
            routers=names,
            metadata_metrics=self.metadata.metrics,
        )
        for number, name in enumerate(names):
            options = RouterActor.options(  # type: ignore[attr-defined]
                name=name, namespace=namespace_of(self.name), **_placement(number)
            )
            self._launched.routers[name] = options.remote(
                _router_config(self.config.router, number), info, str(self.cluster_dir), name
            )
        known = {name: actor.ready.remote(len(ready)) for name, actor in self._launched.routers.items()}
        for name, reference in known.items():
            _get(reference, name, READY_TIMEOUT_S)


def _end_guardian(guardian: subprocess.Popen[bytes]) -> None:
    assert guardian.stdin is not None
    guardian.stdin.close()
    try:
        guardian.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.wait(STOP_TIMEOUT_S)


def _require_free_ports(config: ClusterConfig) -> None:
    require_free_port(config.gateway.host, config.gateway.port, "gateway.port")
    if config.router.metrics_port is not None:
        for number in range(config.router.count):
            require_free_port(config.router.metrics_host, config.router.metrics_port + number, "router.metrics_port")


def _router_config(config: RouterConfig, number: int) -> RouterConfig:
    """The settings of one of the routers: each has a port of its own for metrics."""
    if config.metrics_port is None:
        return config
    return config.model_copy(update={"metrics_port": config.metrics_port + number})


def _require_one_layout(config: ClusterConfig) -> None:
    first = config.workers[0].engine
    for index, group in enumerate(config.workers):
        for name in ("model", "dtype", "block_tokens"):
            ours, theirs = getattr(first, name), getattr(group.engine, name)
            if ours != theirs:
                raise ConfigError(
                    f"workers.0.engine.{name} is {ours!r} but workers.{index}.engine.{name} is {theirs!r}; "
                    "all workers of a pool share one layout, so make them equal or start two clusters"
                )


def _start_ray(address: str | None, cluster_dir: Path) -> bool:
    """Connect or start; True when this process owns the Ray cluster."""
    if address is not None:
        connect_ray(address)
        return False
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    be_quiet()
    provide_token()
    try:
        ray.init(
            num_cpus=max(4, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(cluster_dir / "ray"),
        )
    except Exception as error:  # Ray says in a bare Exception that a busy machine was too slow for it
        raise UnavailableError(f"the embedded Ray cluster did not start: {error}") from error
    return True


def _placement(number: int) -> dict[str, Any]:
    """Options that put the ``number``-th actor of its kind on every node in turn, this one first.

    Ray places actors that reserve nothing by chance whatever is asked for, at times all of them on one node, so they
    reserve a byte. An actor that dies is started again on its node, where its files are; when that is dead, elsewhere.
    """
    own = ray.get_runtime_context().get_node_id()
    alive = sorted((node["NodeID"] for node in ray.nodes() if node["Alive"]), key=lambda name: (name != own, name))
    return {"memory": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(alive[number % len(alive)], soft=True)}


def _wait_ready(workers: dict[WorkerId, Any]) -> list[WorkerReady]:
    """Wait until every worker serves."""
    references = {worker_id: actor.ready.remote() for worker_id, actor in workers.items()}
    return [_get(reference, str(worker_id), READY_TIMEOUT_S) for worker_id, reference in references.items()]


def _get(reference: Any, what: str, timeout_s: float) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except (KVPoolError, ray.exceptions.RayError) as error:
        raise map_ray_error(error, what) from error


def _stop_actors(actors: list[Any]) -> None:
    """Ask each to stop (leave, fence its transfers), then kill it."""
    actors = [actor for actor in actors if actor is not None]
    references = []
    for actor in actors:
        try:
            references.append(actor.stop.remote())
        except ray.exceptions.RayError:
            continue  # already dead
    if references:
        with contextlib.suppress(ray.exceptions.RayError):  # what does not stop in time is killed next
            ray.wait(references, num_returns=len(references), timeout=STOP_TIMEOUT_S)
    for actor in actors:
        try:
            ray.kill(actor)
        except ray.exceptions.RayError:
            continue
