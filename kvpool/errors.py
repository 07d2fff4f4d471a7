"""The one error tree, sorted by what the caller does next.

    KVPoolError
    ├── UnavailableError      the other side is down        → retry the same idempotent call within the deadline
    │   └── DeadlineError     it did not answer in time     → the same
    ├── StaleError            lease over, epoch fenced, replica gone → look up again, decide again
    ├── CapacityError         full, or over a limit         → back off, or redo the prefill
    │   └── OverloadError     its limits cannot be met now  → come again after ``details["retry_after_s"]``
    ├── TransferError         a load failed                 → redo the prefill, report the replica
    │   ├── PeerGoneError     the holder died or closed
    │   ├── StallError        no progress within the stall bound
    │   ├── TransferCancelledError  the reader gave it up
    │   └── IntegrityError    checksum or identity differs
    ├── IncompatibleError     layout, dtype, block size or hash scheme differ → never retry; refuse at join
    └── RequestError          malformed argument            → fix the caller
        ├── ConfigError       a setting is wrong
        ├── DuplicateError    the request's id is in use     → another id; our own earlier attempt: wait for its end
        └── ModelError        the model is unknown or its architecture is not supported
            └── NumericsError the model produced logits that are not finite; the request cannot go on
    InvariantViolation        our bug; outside the tree     → crash the actor, keep its history

Errors carry a `details` mapping (ids, elapsed time), survive pickling and chain their cause. A miss is a result,
not an error.
"""

from __future__ import annotations

from typing import Any


class KVPoolError(Exception):
    """Base of every error a caller may handle.

    Args:
        message: what is wrong and what to do about it.
        details: ids, sizes and elapsed times; JSON-serialisable values only.
    """

    code = "kvpool_error"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details))

    def __str__(self) -> str:
        if not self.details:
            return self.message
        shown = ", ".join(f"{name}={value}" for name, value in self.details.items())
        return f"{self.message} [{shown}]"


def _rebuild(cls: type[KVPoolError], message: str, details: dict[str, Any]) -> KVPoolError:
    return cls(message, **details)


class UnavailableError(KVPoolError):
    """The other side is down or unreachable; the same idempotent call may be retried within its deadline."""

    code = "unavailable"


class DeadlineError(UnavailableError):
    """The other side did not answer before the deadline."""

    code = "deadline_exceeded"


class StaleError(KVPoolError):
    """A lease is over, an epoch is fenced or a replica is gone: look up again and decide again."""

    code = "stale"


class CapacityError(KVPoolError):
    """A segment is full or a limit is reached: back off, or redo the prefill."""

    code = "capacity"


class OverloadError(CapacityError):
    """The limits that a request carries cannot be met now; it was not started."""

    code = "overloaded"


class TransferError(KVPoolError):
    """A load failed: redo the prefill and report the replica."""

    code = "transfer"


class PeerGoneError(TransferError):
    """The holder died, closed or cannot be reached."""

    code = "peer_gone"


class StallError(TransferError):
    """No byte arrived within the stall bound, or the load passed its deadline."""

    code = "stall"


class TransferCancelledError(TransferError):
    """The reader gave the load up."""

    code = "cancelled"


class IntegrityError(TransferError):
    """A block's checksum or identity differs from what was asked for; its bytes were not used."""

    code = "integrity"


class IncompatibleError(KVPoolError):
    """Layout, dtype, block size or hash scheme differ; never retry."""

    code = "incompatible"


class RequestError(KVPoolError):
    """A malformed argument; the message names it and the way out."""

    code = "invalid_request"


class ConfigError(RequestError):
    """A setting is unknown, malformed or contradicts another."""

    code = "invalid_config"


class DuplicateError(RequestError):
    """A request of the same id is being served there."""

    code = "duplicate"


class ModelError(RequestError):
    """The model cannot be found, read or served by this engine."""

    code = "model"


class NumericsError(ModelError):
    """The model produced logits that are not finite; the request cannot go on, others can."""

    code = "numerics"


class InvariantViolation(Exception):
    """Our own bug. Never handled: the process that sees it stops and keeps its history."""


BY_CODE: dict[str, type[KVPoolError]] = {
    kind.code: kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, KVPoolError)
}
"""Every error of ours by its code."""
