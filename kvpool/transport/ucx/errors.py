"""Every exception of ucxx, mapped once to the error tree. A test enumerates ucxx and fails on an unmapped one."""

from __future__ import annotations

from ucxx import exceptions as ucxx_errors

from kvpool.errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    InvariantViolation,
    KVPoolError,
    PeerGoneError,
    RequestError,
    TransferCancelledError,
    TransferError,
    UnavailableError,
)

MAPPING: dict[str, type[KVPoolError]] = {
    "UCXError": TransferError,
    "UCXAlreadyExistsError": TransferError,
    "UCXBufferTooSmallError": IntegrityError,
    "UCXBusyError": CapacityError,
    "UCXCanceled": TransferCancelledError,
    "UCXCanceledError": TransferCancelledError,
    "UCXCloseError": PeerGoneError,
    "UCXConfigError": ConfigError,
    "UCXConnectionResetError": PeerGoneError,
    "UCXEndpointTimeoutError": PeerGoneError,
    "UCXExceedsLimitError": CapacityError,
    "UCXFirstEndpointFailureError": PeerGoneError,
    "UCXFirstLinkFailureError": PeerGoneError,
    "UCXIOError": PeerGoneError,
    "UCXInvalidAddrError": PeerGoneError,
    "UCXInvalidParamError": RequestError,
    "UCXLastEndpointFailureError": PeerGoneError,
    "UCXLastLinkFailureError": PeerGoneError,
    "UCXMessageTruncatedError": IntegrityError,
    "UCXMsgTruncated": IntegrityError,
    "UCXNoDeviceError": UnavailableError,
    "UCXNoElemError": TransferError,
    "UCXNoMemoryError": CapacityError,
    "UCXNoMessageError": TransferError,
    "UCXNoProgressError": TransferError,
    "UCXNoResourceError": CapacityError,
    "UCXNotConnectedError": PeerGoneError,
    "UCXNotImplementedError": ConfigError,
    "UCXOutOfRangeError": RequestError,
    "UCXRejectedError": PeerGoneError,
    "UCXShmemSegmentError": CapacityError,
    "UCXSomeConnectsFailedError": PeerGoneError,
    "UCXTimedOutError": PeerGoneError,
    "UCXUnreachableError": PeerGoneError,
    "UCXUnsupportedError": ConfigError,
}

BY_CLASS: dict[type[BaseException], type[KVPoolError]] = {
    getattr(ucxx_errors, name): ours for name, ours in MAPPING.items() if hasattr(ucxx_errors, name)
}

FOREIGN: tuple[type[BaseException], ...] = (*BY_CLASS, RuntimeError, ValueError, OSError)
"""What calls into ucxx may raise: its own classes, and C++ exceptions as RuntimeError, ValueError or OSError."""


def from_ucx(error: BaseException, doing: str, peer: str) -> KVPoolError:
    """The error of ours that stands for a foreign one; the cause is chained.

    Args:
        error: what ucxx raised.
        doing: what was tried, for the message.
        peer: whom it concerned.

    Raises:
        InvariantViolation: an exception that is not from ucxx at all.
    """
    if not isinstance(error, FOREIGN):
        raise InvariantViolation(f"unexpected {type(error).__name__} while {doing}") from error
    ours = next((BY_CLASS[cls] for cls in type(error).__mro__ if cls in BY_CLASS), TransferError)
    mapped = ours(f"{doing} failed: {error}", peer=peer, ucx=type(error).__name__)
    # Its frames would keep requests and thereby a UCX worker alive for as long as someone keeps the error.
    mapped.__cause__ = error.with_traceback(None)
    return mapped
