"""What blocks in a worker's host memory cost it, where it computes in another one.  (pure)

A worker with a device tier says how fast it fills what the tier lacks. It does that for its own hits before the step,
so they delay the GPU behind whatever it waits for; a hit in the tier is free. Never priced dearer than computing those
blocks: holding a prefix makes no worker worse. Raising the wait says it, and every bound of `router.decide` holds, as
with `router.disks`. Workers without a device tier say nothing, and nothing is priced.
"""

from __future__ import annotations

from kvpool.types import Tier
from router.estimators import PrefillCurve
from router.signals import Column, RequestView, Snapshot, usable_blocks


def await_fills(wait: Column, request: RequestView, snapshot: Snapshot) -> None:
    """Raise the waits of workers that hold a part of the prompt in host memory and not in their device tier."""
    if not snapshot.fills:
        return
    footprint, limit = snapshot.footprint, usable_blocks(request, snapshot.footprint.block_tokens)
    for key, tiers in snapshot.prefixes.items():
        byte_ns, position = snapshot.fills.get(key), snapshot.positions.get(key)
        if byte_ns is None or position is None:
            continue
        device = min(limit, tiers.get(Tier.DEVICE, 0))
        blocks = min(limit, tiers.get(Tier.HOST, 0)) - device
        if blocks <= 0:
            continue
        curve = PrefillCurve(*snapshot.columns.curves[:, position].tolist())
        fill_ns = blocks * footprint.block_bytes * byte_ns
        redo_ns = curve.time_ns(blocks * footprint.block_tokens, device * footprint.block_tokens) - curve.t0_ns
        wait[position] = float(wait[position]) + min(fill_ns, redo_ns)
