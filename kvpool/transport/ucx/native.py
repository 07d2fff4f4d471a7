"""Two native calls that ucxx's Python classes do not offer, in the libraries ucxx already loaded into the process.

* Closing an endpoint that has already failed. When UCX reports an error on an endpoint, ucxx marks it as closing and
  from then on ignores every close. The UCP endpoint stays open: its memory leaks, and receives that were matched before
  the failure may stay open for ever, which would keep their pages quarantined. UCP's rule is that the user closes a
  failed endpoint. Only plain C calls of the stable UCP interface are used.
* Letting go of cancelled requests. ucxx keeps a request that was under way when its endpoint was closed, that request
  keeps the endpoint, and the endpoint its worker with a dozen file descriptors. ``Endpoint::getCancelingSize`` drops
  those that have completed. It is C++, by its mangled name; where it is missing the leak remains.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

_FIELD_FLAGS = 1 << 4  # UCP_OP_ATTR_FIELD_FLAGS
_CLOSE_FORCE = 1  # UCP_EP_CLOSE_FLAG_FORCE
_IN_PROGRESS = 1  # UCS_INPROGRESS
_CANCELING_SIZE = "_ZNK4ucxx8Endpoint16getCancelingSizeEv"
_LAST_ERROR = -100  # UCS_ERR_LAST: pointers at or above it, as unsigned numbers, are error codes


class _RequestParam(ctypes.Structure):
    """Head of ``ucp_request_param_t``; the rest is only read when its bit is set in the mask."""

    _fields_ = (
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 248),
    )


class FailedEndpointClose:
    """A forced close of an endpoint that failed. At most one per endpoint, on the thread that progresses its worker.

    Args:
        handle: the UCP endpoint. Without a UCP library to be found the endpoint leaks, and this counts as completed.
    """

    def __init__(self, handle: int) -> None:
        self._library = _ucp() if handle else None
        self._request: int | None = None
        if self._library is not None:
            param = _RequestParam(op_attr_mask=_FIELD_FLAGS, flags=_CLOSE_FORCE)
            answer = self._library.ucp_ep_close_nbx(handle, ctypes.byref(param)) or 0
            self._request = answer if 0 < answer < (1 << 64) + _LAST_ERROR else None

    @property
    def completed(self) -> bool:
        """True once UCP is done with the endpoint. Frees the request then."""
        if self._request is None or self._library is None:
            return True
        if self._library.ucp_request_check_status(self._request) == _IN_PROGRESS:
            return False
        self._library.ucp_request_free(self._request)
        self._request = None
        return True


def forget_cancelled_requests(endpoint: int) -> None:
    """Make ucxx drop requests that completed after its endpoint was closed.

    Args:
        endpoint: address of the ucxx (C++) endpoint, alive.
    """
    library = _load("/libucxx.so")
    if library is not None and hasattr(library, _CANCELING_SIZE):
        size = getattr(library, _CANCELING_SIZE)
        size.restype, size.argtypes = ctypes.c_size_t, (ctypes.c_void_p,)
        size(endpoint)


@functools.cache
def _ucp() -> ctypes.CDLL | None:
    library = _load("/libucp")
    if library is not None:
        library.ucp_ep_close_nbx.restype = ctypes.c_void_p
        library.ucp_ep_close_nbx.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        library.ucp_request_check_status.restype = ctypes.c_int
        library.ucp_request_check_status.argtypes = (ctypes.c_void_p,)
        library.ucp_request_free.restype = None
        library.ucp_request_free.argtypes = (ctypes.c_void_p,)
    return library


@functools.cache
def _load(name: str) -> ctypes.CDLL | None:
    """A library that is mapped into this process already, None when it is not."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if name in path and ".so" in path:
            return ctypes.CDLL(path)
    return None
