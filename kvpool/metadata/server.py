"""The metadata service as a process: ``python -m kvpool.metadata.server``.

Prints one JSON line ``{"address": "HOST:PORT"}`` on stdout when it answers, with ``"metrics"`` when those are served;
logs to stderr; ends with code 0 on SIGTERM and SIGINT, and, with ``--exit-with-parent``, when its stdin ends. Wrong
arguments and a port in use end it with code 2 and a message that says what to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from prometheus_client.core import Metric

from kvpool.errors import ConfigError
from kvpool.metadata.membership import DirectoryLimits
from kvpool.metadata.metrics import LoopCollector, gauge, metrics_of
from kvpool.metadata.rpc import SERVER_OPTIONS
from kvpool.metadata.security import Security
from kvpool.metadata.service import SERVICE_NAME, MetadataService, handlers
from kvpool.metadata.state import DirectoryState
from kvpool.metadata.v1 import metadata_pb2
from kvpool.metrics import MetricsServer
from kvpool.wallclock import unix_ns

EXIT_BAD_INPUT = 2
GRACE_S = 0.5
MAX_PORT = 65_535

log = logging.getLogger("kvpool.metadata.server")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen (port 0 picks a free one), the directory's bounds, whether to end with the parent, the port of
    Prometheus metrics, None for none, and how often whoever watches over this server has started it again."""

    host: str
    port: int
    limits: DirectoryLimits
    exit_with_parent: bool = False
    metrics_port: int | None = None
    restarts: int = 0


class MetadataServer:
    """A running service inside an event loop: `start`, then `stop`."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._security = Security.from_environment()
        # Later incarnations must have larger numbers; wall-clock nanoseconds are, without anything stored.
        state = DirectoryState(unix_ns(), options.limits, time.monotonic_ns())
        self.service = MetadataService(state, restarts=options.restarts)
        self._server: grpc.aio.Server | None = None
        self._clock: asyncio.Task[None] | None = None
        self._metrics: MetricsServer | None = None
        self.address = ""
        self.metrics_address: str | None = None

    async def start(self) -> None:
        """Listen and answer.

        Raises:
            ConfigError: the address cannot be bound.
        """
        server = grpc.aio.server(options=list(SERVER_OPTIONS), interceptors=self._security.interceptors())
        server.add_generic_rpc_handlers((handlers(self.service),))
        checks = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        assert metadata_pb2.DESCRIPTOR.services_by_name["MetadataService"].full_name == SERVICE_NAME
        reflection.enable_server_reflection(names, server)
        host, port = self._options.host, self._options.port
        try:
            bound = self._security.bind(server, f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: the port is in use or the host is not an address of this machine; "
                "choose another port (metadata.port, --port), or 0 for a free one",
                host=host,
                port=port,
            ) from error
        await server.start()
        for name in ("", SERVICE_NAME):
            await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._server, self.address = server, f"{host}:{bound}"
        self._clock = asyncio.create_task(self.service.run())
        if self._options.metrics_port is not None:
            loop = asyncio.get_running_loop()
            self._metrics = MetricsServer(LoopCollector(self._collect, loop), host, self._options.metrics_port)
            self.metrics_address = self._metrics.address

    def _collect(self) -> list[Metric]:
        service = self.service
        return [
            *metrics_of(service.state),
            gauge("restarts", "How often this server was started again", self._options.restarts),
            gauge("watchers", "Watch streams", service.watchers),
            gauge("watch_queue_events", "Events waiting for the slowest watcher", service.longest_watch_queue),
        ]

    async def wait(self, ended: asyncio.Event) -> None:
        """Serve until ``ended``.

        Raises:
            InvariantViolation: the service's own bug.
        """
        assert self._clock is not None
        waiter = asyncio.create_task(ended.wait())
        await asyncio.wait({waiter, self._clock}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self._clock.done():
            clock, self._clock = self._clock, None
            clock.result()

    async def stop(self) -> None:
        """End streams, calls and the clock. May be repeated."""
        self.service.close()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
            self._metrics = None
        if self._server is not None:
            await self._server.stop(GRACE_S)
        if self._clock is not None:
            await self._clock


def parse_options(arguments: Sequence[str]) -> ServerOptions:
    """Read the command line; argparse ends the process with code 2 and a message when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.metadata.server", description="kvpool metadata service")
    limits = DirectoryLimits()
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=int, default=0, help="port to bind; 0 picks a free one")
    parser.add_argument(
        "--lease-ms", type=int, default=limits.lease_ns // 10**6, help="how long a member lives without a heartbeat"
    )
    parser.add_argument(
        "--max-entries", type=int, default=limits.max_entries, help="bound on (block, worker) entries of the index"
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="end when stdin ends")
    parser.add_argument("--metrics-port", type=int, default=None, help="serve Prometheus metrics here; 0: a free one")
    parser.add_argument("--restarts", type=int, default=0, help="how often this server was started again; to be told")
    options = parser.parse_args(arguments)
    if not 0 <= (options.metrics_port or 0) <= MAX_PORT:
        parser.error(f"--metrics-port must be in [0, {MAX_PORT}], got {options.metrics_port}")
    if not 0 <= options.port <= MAX_PORT:
        parser.error(f"--port must be in [0, {MAX_PORT}], got {options.port}")
    if options.lease_ms < 100:
        parser.error(f"--lease-ms must be at least 100, got {options.lease_ms}")
    if options.max_entries < 1:
        parser.error(f"--max-entries must be at least 1, got {options.max_entries}")
    limits = DirectoryLimits(lease_ns=options.lease_ms * 10**6, max_entries=options.max_entries)
    return ServerOptions(
        options.host, options.port, limits, options.exit_with_parent, options.metrics_port, options.restarts
    )


async def serve(options: ServerOptions) -> None:
    """Serve until a signal or the parent's end.

    Raises:
        ConfigError: the address cannot be bound.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    server = MetadataServer(options)
    try:
        await server.start()
    except ConfigError:
        await server.stop()
        raise
    if options.exit_with_parent:
        loop.add_reader(sys.stdin.fileno(), lambda: _on_stdin(loop, ended))
    ready = {"address": server.address}
    if server.metrics_address is not None:
        ready["metrics"] = server.metrics_address
    print(json.dumps(ready), flush=True)
    log.info("serving on %s, directory epoch %d", server.address, server.service.state.directory_epoch)
    try:
        await server.wait(ended)
    finally:
        await server.stop()


def _on_stdin(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        ended.set()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    try:
        asyncio.run(serve(options))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
