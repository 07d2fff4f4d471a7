"""What blocks on a worker's own disk cost it.  (pure)

They count as its own, and the worker reads them as soon as the request is there, whatever the plan says. So they delay
the GPU until they are read, or, where the worker computes them instead, by what that takes: never by more than having
nothing on disk. Raising the wait for the GPU says both, and every bound of `router.decide` holds with it.
"""

from __future__ import annotations

from kvpool.types import Tier
from router.estimators import PrefillCurve
from router.signals import Column, RequestView, Snapshot, usable_blocks


def await_disks(wait: Column, request: RequestView, snapshot: Snapshot) -> None:
    """Raise the waits of workers that would read a part of the prompt from their own disk."""
    footprint, limit = snapshot.footprint, usable_blocks(request, snapshot.footprint.block_tokens)
    disk = Tier.DISK
    for key, tiers in snapshot.prefixes.items():
        if disk not in tiers:
            continue
        on_disk, position = tiers[disk], snapshot.positions.get(key)
        if position is None:
            continue
        memory = min(limit, max((held for tier, held in tiers.items() if tier is not Tier.DISK), default=0))
        blocks = min(limit, on_disk) - memory
        if blocks <= 0:
            continue
        curve = PrefillCurve(*snapshot.columns.curves[:, position].tolist())
        read_ns = snapshot.links.curve(key.worker_id, key.worker_id, Tier.DISK, snapshot.now_ns).time_ns(
            blocks * footprint.block_bytes
        )
        redo_ns = curve.time_ns(blocks * footprint.block_tokens, memory * footprint.block_tokens) - curve.t0_ns
        busy_ns = float(wait[position])
        wait[position] = max(busy_ns, min(read_ns, busy_ns + redo_ns))
