"""The data plane: bytes between registered segments. The contract is in `kvpool.transport.base`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvpool.errors import ConfigError
from kvpool.transport.base import Transport

TRANSPORTS = ("ucx", "nixl", "memory")
SHAPED = "shaped:"
"""Prefix of a name: the same transport with links that can be made slow, lossy or corrupt, for fault runs."""

NETNS = "netns:"
"""Prefix of a name, before the name of a hub and a colon: UCX in a network namespace of its own, for fault runs."""


def create_transport(
    name: str,
    settings: Mapping[str, str] | None = None,
    *,
    on_failure: Callable[[BaseException], None] | None = None,
) -> Transport:
    """A new end of the named transport; libraries are imported only when they are asked for.

    Args:
        name: one of `TRANSPORTS`.
        settings: of the library, for example ``{"TLS": "tcp", "NET_DEVICES": "eth0"}`` for UCX.
        on_failure: called once, from the transport's thread, when a bug of ours broke it: nothing is read or served any
            more, and its owner must not go on as a holder. The memory transport is for tests and has none.

    Raises:
        ConfigError: no transport has this name, or a setting would break its promises.
        KVPoolError: the library is there but cannot be initialised.
    """
    if name.startswith(SHAPED):
        from kvpool.transport.shaping import ShapingTransport

        return ShapingTransport(create_transport(name.removeprefix(SHAPED), settings, on_failure=on_failure))
    if name.startswith(NETNS):
        hub, _, inner = name.removeprefix(NETNS).partition(":")
        if inner != "ucx":
            raise ConfigError(f"'{NETNS}HUB:ucx' is all there is, not {name!r}", field="transport")
        return _in_namespace(hub, settings or {}, on_failure)
    if name == "memory":
        from kvpool.transport.memory import MemoryTransport

        return MemoryTransport()
    if name == "ucx":
        from kvpool.transport.ucx import UcxOptions, UcxTransport

        return UcxTransport(UcxOptions(settings=settings or {}), on_failure=on_failure)
    if name == "nixl":
        from kvpool.transport.nixl import NixlOptions, NixlTransport

        return NixlTransport(NixlOptions.from_settings(settings or {}), on_failure=on_failure)
    raise ConfigError(f"unknown transport {name!r}; known are {', '.join(TRANSPORTS)}", field="transport")


def _in_namespace(
    hub: str, settings: Mapping[str, str], on_failure: Callable[[BaseException], None] | None
) -> Transport:
    from kvpool.transport.netns import NamespacedTransport
    from kvpool.transport.ucx import UcxOptions, UcxTransport

    def make(kept: Mapping[str, str]) -> Transport:
        return UcxTransport(UcxOptions(settings={**settings, **kept}), on_failure=on_failure)

    return NamespacedTransport(hub, make)
