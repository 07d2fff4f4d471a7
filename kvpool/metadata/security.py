"""TLS and a shared token for the metadata service, when configured.

Nothing is on by default: the service binds the loopback address. The variables below name files; every process of a
cluster, servers, workers and routers, reads the same ones.

    KVPOOL_METADATA_CERT, KVPOOL_METADATA_KEY   a server with both speaks TLS; a client with both shows them
    KVPOOL_METADATA_CA                          a client with it speaks TLS and trusts it; a server with it demands
                                                client certificates that it signed
    KVPOOL_METADATA_TOKEN_FILE                  a server with it refuses calls without the token; clients send it

A token without TLS keeps honest strangers out, not listeners.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kvpool.errors import ConfigError

PREFIX = "KVPOOL_METADATA_"
TOKEN_METADATA_KEY = "authorization"
OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
"""Health checks need no token: those who probe have none."""


@dataclass(frozen=True, slots=True)
class Security:
    """Contents of the configured files; None for what is not configured."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(f"set {PREFIX}CERT and {PREFIX}KEY together, or neither")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise ConfigError(f"the token in {PREFIX}TOKEN_FILE must be one line of printable ASCII")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Security:
        """Read the files that the environment names.

        Raises:
            ConfigError: a file cannot be read, or only half of a pair is named; the message names the variable.
        """
        token = _read(environment, "TOKEN_FILE")
        return cls(
            ca=_read(environment, "CA"),
            certificate=_read(environment, "CERT"),
            key=_read(environment, "KEY"),
            token=None if token is None else token.decode(errors="replace").strip(),
        )

    @property
    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """What a client adds to every call."""
        return () if self.token is None else ((TOKEN_METADATA_KEY, f"Bearer {self.token}"),)

    def channel(self, address: str, options: tuple[tuple[str, Any], ...]) -> grpc.Channel:
        """A client's channel."""
        if self.ca is None:
            return grpc.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)
        return grpc.secure_channel(address, credentials, options=options)

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Add a server's port; returns it.

        Raises:
            RuntimeError: the address cannot be bound.
        """
        if self.certificate is None or self.key is None:
            return server.add_insecure_port(address)
        credentials = grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.ca, require_client_auth=self.ca is not None
        )
        return server.add_secure_port(address, credentials)

    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor[Any, Any], ...]:
        """What a server puts in front of its handlers."""
        return () if self.token is None else (TokenInterceptor(self.token),)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Let the call through to its handler, or to one that refuses it in the same shape."""
        handler = await continuation(details)
        sent = dict(details.invocation_metadata or ()).get(TOKEN_METADATA_KEY, "")
        raw = sent if isinstance(sent, bytes) else sent.encode()
        if handler is None or details.method in OPEN_METHODS or hmac.compare_digest(raw, self._expected):
            return handler
        return _refusing(handler)


def _refusing(handler: Any) -> Any:
    """A handler of the same kind, since gRPC answers a mismatch of kinds with an unrelated error."""
    text = f"the call carries no valid token; set {PREFIX}TOKEN_FILE to the file that the service reads"

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    async def refuse_stream(_: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
        yield

    makers = {
        (False, False): (grpc.unary_unary_rpc_method_handler, refuse),
        (False, True): (grpc.unary_stream_rpc_method_handler, refuse_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, refuse),
        (True, True): (grpc.stream_stream_rpc_method_handler, refuse_stream),
    }
    make, behaviour = makers[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _read(environment: Mapping[str, str], name: str) -> bytes | None:
    path = environment.get(PREFIX + name)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{PREFIX}{name} names {path}, which cannot be read: {error.strerror}") from error
