"""The UCX transport, over the ucxx binding. See `loop` for the thread, `reader` and `server` for the protocol."""

import os

# UCX logs every lost peer as an error, on stdout; to us it is a typed error and a counter. The level is global to UCX
# and is read when the library is loaded, so it cannot be passed to the context. Whoever set it keeps it.
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")

from kvpool.transport.ucx.settings import UcxOptions
from kvpool.transport.ucx.transport import UcxTransport

__all__ = ["UcxOptions", "UcxTransport"]
