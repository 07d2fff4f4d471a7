"""Starts and stops the HTTP gateway on Ray Serve. Ray Serve is imported only when a gateway is asked for.

Ray Serve has one HTTP port per Ray cluster, so a Ray cluster has one gateway.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from kvpool.config import GatewayConfig
from kvpool.errors import ConfigError, UnavailableError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


def _application(cluster: str) -> str:
    return f"kvpool-{cluster}"


def require_free_port(host: str, port: int | None, field: str) -> None:
    """Check that a port can be had, before anything expensive is started; None is no port.

    Raises:
        ConfigError: the port is in use, or the host is not an address of this machine; names the setting ``field``.
    """
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be bound ({error.strerror}); choose another {field}", field=field
            ) from error


def start_gateway(config: GatewayConfig, cluster: str) -> None:
    """Serve the API of ``cluster`` on the configured port; waits until it answers.

    Raises:
        ConfigError: Ray Serve serves something else on this Ray cluster.
        UnavailableError: Ray Serve did not start, or not in time.
    """
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        _within(START_TIMEOUT_S, lambda: _start(config, cluster))
    except (RuntimeError, TimeoutError, ValueError, RayError, RayServeException) as error:
        cause = getattr(error, "cause", None) or error  # Ray wraps what its actors raise, traceback and all
        raise UnavailableError(f"the gateway did not start: {str(cause) or type(cause).__name__}") from error


def _start(config: GatewayConfig, cluster: str) -> None:
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation

    from router.gateway import application

    assert config.port is not None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if others := sorted(serve.status().applications):
        raise ConfigError(
            f"Ray Serve on this Ray cluster already serves {', '.join(others)}; a Ray cluster has one HTTP port, so "
            "leave out gateway.port or use another Ray cluster",
            field="gateway.port",
        )
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=config.host, port=config.port),
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    serve.run(application(cluster, config.max_requests), name=_application(cluster), route_prefix="/")


def stop_gateway(cluster: str) -> None:
    """Stop serving ``cluster``; Ray Serve itself ends with its last application. May be repeated."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    # When the controller is gone or does not answer, what it served ends with the Ray cluster's processes.
    with contextlib.suppress(RuntimeError, TimeoutError, ValueError, RayServeException, RayError):
        _within(STOP_TIMEOUT_S, lambda: _stop(cluster))


def _stop(cluster: str) -> None:
    from ray import serve

    serve.delete(_application(cluster))
    if not serve.status().applications:
        serve.shutdown()


def _within(timeout_s: float, action: Callable[[], None]) -> None:
    """Run ``action`` on a thread, since Ray Serve's own waits have no end; TimeoutError when it takes longer."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 (raised again where the result is awaited)
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="kvpool-gateway", daemon=True).start()
    done.result(timeout_s)
