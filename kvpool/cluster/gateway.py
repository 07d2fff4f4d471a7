"""Starts and stops the HTTP gateway on Ray Serve. Ray Serve is imported only when a gateway is asked for."""

from __future__ import annotations

import socket

from kvpool.config import GatewayConfig
from kvpool.errors import ConfigError, UnavailableError


def _application(cluster: str) -> str:
    return f"kvpool-{cluster}"


def start_gateway(config: GatewayConfig, cluster: str) -> None:
    """Serve the API of ``cluster`` on the configured port.

    Raises:
        ConfigError: the port is in use.
        UnavailableError: Ray Serve did not start.
    """
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation

    from router.gateway import Gateway

    assert config.port is not None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"gateway port {config.port} on {config.host} cannot be bound ({error.strerror}); choose another "
                "gateway.port",
                field="gateway.port",
            ) from error
    try:
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host=config.host, port=config.port))
        application = Gateway.bind(cluster)  # type: ignore[attr-defined]
        serve.run(application, name=_application(cluster), route_prefix="/")
    except (RuntimeError, TimeoutError, ValueError) as error:
        raise UnavailableError(f"the gateway did not start: {error}") from error


def stop_gateway(cluster: str) -> None:
    """Stop serving ``cluster``; Ray Serve itself ends with its last application's cluster. May be repeated."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        serve.delete(_application(cluster))
        if not serve.status().applications:
            serve.shutdown()
    except (RuntimeError, TimeoutError, ValueError, RayServeException, RayError):
        return  # the controller is gone, and what it served with it
