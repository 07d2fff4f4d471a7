"""The workers as the router knows them, kept as the columns that decisions read.  (pure)

Owns membership order, worker facts and `Columns`. Whoever changes a number says so here; nothing is computed at
decision time that could be kept. Link rows are cached per holder and rebuilt when a link of it was observed, the
membership changed, or `ROW_AGE_NS` passed (learned links fade slowly).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from kvpool.reports import WorkerLoad
from kvpool.types import MemberState, Role, Tier, WorkerId, WorkerKey
from router.estimators import LinkCurve, LinkEstimators, PrefillCurve
from router.kernel import Floats, Places
from router.ledger import Totals
from router.signals import NO_ARRIVALS, Columns, WorkerView

ROW_AGE_NS = 250_000_000
ARRIVAL_MEMORY_NS = 30_000_000_000  # requests older than this hardly count in a worker's arrival rate
_MAX_EXPONENT = 50.0
MAX_PRESSURE = 16.0
MAX_PLACES = 256


class Fleet:
    """Members, their facts and their columns. Not thread-safe.

    Args:
        links: learned links, read when a row is built.
    """

    def __init__(self, links: LinkEstimators) -> None:
        self._links = links
        self._rows: dict[tuple[WorkerId, Tier], tuple[int, Floats]] = {}
        self.workers: tuple[WorkerView, ...] = ()
        self.index: dict[WorkerKey, int] = {}
        self._positions: dict[WorkerId, list[int]] = {}  # two for a moment when a worker comes back
        self.columns = Columns.zeros(0)
        self._arrivals_since_ns = 0
        self._fastest: PrefillCurve | None = None
        self._pressure_known = False
        self._decoders: tuple[int, ...] = ()
        self._places: dict[int, tuple[tuple[WorkerKey, ...], Places]] = {}
        self._borrowers: set[WorkerKey] = set()
        self._borrowing: list[int] | None = None

    def __len__(self) -> int:
        return len(self.workers)

    def get(self, key: WorkerKey) -> WorkerView | None:
        """Facts about a member, None when it is not one."""
        position = self.index.get(key)
        return None if position is None else self.workers[position]

    def put(self, view: WorkerView, curve: PrefillCurve, *, own: bool = True) -> None:
        """Add a member or replace its facts; its load survives when the new view has none, and the curve is only that
        of a new one."""
        position = self.index.get(view.key)
        if position is None:
            self._rebuild(list(range(len(self.workers))), (view,))
            self._classify(len(self.workers) - 1)
            self.set_curve(view.key, curve, own=own)
            return
        if view.load is None:
            view = replace(view, load=self.workers[position].load)
        self._replace(position, view)
        self._classify(position)

    def remove(self, key: WorkerKey) -> bool:
        """Drop a member; False when it was none."""
        position = self.index.get(key)
        if position is None:
            return False
        self._borrowers.discard(key)
        self._rebuild([i for i in range(len(self.workers)) if i != position], ())
        return True

    def set_load(self, key: WorkerKey, load: WorkerLoad, now_ns: int) -> None:
        """A member's newest report. An idle worker need not report again before it gets work; its membership lease
        says that it lives."""
        position = self.index[key]
        self._replace(position, replace(self.workers[position], load=load))
        self.columns.empty_blocks[position] = load.empty_blocks if load.total_blocks else math.inf
        self.columns.turnover[position] = 1.0 / load.idle_ns if load.idle_ns else 0.0
        self._pressure_known = False
        idle = load.waiting_requests == 0 and load.running_requests == 0
        self.columns.reported_ns[position] = math.inf if idle else now_ns

    def set_totals(self, key: WorkerKey, totals: Totals) -> None:
        """What is promised with a member."""
        position = self.index.get(key)
        if position is None:
            return
        load = self.workers[position].load
        columns = self.columns
        columns.gpu_free_ns[position] = totals.gpu_free_ns
        columns.in_free_ns[position] = totals.in_free_ns
        columns.out_free_ns[position] = totals.out_free_ns
        reported = 0 if load is None else load.waiting_requests + load.running_requests
        columns.requests[position] = reported + totals.requests
        columns.queued_tokens[position] = totals.tokens + (0 if load is None else load.queued_prefill_tokens)

    def note_arrival(self, position: int, now_ns: int) -> None:
        """A request was routed to the worker, which must report from now on.

        Counts carry a common factor that grows with time, so that all of them decay without being touched.
        """
        arrivals, reported_ns = self.columns.arrivals, self.columns.reported_ns
        exponent = (now_ns - self._arrivals_since_ns) / ARRIVAL_MEMORY_NS
        if exponent > _MAX_EXPONENT:
            arrivals[:] = np.maximum(arrivals * math.exp(-exponent), NO_ARRIVALS)
            self._arrivals_since_ns, exponent = now_ns, 0.0
        arrivals[position] += math.exp(exponent)
        if reported_ns.item(position) == math.inf:
            reported_ns[position] = now_ns

    def arrival_scale(self, now_ns: int) -> float:
        """What turns `Columns.arrivals` into requests per ns now."""
        exponent = (now_ns - self._arrivals_since_ns) / ARRIVAL_MEMORY_NS
        return math.exp(-min(exponent, 2 * _MAX_EXPONENT)) / ARRIVAL_MEMORY_NS

    def set_curve(self, key: WorkerKey, curve: PrefillCurve, *, own: bool = True) -> None:
        """What was learned of a member's prefill, beside what decodes there now (`PrefillCurve.beside`).

        Args:
            own: from its own prefills; else it is the curve of all, and `lend` keeps it up to date.
        """
        if own is (key in self._borrowers):
            self._borrowers.symmetric_difference_update((key,))
            self._borrowing = None
        self._write_curve(self.index[key], curve)

    def lend(self, curve: PrefillCurve) -> None:
        """The curve of all members is another now. Those that have not prefilled yet must not keep an older one: a
        worker that looks slow gets no work, and would never show that it is not."""
        if self._borrowing is None:
            self._borrowing = [self.index[key] for key in self._borrowers]
        if self._borrowing:
            self._write_curve(self._borrowing, curve)

    def fastest(self) -> PrefillCurve:
        """A curve no member's is below."""
        if self._fastest is None:
            columns = self.columns
            self._fastest = PrefillCurve(
                float(columns.t0_ns.min()), float(columns.token_ns.min()), float(columns.pair_ns.min()), 1.0
            )
        return self._fastest

    def settle(self) -> Columns:
        """The columns, all of them as the newest reports say.

        Pressure is how soon what leaves each worker's cache would have been wanted again, against the mean of all.
        Whatever has not been used for t is wanted again at a rate of about 1/t (reuse has a heavy tail), so a cache
        whose oldest block was used a minute ago gives up four times as much as one where it was four minutes ago.
        """
        columns = self.columns
        if not self._pressure_known:
            mean = float(columns.turnover.mean()) if len(columns) else 0.0
            columns.pressure[:] = np.minimum(columns.turnover / mean, MAX_PRESSURE) if mean > 0.0 else 1.0
            self._pressure_known = True
        return columns

    def decoders(self) -> tuple[int, ...]:
        """Positions of the decode workers that live."""
        return self._decoders

    def use_links(self, links: LinkEstimators) -> None:
        """Links come from here from now on."""
        self._links = links
        self._clear_rows()

    def links_changed(self, holder: WorkerId) -> None:
        """A link from this holder was observed."""
        for tier in Tier:
            self._rows.pop((holder, tier), None)
        self.columns.linked_ns[:, self._positions.get(holder, ())] = 0.0

    def curve(self, holder: WorkerId, reader: WorkerId, tier: Tier, now_ns: int) -> LinkCurve:
        """What to expect of one link now."""
        return self._links.curve(holder, reader, tier, now_ns)

    def row(self, holder: WorkerId, tier: Tier, now_ns: int) -> Floats:
        """See `router.signals.LinkView`."""
        cached = self._rows.get((holder, tier))
        if cached is not None and 0 <= now_ns - cached[0] < ROW_AGE_NS:
            return cached[1]
        row = self._build_row(holder, tier, now_ns)
        self._rows[holder, tier] = (now_ns, row)
        if tier is not Tier.DISK:
            self.columns.linked_ns[tier, self._positions.get(holder, ())] = now_ns + ROW_AGE_NS
        return row

    def places(self, keys: tuple[WorkerKey, ...]) -> Places:
        """Positions of those of the workers that are members. Kept by the identity of the tuple: who holds a hot prefix
        is mostly told by the same one as before."""
        kept = self._places.get(id(keys))
        if kept is not None and kept[0] is keys:
            return kept[1]
        if len(self._places) >= MAX_PLACES:
            self._places.clear()
        found = [position for position in map(self.index.get, keys) if position is not None]
        made = np.array(found, dtype=np.int64)
        self._places[id(keys)] = (keys, made)
        return made

    def best(self, tier: Tier) -> LinkCurve:
        """A curve no link of the tier is better than."""
        return self._links.best(tier)

    def _write_curve(self, where: int | list[int], curve: PrefillCurve) -> None:
        self.columns.t0_ns[where] = curve.t0_ns
        self.columns.token_ns[where] = curve.token_ns
        self.columns.pair_ns[where] = curve.pair_ns
        self._fastest = None

    def _build_row(self, holder: WorkerId, tier: Tier, now_ns: int) -> Floats:
        common, known = self._links.curves_from(holder, tier, now_ns)
        row = np.empty((2, len(self.workers)))
        row[0], row[1] = common.alpha_ns, common.byte_ns
        for reader, curve in known:
            for position in self._positions.get(reader, ()):
                row[0, position], row[1, position] = curve.alpha_ns, curve.byte_ns
        return row

    def _clear_rows(self) -> None:
        self._rows.clear()
        self.columns.linked_ns.fill(0.0)

    def _replace(self, position: int, view: WorkerView) -> None:
        workers = list(self.workers)
        workers[position] = view
        self.workers = tuple(workers)

    def _rebuild(self, kept: list[int], added: tuple[WorkerView, ...]) -> None:
        self.columns = self.columns.chosen(kept, len(added))
        self.workers = (*(self.workers[i] for i in kept), *added)
        keys = [view.key for view in self.workers]
        self.index = {key: position for position, key in enumerate(keys)}
        self._positions = {}
        for position, key in enumerate(keys):
            self._positions.setdefault(key.worker_id, []).append(position)
        order = sorted(range(len(keys)), key=lambda i: (keys[i].worker_id, keys[i].worker_epoch))
        self.columns.rank[order] = np.arange(len(order))
        self._clear_rows()
        self._places.clear()
        self._borrowing = None
        self._fastest = None
        self._pressure_known = False
        self._find_decoders()

    def _classify(self, position: int) -> None:
        view = self.workers[position]
        alive = view.state is MemberState.ALIVE
        self.columns.holder[position] = alive
        open_to_requests = alive and view.role is not Role.DECODE
        self.columns.closed_ns[position] = 0.0 if open_to_requests else math.inf
        self._find_decoders()

    def _find_decoders(self) -> None:
        self._decoders = tuple(
            position
            for position, view in enumerate(self.workers)
            if view.role is Role.DECODE and view.state is MemberState.ALIVE
        )
