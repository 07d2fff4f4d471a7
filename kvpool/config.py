"""Settings of a cluster: one frozen tree, read from TOML or built in code, every unknown key refused by name."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvpool.errors import ConfigError
from kvpool.types import Role

DEFAULT_MODEL = "smollm2-135m-instruct"
MAX_ROUTERS = 8
MAX_METRICS_PORT = 65535 - MAX_ROUTERS + 1


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(_Settings):
    """One worker's engine.

    Attributes:
        model: name of a bundled model, local path, or hub id.
        dtype: dtype of weights and KV.
        device: torch device.
        block_tokens: tokens per block.
        num_blocks: blocks in the worker's segment.
        torch_threads: intra-op threads; None shares the cores between the workers.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "float32"
    device: str = "cpu"
    block_tokens: int = Field(default=16, ge=1, le=1024)
    num_blocks: int = Field(default=1024, ge=1)
    torch_threads: int | None = Field(default=None, ge=1)


class SchedulerConfig(_Settings):
    """Limits of one worker's batches.

    Attributes:
        max_step_tokens: tokens computed per step; long prefills are cut into chunks of at most this.
        mixed_prefill_tokens: prefill tokens in a step that also decodes, so that a long prompt does not hold up
            running answers for longer than this takes.
        max_running: sequences in prefill or decode at once.
        max_waiting: admitted requests that wait; more are refused with `CapacityError`.
    """

    max_step_tokens: int = Field(default=512, ge=1)
    mixed_prefill_tokens: int = Field(default=256, ge=1)
    max_running: int = Field(default=8, ge=1)
    max_waiting: int = Field(default=256, ge=1)


class StoreConfig(_Settings):
    """The memory of one worker.

    Attributes:
        tenant_quotas: tenant → most blocks of a segment it may have while it has others of its own to evict. ``"*"``
            stands for every tenant that is not named; requests without a tenant have the quota of ``""``.
        keep_share: largest part of the segment that ``kvpool pin`` may protect from eviction.
        device_blocks: blocks that lie in the engine's memory as well, at most ``num_blocks``; 0 for no device
            tier. On a CPU it only doubles memory.
        disk_path: directory for blocks that leave memory; every worker has its own below it. None for no disk tier.
        disk_bytes: most bytes that one worker keeps there.
    """

    tenant_quotas: dict[str, Annotated[int, Field(ge=1)]] = {}
    keep_share: float = Field(default=0.25, ge=0, le=1)
    device_blocks: int = Field(default=0, ge=0)
    disk_path: str | None = None
    disk_bytes: int = Field(default=16 << 30, ge=1)


class WorkerConfig(_Settings):
    """One group of equal workers."""

    count: int = Field(default=3, ge=1)
    role: Role = Role.MIXED
    transport: str = "ucx"
    engine: EngineConfig = EngineConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    store: StoreConfig = StoreConfig()

    @model_validator(mode="after")
    def _device_within_host(self) -> WorkerConfig:
        if self.store.device_blocks > self.engine.num_blocks:
            raise ValueError(
                f"store.device_blocks is {self.store.device_blocks} and engine.num_blocks {self.engine.num_blocks}: "
                "device memory holds copies of the segment's blocks, so lower the first or raise the second"
            )
        return self


class MetadataConfig(_Settings):
    """The metadata service.

    Attributes:
        replicas: server processes the launcher starts.
        host: address they bind.
        port: first port; 0 picks free ones.
        lease_ms: how long a member lives without a heartbeat.
        max_entries: bound on (block, worker) entries of the index.
        metrics_port: of the first replica's Prometheus metrics, the next ones follow; None serves none.
    """

    replicas: int = Field(default=1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    lease_ms: int = Field(default=3000, ge=100)
    max_entries: int = Field(default=10_000_000, ge=1)
    metrics_port: int | None = Field(default=None, ge=1, le=65535)


class RouterConfig(_Settings):
    """The routers.

    Attributes:
        count: how many there are; clients spread their requests over them.
        policy: name of the routing policy (`router.policies`).
        max_records: decision records that each keeps in memory; the oldest leave first.
        metrics_port: of the first router's Prometheus metrics, the next ones follow; None serves none.
        metrics_host: address they bind, on whichever node a router runs; for a Prometheus elsewhere ``0.0.0.0``.
    """

    count: int = Field(default=1, ge=1, le=MAX_ROUTERS)
    policy: str = "kvpool"
    max_records: int = Field(default=10_000, ge=1)
    metrics_port: int | None = Field(default=None, ge=1, le=MAX_METRICS_PORT)
    metrics_host: str = "127.0.0.1"


class GatewayConfig(_Settings):
    """The OpenAI-compatible HTTP ingress.

    Attributes:
        host: address it binds.
        port: its port; None starts no gateway.
        max_requests: generations at once, those that wait at the router included and whatever their priority; more
            are refused with 429. How to size it: docs/http-api.md, "How many at once".
    """

    host: str = "127.0.0.1"
    port: int | None = Field(default=None, ge=1, le=65535)
    max_requests: int = Field(default=1024, ge=1)


class ClusterConfig(_Settings):
    """A whole cluster."""

    workers: tuple[WorkerConfig, ...] = (WorkerConfig(),)
    metadata: MetadataConfig = MetadataConfig()
    router: RouterConfig = RouterConfig()
    gateway: GatewayConfig = GatewayConfig()

    @model_validator(mode="after")
    def _one_model(self) -> ClusterConfig:
        if not self.workers:
            raise ValueError("workers: at least one group is needed")
        return self

    @model_validator(mode="after")
    def _different_metrics_ports(self) -> ClusterConfig:
        ours, theirs = self.router, self.metadata
        if ours.metrics_port is None or theirs.metrics_port is None:
            return self
        routers = range(ours.metrics_port, ours.metrics_port + ours.count)
        servers = range(theirs.metrics_port, theirs.metrics_port + theirs.replicas)
        if set(routers) & set(servers):
            raise ValueError(
                f"router.metrics_port and metadata.metrics_port overlap: every router and every replica has a port of "
                f"its own, {routers[0]} to {routers[-1]} and {servers[0]} to {servers[-1]}; move one of them"
            )
        return self

    @property
    def num_workers(self) -> int:
        """Workers of all groups."""
        return sum(group.count for group in self.workers)


def load_config(path: Path) -> ClusterConfig:
    """Read a TOML file.

    Raises:
        ConfigError: the file is missing, is not TOML, or a key is unknown or out of range; the message names it.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested without end
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return parse_config(data)


def parse_config(data: dict[str, Any]) -> ClusterConfig:
    """Build the settings from plain data.

    Raises:
        ConfigError: a key is unknown or a value out of range; the message names it and the nearest known key.
    """
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item) for item in error.errors())) from error


def _explain(item: Any) -> str:
    place = ".".join(str(part) for part in item["loc"])
    if item["type"] != "extra_forbidden":
        return f"{place}: {item['msg']}, got {item['input']!r}"
    known = _known_keys()
    near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
    return f"unknown setting {place!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _known_keys() -> list[str]:
    kinds = (
        *(ClusterConfig, WorkerConfig, EngineConfig, SchedulerConfig, StoreConfig),
        *(MetadataConfig, RouterConfig, GatewayConfig),
    )
    return sorted({key for kind in kinds for key in kind.model_fields})
