"""What every rule needs: the facts of one request, and a decision built from the worker a rule picked.  (pure)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from router import cost
from router.cost import Costs, Pair, Price
from router.decide import Decision, LoadPrice
from router.planning import Params, build_plan, build_promise
from router.scores import nobody, open_waits
from router.signals import Floats, Holding, RequestView, Snapshot, holdings


@dataclass(frozen=True, slots=True)
class Facts:
    """One request against one snapshot, as columns in the order of the workers.

    Attributes:
        candidates: positions of eligible workers in key order, so that rules do not depend on the snapshot's order.
        own: blocks each worker holds; ``own_tokens`` the same in tokens.
        wait: predicted wait for the GPU.
        redo: predicted prefill of what the worker lacks.
    """

    request: RequestView
    snapshot: Snapshot
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


def gather(request: RequestView, snapshot: Snapshot, costs: Costs) -> Facts:
    """Work the facts out.

    Raises:
        UnavailableError: no worker is eligible.
    """
    wait = open_waits(request, snapshot, costs)
    columns = snapshot.columns
    held = holdings(request, snapshot)
    own = np.zeros(len(columns))
    for holding in held:
        own[holding.position] = holding.blocks
    block_tokens = snapshot.footprint.block_tokens
    order: Sequence[int] = np.argsort(columns.rank).tolist()
    candidates = [i for i in order if wait[i] < np.inf]
    if not candidates:
        raise nobody(request, snapshot)
    owners = {holding.position: holding.blocks for holding in held}
    return Facts(
        request=request,
        snapshot=snapshot,
        candidates=candidates,
        held=held,
        own=own,
        wait=wait,
        redo=cost.redo_ns(columns, request.prompt_tokens, owners, block_tokens),
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """Base of the baselines: how a picked worker becomes a decision with the same prices and promises as ours."""

    params: Params = field(default_factory=Params)

    def facts(self, request: RequestView, snapshot: Snapshot) -> Facts:
        """See `gather`."""
        return gather(request, snapshot, self.params.costs)

    def redo_on(self, facts: Facts, position: int) -> Decision:
        """Redo what the worker at ``position`` lacks."""
        return self._decision(facts, position, facts.redo_price(position), None)

    def load_on(self, facts: Facts, position: int, source: Holding) -> Decision:
        """Load everything the source has and the worker lacks, then redo the rest."""
        snapshot, columns = facts.snapshot, facts.snapshot.columns
        key = snapshot.workers[source.position].key
        now_ns = snapshot.now_ns
        link = snapshot.links.curve(key.worker_id, snapshot.workers[position].key.worker_id, source.tier, now_ns)
        busy_ns = max(float(columns.out_free_ns[source.position]), float(columns.in_free_ns[position])) - now_ns
        pair = Pair(
            wait_ns=float(facts.wait[position]),
            redo_ns=float(facts.redo[position]),
            own_blocks=int(facts.own[position]),
            held_blocks=source.blocks,
            total_tokens=facts.request.prompt_tokens,
            backlog_ns=max(busy_ns, 0.0),
            alpha_ns=link.alpha_ns,
            byte_ns=link.byte_ns,
            failure=snapshot.failures.probability(key, now_ns),
            t0_ns=float(columns.t0_ns[position]),
            token_ns=float(columns.token_ns[position]),
            pair_ns=float(columns.pair_ns[position]),
        )
        load = cost.price_whole_load(pair, snapshot.footprint, self.params.costs)
        if load is None:
            return self.redo_on(facts, position)
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
            owners={holding.position: holding.blocks for holding in facts.held},
            wait=facts.wait,
            redo=facts.redo,
            loads=() if source is None else (LoadPrice(position, source, price),),
            promise=build_promise(facts.request, snapshot, plan, price, position, own, byte_ns),
            own_blocks=own,
            holders=len(facts.held),
        )
