"""The NIXL transport, an optional extra: one-sided READs where RDMA or shared memory carry them.

See `transport` for the contract, `agent` for the only calls into the library, `reader` and `server` for the protocol.
"""

from kvpool.transport.nixl.transport import NixlOptions, NixlTransport

__all__ = ["NixlOptions", "NixlTransport"]
