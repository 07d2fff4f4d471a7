"""How the UCX context is configured, and the bounds of the transport. No I/O.

Every UCX setting is passed to the context, never through the environment, so that other users of UCX in the process
(NIXL, NCCL plug-ins) are left alone. Two settings are not negotiable because the fence rests on them:

* ``RNDV_SCHEME=get_zcopy``: with *put* schemes a receive was seen complete while bytes still landed.
* ``RNDV_THRESH`` small: a multi-fragment eager message has the same flaw.

``CMA_MEMORY_INVALIDATE=y`` lets error handling and CMA coexist; without it UCX falls back to TCP inside one host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KIB = 1 << 10
MIB = 1 << 20
MS = 1_000_000
S = 1_000_000_000

SAFETY_SETTINGS: Mapping[str, str] = {
    "RNDV_SCHEME": "get_zcopy",
    "RNDV_THRESH": "8192",
    "CMA_MEMORY_INVALIDATE": "y",
}
"""Cannot be overridden."""

DEFAULT_SETTINGS: Mapping[str, str] = {
    "WARN_UNUSED_ENV_VARS": "n",
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "256K",
    "TCP_SNDBUF": "4M",
    "TCP_RCVBUF": "4M",
    "TCP_KEEPIDLE": "1s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "3",
    "KEEPALIVE_INTERVAL": "1s",
}
"""Measured on loopback and veth: segments and socket buffers of this size are worth a factor of five."""


@dataclass(frozen=True, slots=True)
class UcxOptions:
    """Bounds of one UCX end.

    Attributes:
        settings: extra UCX settings without the ``UCX_`` prefix, for example ``{"TLS": "tcp"}``.
        max_run_bytes: longest data message; the granularity of progress, order and cancellation.
        link_window_bytes: granted and not yet arrived bytes per peer.
        process_window_bytes: the same over all peers.
        link_window_runs: granted and not yet arrived messages per peer.
        open_pulls_per_link: pulls a peer holds leases for at once; more wait here by urgency.
        waiting_reads: reads that may wait; more are refused with `CapacityError`.
        max_serves: pulls this end serves at once; more are refused with `CapacityError`.
        lease_slack_ns: how long after the reader's deadline the holder ends a read lease.
        max_lease_ns: longest read lease whatever the reader asks for.
        drain_ns: how long a given-up read may let granted runs finish before its connection is closed by force.
        fence_ns: how long the fence may take before the read counts as quarantined.
        spin_ns: how long the loop polls without progress, while something is in flight, before it blocks.
        idle_link_ns: connections without traffic are closed after this.
        max_links: connections kept per direction; the longest idle ones are closed first.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    max_run_bytes: int = 4 * MIB
    link_window_bytes: int = 32 * MIB
    process_window_bytes: int = 128 * MIB
    link_window_runs: int = 64
    open_pulls_per_link: int = 16
    waiting_reads: int = 65_536
    max_serves: int = 1024
    lease_slack_ns: int = 1 * S
    max_lease_ns: int = 120 * S
    drain_ns: int = 250 * MS
    fence_ns: int = 1 * S
    spin_ns: int = 50_000
    idle_link_ns: int = 300 * S
    max_links: int = 1024

    def context_settings(self) -> dict[str, str]:
        """What the UCX context is created with."""
        return {**DEFAULT_SETTINGS, **self.settings, **SAFETY_SETTINGS}
