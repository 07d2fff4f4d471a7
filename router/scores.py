"""What redoing costs on every worker at once: waits, prefills, harm, and who is best.  (pure)

The same arithmetic twice, because its cost is the decision's: with few workers plain lists, with many numpy arrays. A
property test holds both to the same decisions. Harm is what prefill time costs the requests behind it; see
`router.planning.Harm`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np

from kvpool.errors import UnavailableError
from router import cost
from router.cost import Costs
from router.disks import await_disks
from router.fills import await_fills
from router.planning import Harm, Params
from router.signals import Column, Floats, Holding, RequestView, Snapshot

FEW_WORKERS = 24
"""Up to so many workers lists are faster than arrays."""

_NO_WEIGHT = 1e-200
"""Nothing, and yet times an endless wait it is endless and not undefined."""


@dataclass(slots=True)
class Scores:
    """Redo on every worker.

    Attributes:
        wait, redo: W, what lies on the own disk (`router.disks`) or in host memory (`router.fills`) included, and
            P(n−o | o).
        crowd: what each ns of prefill on a worker costs others; None when harm does not count.
        keep: what it costs others that blocks must leave for the request's; None when none must.
        curves: prefill curves, one row per coefficient.
        least: the least of wait + redo + harm + keep, which is inf where the request may not go.
        position: who has it; among equals the least prefill time, then the fewest requests, then the turn.
    """

    wait: Column
    redo: Column
    crowd: Column | None
    keep: Column | None
    curves: Sequence[Column] | Floats
    least: float
    position: int

    def crowd_at(self, position: int) -> float:
        """What each ns of prefill on a worker costs others."""
        return 0.0 if self.crowd is None else float(self.crowd[position])

    def keep_at(self, position: int) -> float:
        """What it costs others on a worker that blocks must leave."""
        return 0.0 if self.keep is None else float(self.keep[position])

    def least_wait_ns(self) -> float:
        """The least wait of all workers."""
        return min(self.wait) if isinstance(self.wait, list) else self.wait.item(self.wait.argmin())


@dataclass(slots=True)
class Case:
    """Everything the parts of one decision share.

    Attributes:
        held: what others may read of the prompt, by holder.
        owners: blocks of the prompt each worker holds, by position, without zeros.
        ticket: turns the order of equal workers.
    """

    request: RequestView
    snapshot: Snapshot
    params: Params
    held: list[Holding]
    owners: dict[int, int]
    ticket: int
    scores: Scores


def score_redo(
    request: RequestView,
    snapshot: Snapshot,
    params: Params,
    owners: Mapping[int, int],
    ticket: int,
    few: int = FEW_WORKERS,
) -> Scores:
    """Price redo everywhere.

    Args:
        request, snapshot, params: what is decided.
        owners: blocks of the prompt each worker holds, by position, without zeros.
        ticket: number that turns the order of equal workers.
        few: up to so many workers lists are used.

    Raises:
        UnavailableError: no worker can take the request.
    """
    return (_score_lists if len(snapshot.workers) <= few else _score_arrays)(request, snapshot, params, owners, ticket)


def open_waits(request: RequestView, snapshot: Snapshot, costs: Costs) -> Floats:
    """W of every worker, inf for those that may not take the request."""
    wait = cost.wait_ns(snapshot, costs)
    for key in request.exclude:
        position = snapshot.positions.get(key)
        if position is not None:
            wait[position] = math.inf
    return wait


def nobody(request: RequestView, snapshot: Snapshot) -> UnavailableError:
    """The error for a request no worker may take."""
    return UnavailableError(
        "no worker can take the request: none is alive, prefills and has not just failed it; "
        "start workers or retry later",
        workers=len(snapshot.workers),
        excluded=len(request.exclude),
    )


def harm_ns(harm: Harm, gpu_ns: float, crowd: float) -> float:
    """What ``gpu_ns`` of prefill on a worker cost the requests behind it; ``crowd`` as in `crowds`."""
    return min(gpu_ns, harm.cap_ns) * crowd


def crowds(snapshot: Snapshot, harm: Harm, wait: Floats) -> Floats:
    """For every worker what each ns of prefill costs others: see `router.planning.Harm`."""
    arrivals, size = snapshot.columns.arrivals, len(wait)
    weight = harm.follow * snapshot.arrival_scale
    if weight == 0.0:
        crowd = np.full(size, harm.base)
    else:
        crowd = arrivals * wait
        crowd *= weight
        common = harm.base
        if harm.share:
            total = float(crowd.sum())
            if total == math.inf:  # some worker is closed
                reachable = crowd[crowd < math.inf]
                total, size = float(reachable.sum()), max(1, len(reachable))
            common += min(harm.share_limit, harm.share * total / size)
        crowd += common
    if harm.linger:
        crowd += arrivals * (harm.linger * len(wait) / float(arrivals.sum()))
    return crowd


def keep_ns(request: RequestView, snapshot: Snapshot, harm: Harm, owners: Mapping[int, int]) -> Floats | None:
    """For every worker what it costs others that blocks must leave for the request's; None when none must."""
    empty = snapshot.columns.empty_blocks
    if not harm.keep or snapshot.pressure is None or request.chain_blocks <= empty.item(empty.argmin()):
        return None
    leaving = request.chain_blocks - empty
    for position, blocks in owners.items():
        leaving[position] -= blocks
    np.maximum(leaving, 0.0, out=leaving)
    leaving *= snapshot.pressure
    leaving *= harm.keep * snapshot.footprint.block_tokens * snapshot.fastest.token_ns
    return leaving


