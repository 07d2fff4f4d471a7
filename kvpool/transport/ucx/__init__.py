"""The UCX transport, over the ucxx binding. See `transport` for the thread, `reader` and `server` for the protocol."""

from kvpool.transport.ucx.settings import UcxOptions
from kvpool.transport.ucx.transport import UcxTransport

__all__ = ["UcxOptions", "UcxTransport"]
