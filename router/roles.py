"""Prefill and decode workers: who prefills a request, and who goes on after its first token.  (pure)

Roles are preferences, since every worker can do everything:

    no decode worker lives           everybody prefills and decodes what it prefilled
    no prefill worker can take it    the decode workers do both
    a short rest on a decode worker  it goes there alone: handing over would take longer than prefilling
    else                             a prefill worker computes the prompt and gives the first token, a decode worker
                                     loads the prompt's KV meanwhile and goes on

Handing over costs the pass that the decode worker computes the last tokens with, and what of the transfer the prefill
does not cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kvpool.plan import HandOver, LoadSlice, Plan, PlanKind
from kvpool.types import Role, Tier, WorkerKey
from router.decide import Decision
from router.planning import Params, Promise, Transfer
from router.signals import RequestView, Snapshot, usable_blocks


def narrow(request: RequestView, snapshot: Snapshot, decoders: Sequence[int]) -> Snapshot:
    """The snapshot in which exactly those workers are open that may prefill this request.

    Args:
        decoders: positions of the decode workers that live.
    """
    able = [at for at in decoders if snapshot.workers[at].key not in request.exclude]
    if not able:
        return snapshot
    closed = snapshot.columns.closed_ns
    others = [view.key not in request.exclude for view in snapshot.workers]
    if not (np.isfinite(closed) & others).any():
        return _open(snapshot, able, closed)
    alone = [at for at in able if _prefers_alone(request, snapshot, at)]
    if alone:
        return _open(snapshot, alone, np.full(len(closed), math.inf))
    return snapshot


def paced(
    request: RequestView,
    snapshot: Snapshot,
    decoders: Sequence[int],
    limit_ns: int | None,
    tpot_ns: Callable[[WorkerKey], float | None],
) -> Sequence[int]:
    """Of the decode workers that may take the request those that decode fast enough for it; the fastest one when none
    does.

    Args:
        decoders: positions of the decode workers that live.
        limit_ns: on the gap between its tokens.
        tpot_ns: the gap to expect on a worker; one whose speed is unknown counts as fast enough.
    """
    if limit_ns is None:
        return decoders
    keys = {at: snapshot.workers[at].key for at in decoders}
    gaps_ns = {at: tpot_ns(key) or 0.0 for at, key in keys.items() if key not in request.exclude}
    fast = [at for at, gap_ns in gaps_ns.items() if gap_ns <= limit_ns]
    return fast or sorted(gaps_ns, key=gaps_ns.__getitem__)[:1]


def hand_over(
    request: RequestView, snapshot: Snapshot, params: Params, decision: Decision, decoders: Sequence[int], name: str
) -> HandOver | None:
    """Who goes on after the first token, None when the worker that prefills does.

    The decode worker with the fewest requests; among equals the one that holds most of the prompt.

    Args:
        decoders: positions of the decode workers that live, or of those that are `paced`.
        name: decision id of the second part.
    """
    chosen = snapshot.workers[decision.position]
    able = [at for at in decoders if snapshot.workers[at].key not in request.exclude]
    if chosen.role is not Role.PREFILL or request.max_tokens < 2 or not able:
        return None
    columns = snapshot.columns
    position = min(
        able,
        key=lambda at: (columns.requests.item(at), -decision.own.item(at), columns.rank.item(at)),
    )
    view = snapshot.workers[position]
    stop = request.prompt_tokens // snapshot.footprint.block_tokens
    start = min(int(decision.own[position]), stop)
    if stop == start:
        return HandOver(view.key, view.control_address, name, Plan(PlanKind.REDO))
    link = snapshot.links.curve(chosen.key.worker_id, view.key.worker_id, Tier.HOST, snapshot.now_ns)
    load_ns = link.time_ns(_bytes(snapshot, stop - start))
    plan = Plan(
        kind=PlanKind.LOAD,
        loads=(LoadSlice(0, stop, chosen.key, chosen.transport, chosen.data_address, Tier.HOST),),
        load_deadline_ns=round(max(params.min_deadline_ns, params.deadline_factor * (decision.price_ns + load_ns))),
        stall_ns=round(max(params.min_stall_ns, load_ns)),
        predicted_load_ns=round(load_ns),
        patient=True,
    )
    return HandOver(view.key, view.control_address, name, plan)


def promise_of(snapshot: Snapshot, prefill: int, part: HandOver) -> Promise:
    """What the second part takes of the decode worker and of both ends of the link."""
    holder = snapshot.workers[prefill].key
    if not part.plan.loads:
        return Promise(part.worker, 0.0, 0)
    blocks = part.plan.loads[0].stop - part.plan.loads[0].start
    num_bytes = _bytes(snapshot, blocks)
    return Promise(part.worker, 0.0, 0, (Transfer(holder, num_bytes, float(part.plan.predicted_load_ns)),))


def _open(snapshot: Snapshot, positions: Sequence[int], closed: np.ndarray) -> Snapshot:
    columns = snapshot.columns.copy()
    columns.closed_ns[:] = closed
    columns.closed_ns[list(positions)] = 0.0
    return snapshot._replace(columns=columns)


def _prefers_alone(request: RequestView, snapshot: Snapshot, position: int) -> bool:
    """Whether prefilling what the decode worker lacks is over before a hand-over could be.

    A pass of fixed time is due in any case, for the tokens behind the last full block.
    """
    columns, footprint = snapshot.columns, snapshot.footprint
    key = snapshot.workers[position].key
    own = min(max(snapshot.prefixes.get(key, {}).values(), default=0), usable_blocks(request, footprint.block_tokens))
    cached = own * footprint.block_tokens
    new = request.prompt_tokens - cached
    work_ns = new * (columns.token_ns.item(position) + columns.pair_ns.item(position) * (cached + 0.5 * new))
    link = snapshot.links.best(Tier.HOST)
    missing = request.prompt_tokens // footprint.block_tokens - own
    return work_ns <= columns.t0_ns.item(position) + link.time_ns(_bytes(snapshot, missing))


def _bytes(snapshot: Snapshot, blocks: int) -> int:
    return snapshot.footprint.fixed_bytes + blocks * snapshot.footprint.block_bytes