# -- many workers


def _score_arrays(
    request: RequestView, snapshot: Snapshot, params: Params, owners: Mapping[int, int], ticket: int
) -> Scores:
    wait = open_waits(request, snapshot, params.costs)
    await_disks(wait, request, snapshot)
    await_fills(wait, request, snapshot)
    redo = cost.redo_ns(snapshot.columns, request.prompt_tokens, owners, snapshot.footprint.block_tokens)
    score, crowd = wait + redo, None
    if not params.harm.zero:
        crowd = crowds(snapshot, params.harm, wait)
        harm = np.minimum(redo, params.harm.cap_ns)
        harm *= crowd
        score += harm
    keep = keep_ns(request, snapshot, params.harm, owners)
    if keep is not None:
        score += keep
    least = score.item(score.argmin())
    if least == math.inf:
        raise nobody(request, snapshot)
    position = _first_array(snapshot, score, least, redo, ticket)
    return Scores(wait, redo, crowd, keep, snapshot.columns.curves, least, position)


def _first_array(snapshot: Snapshot, score: Floats, least: float, redo: Floats, ticket: int) -> int:
    tied = (score == least).nonzero()[0]
    columns = snapshot.columns
    for values in (redo, columns.requests):
        if len(tied) > 1:
            seen = values[tied]
            tied = tied[seen == seen.min()]
    if len(tied) > 1:
        tied = tied[np.argmin((columns.rank[tied] - ticket) % len(columns))][None]
    return int(tied[0])


# -- few workers


def _score_lists(
    request: RequestView, snapshot: Snapshot, params: Params, owners: Mapping[int, int], ticket: int
) -> Scores:
    wait: list[float] = open_waits(request, snapshot, params.costs).tolist()
    await_disks(wait, request, snapshot)
    await_fills(wait, request, snapshot)
    curves: list[list[float]] = snapshot.columns.curves.tolist()
    redo = _redo_list(request, snapshot, curves, owners)
    crowd = _crowd_list(snapshot, params.harm, wait)
    keep = _keep_list(request, snapshot, params.harm, owners)
    cap_ns = params.harm.cap_ns
    score = [w + r + (r if r < cap_ns else cap_ns) * c + k for w, r, c, k in zip(wait, redo, crowd, keep, strict=True)]
    least = min(score)
    if least == math.inf:
        raise nobody(request, snapshot)
    position = score.index(least)
    if score.count(least) > 1:
        position = _first_list(snapshot, score, least, redo, ticket)
    return Scores(wait, redo, crowd, keep, curves, least, position)


def _redo_list(
    request: RequestView, snapshot: Snapshot, curves: Sequence[Sequence[float]], owners: Mapping[int, int]
) -> list[float]:
    total, block_tokens = float(request.prompt_tokens), snapshot.footprint.block_tokens
    half = 0.5 * total
    t0s, slopes, pairs = curves
    redo = [(pair * half + slope) * total + t0 for t0, slope, pair in zip(t0s, slopes, pairs, strict=True)]
    for position, blocks in owners.items():
        cached = blocks * block_tokens
        redo[position] -= cached * (slopes[position] + 0.5 * cached * pairs[position])
    return redo


def _crowd_list(snapshot: Snapshot, harm: Harm, wait: Sequence[float]) -> list[float]:
    """What `crowds` gives, zeros where that is not asked for."""
    if harm.zero:
        return [0.0] * len(wait)
    came = snapshot.columns.arrivals.tolist()
    linger = harm.linger * len(wait) / sum(came) if harm.linger else 0.0
    weight = harm.follow * snapshot.arrival_scale
    common = harm.base
    if weight == 0.0:
        weight = _NO_WEIGHT
    elif harm.share:
        total, size = sum(map(mul, came, wait)) * weight, len(wait)
        if total == math.inf:
            reachable = [n * value for n, value in zip(came, wait, strict=True) if value < math.inf]
            total, size = sum(reachable) * weight, max(1, len(reachable))
        common += min(harm.share_limit, harm.share * total / size)
    return [n * w * weight + common + n * linger for n, w in zip(came, wait, strict=True)]


def _keep_list(request: RequestView, snapshot: Snapshot, harm: Harm, owners: Mapping[int, int]) -> list[float]:
    """What `keep_ns` gives, zeros where that is None."""
    empty, blocks = snapshot.columns.empty_blocks.tolist(), request.chain_blocks
    if not harm.keep or snapshot.pressure is None or blocks <= min(empty):
        return [0.0] * len(empty)
    pressures = snapshot.pressure.tolist()
    weight = harm.keep * snapshot.footprint.block_tokens * snapshot.fastest.token_ns
    keep = [
        (blocks - free) * pressure * weight if free < blocks else 0.0
        for free, pressure in zip(empty, pressures, strict=True)
    ]
    for position, own in owners.items():
        leaving = blocks - empty[position] - own
        keep[position] = leaving * pressures[position] * weight if leaving > 0.0 else 0.0
    return keep


def _first_list(snapshot: Snapshot, score: Sequence[float], least: float, redo: Sequence[float], ticket: int) -> int:
    requests, rank, size = snapshot.columns.requests.tolist(), snapshot.columns.rank.tolist(), len(score)
    tied = (position for position, value in enumerate(score) if value == least)
    return min(tied, key=lambda i: (redo[i], requests[i], (rank[i] - ticket) % size))
