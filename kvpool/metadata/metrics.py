"""Prometheus metrics of the metadata service: one collector that reads the state when it is scraped.

Nothing in the state knows of metrics. Labels are states, tiers and nothing that grows with the cluster: a label per
worker would make the metrics as large as the index.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool.errors import ConfigError
from kvpool.metadata.state import DirectoryState
from kvpool.types import MemberState, Tier

PREFIX = "kvpool_metadata_"
SCRAPE_TIMEOUT_S = 5.0

_HELP = {
    "joins": "Workers that joined",
    "leaves": "Workers that left of themselves",
    "expired": "Workers whose membership lease ended",
    "replaced": "Workers replaced by a newer epoch",
    "fenced": "Calls refused because of an old epoch",
    "incompatible": "Joins refused because of another layout or hash scheme",
    "suspects": "Suspicions started",
    "suspects_ignored": "Reports about workers that were suspected already",
    "restored": "Suspicions ended by probe and back-off",
    "batches": "Event batches applied",
    "duplicate_batches": "Event batches that had been applied before",
    "gaps": "Gaps in event streams",
    "snapshots": "Block snapshots begun",
    "stored_blocks": "Entries added",
    "removed_blocks": "Entries removed",
    "refused_blocks": "Blocks refused at the bound of the index",
    "reports": "Worker reports relayed",
    "lookups": "Lookups answered",
    "watchers_dropped": "Watchers that were too slow and started over",
}


class DirectoryCollector(Collector):
    """Reads the state on its own event loop, at most once per scrape."""

    def __init__(self, state: DirectoryState, loop: asyncio.AbstractEventLoop) -> None:
        self._state = state
        self._loop = loop

    def describe(self) -> list[Metric]:
        """Nothing in advance: registering must not wait for the loop it happens on."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of this moment; called by the exporter's thread."""
        yield from asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(SCRAPE_TIMEOUT_S)

    async def _read(self) -> list[Metric]:
        return list(metrics_of(self._state))


def metrics_of(state: DirectoryState) -> Iterator[Metric]:
    """The metrics of a state."""
    index = state.index
    for name, value in asdict(state.counters).items():
        yield CounterMetricFamily(PREFIX + name, _HELP[name], value=value)
    gauges: dict[str, tuple[str, float]] = {
        "entries": ("(block, worker, tier) entries, those of departed workers included until swept", index.entries),
        "max_entries": ("Bound on entries", state.limits.max_entries),
        "blocks": ("Different blocks", index.blocks),
        "unknown_removals": ("Removals of blocks that were not known", index.unknown_removals),
        "resident_bytes": ("Resident memory of the process", resident_bytes()),
    }
    for name, (text, number) in gauges.items():
        yield GaugeMetricFamily(PREFIX + name, text, value=number)
    members = GaugeMetricFamily(PREFIX + "members", "Members by state", labels=["state"])
    held = GaugeMetricFamily(PREFIX + "held_blocks", "Blocks of members by tier", labels=["tier"])
    states = [member.state for member in state.members()]
    counts = [index.counts(member.info.key) for member in state.members()]
    for kind in MemberState:
        members.add_metric([kind.value], states.count(kind))
    for tier in Tier:
        held.add_metric([tier.name.lower()], sum(count[tier] for count in counts))
    yield members
    yield held


def resident_bytes() -> int:
    """Resident memory of this process; 0 where ``/proc`` does not tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


class MetricsServer:
    """Serves the metrics over HTTP from a thread; `close` when done.

    Raises:
        ConfigError: the port cannot be bound.
    """

    def __init__(self, state: DirectoryState, loop: asyncio.AbstractEventLoop, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(DirectoryCollector(state, loop))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another --metrics-port",
                host=host,
                port=port,
            ) from error
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
