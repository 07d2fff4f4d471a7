"""Our policy: the least expected time to the first token over every worker and plan; and the same without loads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from router.decide import Decision, decide
from router.planning import Harm, Params
from router.signals import RequestView, Snapshot
from router.waiting import NEVER, Hold


@dataclass(frozen=True, slots=True)
class KVPoolPolicy:
    """`router.decide.decide` behind the policy interface."""

    params: Params = field(default_factory=Params)
    name: str = "kvpool"

    @property
    def hold(self) -> Hold:
        """See `router.policies.base.Policy`."""
        return self.params.hold

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """See `router.decide.decide`; ``rng`` is not used."""
        return decide(request, snapshot, self.params)


def redo_only(params: Params | None = None) -> KVPoolPolicy:
    """Our queue and redo prices, never a load: what the demo compares with."""
    return KVPoolPolicy(replace(params or Params(harm=Harm(), hold=NEVER), loads=False), "redo_only")
