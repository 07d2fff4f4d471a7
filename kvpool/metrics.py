"""Serves Prometheus metrics over HTTP, from a thread that asks a collector whenever it is scraped.

What is counted lives with whoever counts; nothing there knows of metrics.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from kvpool.errors import ConfigError

JOIN_S = 5.0


class MetricsServer:
    """Serves until `close`.

    Args:
        collector: asked on the server's thread, once per scrape.
        host: address to bind.
        port: port to bind; 0 picks a free one.

    Raises:
        ConfigError: the port cannot be bound.
    """

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another port (--metrics-port)",
                host=host,
                port=port,
            ) from error
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(JOIN_S)
