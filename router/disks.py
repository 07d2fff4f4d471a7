"""What blocks on a worker's own disk cost it.  (pure)

They count as its own, and the worker reads them as soon as the request is there. So they delay the GPU until they are
read, or, where the worker computes them instead, by what that takes: never by more than having nothing on disk. Raising
the wait for the GPU says both (`router.kernel.score_redo`), and every bound holds with it. A second search prices what
is best when all leave their disks alone, since a peer may send the same sooner (`router.decide`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.types import Tier
from router.signals import Holding, Snapshot


def disk_reads(on_disk: Sequence[Holding], snapshot: Snapshot) -> list[tuple[int, float, float]]:
    """For workers whose longest prefix ends on their own disk: position, time to read what no memory of theirs holds,
    and time to compute it."""
    footprint, columns, found = snapshot.footprint, snapshot.columns, []
    for position, held, _ in on_disk:
        key = snapshot.workers[position].key
        memory = max((blocks for tier, blocks in snapshot.prefixes[key].items() if tier is not Tier.DISK), default=0)
        blocks, curve = held - memory, columns.curve(position)
        link = snapshot.links.curve(key.worker_id, key.worker_id, Tier.DISK, snapshot.now_ns)
        redo_ns = curve.time_ns(blocks * footprint.block_tokens, memory * footprint.block_tokens) - curve.t0_ns
        found.append((position, link.time_ns(blocks * footprint.block_bytes), redo_ns))
    return found
