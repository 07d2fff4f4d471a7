"""What blocks in a worker's host memory cost it, where it computes in another one.  (pure)

A worker with a device tier says how fast it fills what the tier lacks. It does that for its own hits before the step,
so they delay the GPU behind whatever it waits for; a hit in the tier is free. Never priced dearer than computing those
blocks: holding a prefix makes no worker worse. Raising the wait says it (`router.kernel.score_redo`), and every bound
holds, as with `router.disks`. What peers send lies in host memory as well, and is priced with the load
(`router.prices`). Workers without a device tier say nothing, and nothing is priced.
"""

from __future__ import annotations

from kvpool.types import Tier
from router.signals import RequestView, Snapshot, usable_blocks


def fill_times(request: RequestView, snapshot: Snapshot) -> list[tuple[int, float]]:
    """Workers that hold a part of the prompt in host memory and not in their device tier, and how much longer they
    wait for it."""
    footprint, limit = snapshot.footprint, usable_blocks(request, snapshot.footprint.block_tokens)
    found = []
    for key, tiers in snapshot.prefixes.items():
        byte_ns, position = snapshot.fills.get(key), snapshot.positions.get(key)
        if byte_ns is None or position is None:
            continue
        device = min(limit, tiers.get(Tier.DEVICE, 0))
        blocks = min(limit, tiers.get(Tier.HOST, 0)) - device
        if blocks <= 0:
            continue
        curve = snapshot.columns.curve(position)
        fill_ns = blocks * footprint.block_bytes * byte_ns
        redo_ns = curve.time_ns(blocks * footprint.block_tokens, device * footprint.block_tokens) - curve.t0_ns
        found.append((position, min(fill_ns, redo_ns)))
    return found
