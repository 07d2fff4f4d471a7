"""How the UCX context is configured, and the bounds of the transport. No I/O.

Every UCX setting is passed to the context, never through the environment, so that other users of UCX in the process
(NIXL, NCCL plug-ins) are left alone. Some are not negotiable because the fence rests on them. A receive must not be
reported complete while bytes still land, and must complete soon after its connection is closed by force; measured, this
holds for rendezvous in which the receiver reads (CMA, RDMA) or gets active-message fragments (TCP), and for messages
of one fragment. It does not hold for *put* rendezvous (bytes land after completion) nor for eager messages of many
fragments (a receive that lost its sender in the middle never completes). Therefore:

* ``RNDV_SCHEME`` is ``auto`` (reads over CMA, active messages over TCP) or ``get_zcopy`` where RDMA is installed; with
  ``get_zcopy`` TCP falls back to eager;
* ``TCP_PUT_ENABLE=n``, or ``auto`` would choose put over TCP;
* ``RNDV_THRESH`` is small, so that what is longer than a fragment is a rendezvous;
* ``CMA_MEMORY_INVALIDATE=y`` lets error handling and CMA coexist; without it UCX falls back to TCP inside one host.
* ``TCP_CONN_NB=y``, or the one thread of a transport stands still for minutes while it connects to a machine that is
  gone without a word, and with it every read and every peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvpool.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
MS = 1_000_000
S = 1_000_000_000

SAFETY_SETTINGS: Mapping[str, str] = {
    "RNDV_THRESH": "8192",
    "TCP_PUT_ENABLE": "n",
    "CMA_MEMORY_INVALIDATE": "y",
    "TCP_CONN_NB": "y",
}
"""Cannot be overridden."""

SAFE_SCHEMES = ("auto", "get_zcopy")

DEFAULT_SETTINGS: Mapping[str, str] = {
    "RNDV_SCHEME": "auto",
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


class Compression(Enum):
    """Whether runs travel as compressed frames."""

    AUTO = "auto"  # where the learned bandwidth says that they arrive sooner
    OFF = "off"  # neither asked for nor given
    ALWAYS = "always"  # for tests and benchmarks: asked for wherever runs are messages


@dataclass(frozen=True, slots=True)
class UcxOptions:
    """Bounds of one UCX end.

    Attributes:
        settings: extra UCX settings without the ``UCX_`` prefix, for example ``{"TLS": "tcp"}``.
        max_run_bytes: longest data message; the granularity of progress, order and cancellation.
        pull_bytes: blocks asked for in one message; the holder answers for the next part of a batch while this part is
            on its way.
        max_fetch_bytes: longest run that a reader on the same host fetches at once.
        link_window_bytes: granted and not yet arrived bytes per peer.
        fetch_window_bytes: the same where this end fetches, which is over sooner and costs the peer nothing.
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
        compression: see `Compression`.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    max_run_bytes: int = 8 * MIB
    pull_bytes: int = 16 * MIB
    max_fetch_bytes: int = 4 * MIB
    link_window_bytes: int = 32 * MIB
    fetch_window_bytes: int = 64 * MIB
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
    compression: Compression = Compression.AUTO

    def context_settings(self) -> dict[str, str]:
        """What the UCX context is created with.

        Raises:
            ConfigError: a setting would take the fence away.
        """
        merged = {**DEFAULT_SETTINGS, **self.settings, **SAFETY_SETTINGS}
        if merged["RNDV_SCHEME"] not in SAFE_SCHEMES:
            raise ConfigError(
                f"RNDV_SCHEME={merged['RNDV_SCHEME']} lets bytes land after a read ended; use {SAFE_SCHEMES}",
                field="RNDV_SCHEME",
            )
        return merged
