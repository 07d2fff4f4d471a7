"""One decision's numbers: redo on every worker, with what it costs others, and what holders may be worth.  (pure)

Gathers what the compiled loops need (`router.kernel`), and runs the first of them. Harm is what a plan costs the
requests behind it; see `router.planning.Harm`.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from kvpool.errors import UnavailableError
from kvpool.metadata.prefixes import PrefixRuns
from kvpool.types import Tier
from router.compiled import kernels
from router.cost import Pair, make_pair
from router.disks import disk_reads
from router.fills import fill_times
from router.kernel import (
    CROWD,
    DEVICE,
    DISK,
    FILL,
    FILL_BLOCK,
    HOST,
    KEEP,
    KEPT_ROWS,
    MAX_HOLDERS,
    OWN,
    READ,
    READ_REDO,
    REDO,
    WAIT,
    WORK_ROWS,
    Floats,
)
from router.kernel_stripes import POOL
from router.planning import Params
from router.signals import Holding, RequestView, Snapshot, holdings, longest, readable, usable_blocks

_DEVICE, _HOST, _DISK = Tier  # looking a member up takes longer than comparing with it
_longest = itemgetter(1)

FIRST_HOLDERS = 1 + max(MAX_HOLDERS, POOL)
"""So many, and the next one, of those that hold equally much may be come to by a search."""


@dataclass(slots=True)
class Case:
    """Everything the parts of one decision share.

    Attributes:
        held: what others may read of the prompt, by holder; of many that hold equally much those that a search could
            come to.
        holders: how many hold a part of it.
        on_disk: prefixes that end on disks and count as their own workers'.
        sources: ``held``, and prefixes on disks, longest first, as in ``sheet``.
        work, kept, sheet: see `router.kernel.score_redo`.
        redo: what that returned: the least score; prefill time, requests, turn and position of its worker; the source
            to try first, -1 when there is none, and the least that loads from it score; how many may be tried, and the
            least that loads from those which need not be could score.
    """

    request: RequestView
    snapshot: Snapshot
    params: Params
    held: list[Holding]
    holders: int
    on_disk: list[Holding]
    sources: list[Holding]
    work: Floats
    kept: Floats
    sheet: Floats
    redo: tuple[float, float, float, int, int, int, float, int, float]

    def wait_ns(self, position: int) -> float:
        """W of a worker, what lies on its disk (`router.disks`) or in host memory (`router.fills`) included."""
        return self.kept.item(WAIT, position)

    def redo_ns(self, position: int) -> float:
        """P(n−o | o) of a worker."""
        return self.kept.item(REDO, position)

    def own_blocks(self, position: int) -> int:
        """What a worker has of the prompt."""
        return int(self.kept.item(OWN, position))

    def score_ns(self, position: int, ttft_ns: float, gpu_ns: float) -> float:
        """Score of a plan on a worker."""
        crowd, keep = self.work.item(CROWD, position), self.work.item(KEEP, position)
        return ttft_ns + min(gpu_ns, self.params.harm.cap_ns) * crowd + keep

    def backlog_ns(self, position: int, source: Holding) -> float:
        """Until both ends of the link from a holder to a worker are free."""
        columns, now_ns = self.snapshot.columns, self.snapshot.now_ns
        return max(0.0, columns.out_free_ns.item(source.position) - now_ns, columns.in_free_ns.item(position) - now_ns)

    def pair(self, position: int, source: Holding) -> Pair:
        """One worker and one holder, for `router.cost`."""
        snapshot, now_ns = self.snapshot, self.snapshot.now_ns
        key = snapshot.workers[source.position].key
        return make_pair(
            self.wait_ns(position),
            self.redo_ns(position),
            self.own_blocks(position),
            source.blocks,
            self.request.prompt_tokens,
            snapshot.footprint,
            self.backlog_ns(position, source),
            snapshot.links.curve(key.worker_id, snapshot.workers[position].key.worker_id, source.tier, now_ns),
            snapshot.failures.probability(key, now_ns),
            snapshot.columns.curve(position),
            self.work.item(FILL_BLOCK, position),
        )

    def turn(self, position: int) -> int:
        """Place of the worker in this request's order."""
        rank = int(self.snapshot.columns.rank.item(position))
        return (rank - _ticket(self.request)) % len(self.snapshot.workers)


