"""The one UCP call that ucxx cannot make: closing an endpoint that has already failed.

When UCX reports an error on an endpoint, ucxx marks it as closing and from then on ignores every close. The UCP
endpoint stays open: its memory leaks, and receives that were matched before the failure may stay open for ever, which
would keep their pages quarantined. UCP's rule is that the user closes a failed endpoint; this does, by the handle that
ucxx exposes, in the UCP library that ucxx already loaded into the process.

Only plain C calls of the stable UCP interface: ``ucp_ep_close_nbx``, ``ucp_request_check_status``,
``ucp_request_free``.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

_FIELD_FLAGS = 1 << 4  # UCP_OP_ATTR_FIELD_FLAGS
_CLOSE_FORCE = 1  # UCP_EP_CLOSE_FLAG_FORCE
_IN_PROGRESS = 1  # UCS_INPROGRESS
_LAST_ERROR = -100  # UCS_ERR_LAST: pointers at or above it, as unsigned numbers, are error codes


class _RequestParam(ctypes.Structure):
    """Head of ``ucp_request_param_t``; the rest is only read when its bit is set in the mask."""

    _fields_ = (
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 248),
    )


class FailedEndpointClose:
    """A forced close under way."""

    def __init__(self, library: ctypes.CDLL, request: int | None) -> None:
        self._library = library
        self._request = request

    def completed(self) -> bool:
        """True once UCP is done with the endpoint. Frees the request then."""
        if self._request is None:
            return True
        if self._library.ucp_request_check_status(self._request) == _IN_PROGRESS:
            return False
        self._library.ucp_request_free(self._request)
        self._request = None
        return True


def close_failed_endpoint(handle: int) -> FailedEndpointClose | None:
    """Close by force. At most once per endpoint, from the thread that progresses its worker.

    Returns:
        The close under way, None when the UCP library cannot be found; then the endpoint leaks.
    """
    library = _library()
    if library is None or not handle:
        return None
    param = _RequestParam(op_attr_mask=_FIELD_FLAGS, flags=_CLOSE_FORCE)
    answer = library.ucp_ep_close_nbx(handle, ctypes.byref(param)) or 0
    is_pointer = 0 < answer < (1 << 64) + _LAST_ERROR
    return FailedEndpointClose(library, answer if is_pointer else None)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The libucp that is mapped into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libucp" in path and ".so" in path:
            library = ctypes.CDLL(path)
            library.ucp_ep_close_nbx.restype = ctypes.c_void_p
            library.ucp_ep_close_nbx.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
            library.ucp_request_check_status.restype = ctypes.c_int
            library.ucp_request_check_status.argtypes = (ctypes.c_void_p,)
            library.ucp_request_free.restype = None
            library.ucp_request_free.argtypes = (ctypes.c_void_p,)
            return library
    return None
