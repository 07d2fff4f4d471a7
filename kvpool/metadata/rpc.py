"""Errors ↔ gRPC statuses, and how the metadata service's channels and servers are set up.

`KVPoolError`s cross the wire as a status plus trailing metadata that carries class, message and details, so the caller
catches what the service raised. A status without them, which gRPC itself made, is mapped by `STATUS_ERRORS`.
"""

from __future__ import annotations

import json
from typing import Any

import grpc

from kvpool.errors import (
    BY_CODE,
    CapacityError,
    DeadlineError,
    IncompatibleError,
    InvariantViolation,
    KVPoolError,
    RequestError,
    StaleError,
    TransferError,
    UnavailableError,
)
from kvpool.jsontext import parse_json

ERROR_METADATA_KEY = "kvpool-error-bin"
MAX_ERROR_BYTES = 4096
"""Bound on what an error may carry; HTTP/2 headers are limited to 8 KiB by default."""

MAX_STATUS_CHARS = 1024
"""Of a status's text, which travels in the same headers."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_ERROR_STATUSES: tuple[tuple[type[KVPoolError], grpc.StatusCode], ...] = (
    # first match wins: subclasses before their base
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (StaleError, grpc.StatusCode.ABORTED),
    (CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (TransferError, grpc.StatusCode.DATA_LOSS),
    (IncompatibleError, grpc.StatusCode.FAILED_PRECONDITION),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
)

STATUS_ERRORS: dict[grpc.StatusCode, type[Exception]] = {
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.CANCELLED: UnavailableError,  # the channel was closed, or the server stopped
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.ABORTED: StaleError,
    grpc.StatusCode.NOT_FOUND: StaleError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.DATA_LOSS: TransferError,
    grpc.StatusCode.FAILED_PRECONDITION: IncompatibleError,
    grpc.StatusCode.UNIMPLEMENTED: IncompatibleError,  # another version of the service, or another service
    grpc.StatusCode.INVALID_ARGUMENT: RequestError,
    grpc.StatusCode.OUT_OF_RANGE: RequestError,
    grpc.StatusCode.ALREADY_EXISTS: RequestError,
    grpc.StatusCode.UNAUTHENTICATED: RequestError,
    grpc.StatusCode.PERMISSION_DENIED: RequestError,
    grpc.StatusCode.INTERNAL: UnavailableError,  # the service's bug or a broken stream: try another replica
    grpc.StatusCode.UNKNOWN: UnavailableError,
    grpc.StatusCode.OK: InvariantViolation,  # not an error; nothing may raise it
}

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own: nothing queues behind another user's data
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind the same port
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)


def status_of(error: KVPoolError) -> grpc.StatusCode:
    """The status that an error travels as."""
    for kind, status in _ERROR_STATUSES:
        if isinstance(error, kind):
            return status
    return grpc.StatusCode.INTERNAL


def error_metadata(error: KVPoolError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries the error; details are left out when they do not fit."""
    content = {"code": error.code, "message": error.message[: MAX_ERROR_BYTES // 4], "details": error.details}
    raw = json.dumps(content, default=str).encode()
    if len(raw) > MAX_ERROR_BYTES:
        raw = json.dumps({**content, "details": {}}).encode()
    return ((ERROR_METADATA_KEY, raw),)


def error_from_rpc(error: grpc.RpcError, address: str) -> Exception:
    """What a failed call means. ``error`` stays its cause; ``address`` is named in the message."""
    status = error.code() if callable(getattr(error, "code", None)) else grpc.StatusCode.UNKNOWN
    trailing: Any = error.trailing_metadata() if callable(getattr(error, "trailing_metadata", None)) else None
    for name, value in trailing or ():
        if name == ERROR_METADATA_KEY:
            return _decode(value, status, address)
    kind = STATUS_ERRORS[status]
    text = error.details() if callable(getattr(error, "details", None)) else str(error)
    if status is grpc.StatusCode.UNAVAILABLE:
        why = str(text).rpartition("last error: ")[2]
        return UnavailableError(f"no metadata service answers at {address} ({why})", address=address)
    if issubclass(kind, KVPoolError):
        return kind(f"metadata service at {address}: {status.name}: {text}", address=address)
    return kind(f"metadata service at {address} failed with status {status.name}: {text}")


def _decode(raw: bytes | str, status: grpc.StatusCode, address: str) -> Exception:
    try:
        content = parse_json(raw)
        kind = BY_CODE[content["code"]]
        return kind(str(content["message"]), **content["details"])
    except (ValueError, KeyError, TypeError) as error:
        return UnavailableError(
            f"metadata service at {address} sent a malformed error: {error}", address=address, status=status.name
        )