def open_case(
    request: RequestView, snapshot: Snapshot, params: Params, *, own_memory: bool = True, own_disk: bool = True
) -> Case:
    """Price redo everywhere.

    Args:
        request, snapshot, params: what is decided.
        own_memory: count what reading their own disks and filling their device tiers costs workers.
        own_disk: workers read their own disks.

    Raises:
        UnavailableError: no worker can take the request.
    """
    size = len(snapshot.workers)
    work, kept = np.zeros((WORK_ROWS, size)), np.zeros((KEPT_ROWS, size))
    held, holders = _held(request, snapshot, kept)
    for key in request.exclude:
        closed = snapshot.positions.get(key)
        if closed is not None:
            work[FILL, closed] = math.inf
    if own_memory and snapshot.fills:
        for key, byte_ns in snapshot.fills.items():
            reader = snapshot.positions.get(key)
            if reader is not None:
                work[FILL_BLOCK, reader] = snapshot.footprint.block_bytes * byte_ns
        for position, fill_ns in fill_times(request, snapshot):
            work[FILL, position] += fill_ns
    sources = held
    on_disk = [item for item in held if item[2] is _DISK]
    if on_disk:
        held = readable(held, request, snapshot)
        on_disk = on_disk if own_disk else []
        sources = held + on_disk
        for position, read_ns, redo_ns in disk_reads(on_disk, snapshot) if own_memory else ():
            work[READ, position], work[READ_REDO, position] = read_ns, redo_ns
    if len(sources) > 1:
        sources = sorted(sources, key=_longest, reverse=True)
    sheet = _sheet(request, snapshot, params, sources)
    redo = kernels().score_redo(snapshot.columns.table, work, kept, sheet)
    if redo[0] == math.inf:
        raise nobody(request, snapshot)
    return Case(request, snapshot, params, held, holders, on_disk, sources, work, kept, sheet, redo)


def _held(request: RequestView, snapshot: Snapshot, kept: Floats) -> tuple[list[Holding], int]:
    """`holdings`, and how many there are. Of many workers that hold equally much only those are listed that a search
    could come to, and what the others have is written down as their own."""
    prefixes = snapshot.prefixes
    if not isinstance(prefixes, PrefixRuns) or snapshot.places is None or snapshot.fills:
        held = holdings(request, snapshot)
        return held, len(held)
    held, holders, limit = [], 0, usable_blocks(request, snapshot.footprint.block_tokens)
    chosen = np.empty(2 * FIRST_HOLDERS)
    for tiers, keys in prefixes.runs:
        blocks, tier = longest(tiers, limit)
        places = snapshot.places(keys)
        if not blocks or not len(places):
            continue
        holders += len(places)
        if tier is _DISK:  # what each of them would read from there counts
            listed = places.tolist()
        else:
            kept[OWN, places] = blocks
            number = kernels().first_holders(snapshot.columns.table, places, chosen, snapshot.now_ns)
            listed = [int(position) for position in chosen[:number].tolist()]
        held += [Holding(position, blocks, tier) for position in listed]
    return held, holders


def nobody(request: RequestView, snapshot: Snapshot) -> UnavailableError:
    """The error for a request no worker may take."""
    return UnavailableError(
        "no worker can take the request: none is alive, prefills and has not just failed it; "
        "start workers or retry later",
        workers=len(snapshot.workers),
        excluded=len(request.exclude),
    )


def _ticket(request: RequestView) -> int:
    """Turns the order of equal workers, differently for every request."""
    return zlib.crc32(request.request_id.encode())


def _sheet(request: RequestView, snapshot: Snapshot, params: Params, sources: list[Holding]) -> Floats:
    """`router.kernel.Terms` in their order, then the sources; see `router.kernel.score_redo`."""
    harm, costs, footprint, fastest = params.harm, params.costs, snapshot.footprint, snapshot.fastest
    device, host = snapshot.links.best(_DEVICE), snapshot.links.best(_HOST)
    now_ns = snapshot.now_ns
    numbers = [
        now_ns,
        now_ns - costs.stale_report_ns,
        costs.unknown_wait_ns,
        request.prompt_tokens,
        request.chain_blocks,
        footprint.block_tokens,
        footprint.block_bytes,
        footprint.fixed_bytes,
        costs.notice_ns,
        _ticket(request),
        harm.base,
        harm.follow * snapshot.arrival_scale,
        harm.cap_ns,
        harm.share,
        harm.share_limit,
        harm.beside,
        harm.keep * footprint.block_tokens * fastest.token_ns,
        snapshot.features.split,
        fastest.t0_ns,
        fastest.token_ns,
        fastest.pair_ns,
        harm.several,
        device.alpha_ns,
        device.byte_ns,
        host.alpha_ns,
        host.byte_ns,
    ]
    for position, blocks, tier in sources:  # a member as it is would take ten times as long to convert
        numbers += (position, blocks, DEVICE if tier is _DEVICE else DISK if tier is _DISK else HOST, 0.0)
    return np.array(numbers, dtype=np.float64)
