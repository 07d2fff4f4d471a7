"""Lower bounds on the score of loads, for all workers at once: what lets `router.decide` price few pairs.  (pure)

For one holder, the bound of a worker is the price of its best load over the *best* link of the tier, without failures;
the harm is that of the prefill that is left in any case. With equal links and no failures bound and score agree, so
the search ends after the first pair. Arrays are columns in the order of the workers, times in ns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from router.cost import prefill_ns
from router.estimators import LinkCurve
from router.signals import Bools, Columns, Floats, Footprint


class Fleetwide(NamedTuple):
    """What all bounds of one decision share.

    Attributes:
        owners: blocks each worker has, by position, without zeros.
        wait: W of each worker; inf where the request may not go.
        backlog_in: how long each worker's way in is promised, negative once that has passed.
        total_tokens: length of the prompt.
    """

    columns: Columns
    owners: Mapping[int, int]
    wait: Floats
    backlog_in: Floats
    total_tokens: int
    footprint: Footprint

    def own(self) -> Floats:
        """``owners`` as a column."""
        own = np.zeros(len(self.wait))
        for position, blocks in self.owners.items():
            own[position] = blocks
        return own


def rest_ns(fleet: Fleetwide, blocks: int) -> Floats:
    """P(n − c | c) behind a prefix of ``blocks``; inf for workers that have as much themselves."""
    rest = prefill_ns(fleet.columns, fleet.total_tokens, blocks * fleet.footprint.block_tokens)
    for position, own in fleet.owners.items():
        if own >= blocks:
            rest[position] = np.inf
    return rest


def load_bound(
    fleet: Fleetwide, rest: Floats, blocks: int, backlog_out: float, link: LinkCurve, *, split: bool, tight: bool
) -> Floats:
    """Least time to the first token by any plan that loads from a holder of ``blocks``; inf where ``rest`` is.

    ``tight`` takes half the time more and is better for workers whose wait lies between start and end of the load.
    """
    wait = fleet.wait
    block_ns = fleet.footprint.block_bytes * link.byte_ns
    start = np.maximum(fleet.backlog_in, backlog_out)
    start += link.alpha_ns + fleet.footprint.fixed_bytes * link.byte_ns
    arrival = start + blocks * block_ns
    for position, own in fleet.owners.items():
        arrival[position] -= own * block_ns
    bound = np.maximum(wait, arrival)
    partial = start < wait
    if not tight:
        bound = np.where(partial, wait, bound) + rest
    else:
        bound += rest
        partial &= wait < arrival
        if partial[partial.argmax()]:
            bound = np.minimum(bound, _partial_bound(fleet, rest, start, block_ns, blocks, partial))
    return np.minimum(bound, _split_bound(fleet, rest, arrival, blocks, block_ns)) if split else bound


def _partial_bound(
    fleet: Fleetwide, rest: Floats, start: Floats, block_ns: float, blocks: int, partial: Bools
) -> Floats:
    """W + P(n − m | m) at a boundary no plan that fills the wait for the GPU passes."""
    columns, total = fleet.columns, fleet.total_tokens
    reach = np.minimum(fleet.own() + (fleet.wait - start) / block_ns + 1.0, float(blocks))
    cached = reach * fleet.footprint.block_tokens
    redo = columns.t0_ns + (total - cached) * (columns.token_ns + 0.5 * (total + cached) * columns.pair_ns)
    return np.where(partial & (rest < np.inf), fleet.wait + redo, np.inf)


def _split_bound(fleet: Fleetwide, rest: Floats, arrival: Floats, blocks: int, block_ns: float) -> Floats:
    """W + C(k*) + rest, with k* in closed form (see `router.cost.split_tokens`)."""
    columns, block_tokens, own = fleet.columns, fleet.footprint.block_tokens, fleet.own()
    token_ns = block_ns / block_tokens
    slack = np.maximum(arrival - fleet.wait - columns.t0_ns, 0.0)
    base = columns.token_ns + columns.pair_ns * (block_tokens * own)
    linear = base + token_ns
    root = np.sqrt(linear * linear + 2.0 * columns.pair_ns * slack)
    front = np.minimum(2.0 * slack / np.maximum(linear + root, 1e-300), np.maximum(blocks - own, 0.0) * block_tokens)
    compute = columns.t0_ns + front * (base + 0.5 * columns.pair_ns * front)
    met = arrival - front * token_ns
    return np.asarray(np.maximum(fleet.wait, np.minimum(fleet.wait + compute, met)) + rest, dtype=np.float64)
