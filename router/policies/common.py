"""What every rule needs: the facts of one request, and a decision built from the worker a rule picked.  (pure)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from router import cost
from router.cost import Price
from router.decide import Decision, LoadPrice
from router.kernel import OWN, REDO, WAIT, Floats
from router.planning import Params, build_plan, build_promise
from router.policies.base import AtOnce
from router.scores import Case, open_case
from router.signals import Holding, RequestView, Snapshot, holdings


@dataclass(frozen=True, slots=True)
class Facts:
    """One request against one snapshot, as columns in the order of the workers.

    Attributes:
        case: the same for `router.decide`.
        candidates: positions of eligible workers in key order, so that rules do not depend on the snapshot's order.
        own: blocks each worker holds; ``own_tokens`` the same in tokens.
        wait: predicted wait for the GPU.
        redo: predicted prefill of what the worker lacks.
    """

    request: RequestView
    snapshot: Snapshot
    case: Case
    candidates: list[int]
    held: list[Holding]
    own: Floats
    wait: Floats
    redo: Floats

    @property
    def own_tokens(self) -> Floats:
        """Prompt tokens each worker holds."""
        return self.own * self.snapshot.footprint.block_tokens

    @property
    def uncached_tokens(self) -> Floats:
        """Prompt tokens each worker lacks."""
        return self.request.prompt_tokens - self.own_tokens

    def redo_price(self, position: int) -> Price:
        """Redo on one worker."""
        return cost.price_redo(float(self.wait[position]), float(self.redo[position]), int(self.own[position]))

    def least(self, values: Floats, rng: Random | None = None) -> int:
        """Candidate with the least value; the first in key order among equals, or a random one."""
        best = min(float(values[i]) for i in self.candidates)
        tied = [i for i in self.candidates if float(values[i]) == best]
        return rng.choice(tied) if rng is not None and len(tied) > 1 else tied[0]

    def best_holder(self, reader: int) -> Holding | None:
        """The longest prefix of any other worker that may be read; the first in key order among equals."""
        columns = self.snapshot.columns
        others = [item for item in self.held if item.position != reader and columns.holder[item.position]]
        return min(others, key=lambda item: (-item.blocks, columns.rank[item.position]), default=None)


def gather(request: RequestView, snapshot: Snapshot, params: Params) -> Facts:
    """Work the facts out.

    Raises:
        UnavailableError: no worker is eligible.
    """
    case = open_case(request, snapshot, params, own_memory=False)
    columns = snapshot.columns
    wait = case.kept[WAIT]
    order: Sequence[int] = np.argsort(columns.rank).tolist()
    return Facts(
        request=request,
        snapshot=snapshot,
        case=case,
        candidates=[i for i in order if wait[i] < np.inf],
        held=holdings(request, snapshot),
        own=case.kept[OWN],
        wait=wait,
        redo=case.kept[REDO],
    )


@dataclass(frozen=True, slots=True)
class Rule(AtOnce):
    """Base of the baselines: how a picked worker becomes a decision with the same prices and promises as ours."""

    params: Params = field(default_factory=Params)

    def facts(self, request: RequestView, snapshot: Snapshot) -> Facts:
        """See `gather`."""
        return gather(request, snapshot, self.params)

    def redo_on(self, facts: Facts, position: int) -> Decision:
        """Redo what the worker at ``position`` lacks."""
        return self._decision(facts, position, facts.redo_price(position), None)

    def load_on(self, facts: Facts, position: int, source: Holding) -> Decision:
        """Load everything the source has and the worker lacks, then redo the rest."""
        load = cost.price_whole_load(facts.case.pair(position, source), self.params.costs)
        if load is None:
            return self.redo_on(facts, position)
        holder, reader = (facts.snapshot.workers[at].key.worker_id for at in (source.position, position))
        link = facts.snapshot.links.curve(holder, reader, source.tier, facts.snapshot.now_ns)
        return self._decision(facts, position, load, source, link.byte_ns)

    def _decision(
        self, facts: Facts, position: int, price: Price, source: Holding | None, byte_ns: float = 0.0
    ) -> Decision:
        snapshot = facts.snapshot
        own = int(facts.own[position])
        plan = build_plan(snapshot, self.params, facts.held, price, source, position, own)
        return Decision(
            request_id=facts.request.request_id,
            worker=snapshot.workers[position].key,
            position=position,
            plan=plan,
            price_ns=round(price.ttft_ns),
            kept=facts.case.kept,
            tried=(),
            priced=() if source is None else (LoadPrice(position, source, price),),
            promise=build_promise(facts.request, snapshot, plan, price, position, own, byte_ns),
            own_blocks=own,
            holders=len(facts.held),
        )
