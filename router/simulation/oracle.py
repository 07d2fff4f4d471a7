"""An oracle: our decision with the truth in place of what a router knows.  (pure)

It decides by the same rule over the same plans, but sees every queue, cache, link and curve as it is at that moment.
The mean TTFT above that of the oracle is what late reports, a lagging index and learned speeds cost. It knows no
future: neither what will arrive nor which load will die.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from kvpool.types import Tier, WorkerId
from router.decide import Decision
from router.estimators import LinkCurve, PrefillCurve
from router.kernel import Floats
from router.policies import Policy
from router.signals import RequestView, Snapshot
from router.simulation.network import Network
from router.simulation.parts import Node
from router.simulation.presets import Preset
from router.simulation.scenario import Timing
from router.waiting import Hold

ORACLE = "oracle"
AT_ONCE = Timing(dispatch_ns=0, report_ns=0, index_ns=0)
"""What an oracle knows, it knows at once."""


@dataclass(frozen=True, slots=True)
class TrueLinks:
    """Every link as it is: they are all alike."""

    link: LinkCurve
    nodes: int

    def curve(self, holder: WorkerId, reader: WorkerId, tier: Tier, now_ns: int) -> LinkCurve:
        """See `router.signals.LinkView`."""
        return self.link

    def row(self, holder: WorkerId, tier: Tier, now_ns: int) -> Floats:
        """See `router.signals.LinkView`."""
        return np.array([[self.link.alpha_ns] * self.nodes, [self.link.byte_ns] * self.nodes], dtype=np.float64)

    def best(self, tier: Tier) -> LinkCurve:
        """See `router.signals.LinkView`."""
        return self.link


class Oracle:
    """A policy that is shown the truth.

    Args:
        policy: decides.
        nodes, network, preset: the simulated cluster.
    """

    def __init__(self, policy: Policy, nodes: Sequence[Node], network: Network, preset: Preset) -> None:
        self._policy = policy
        self._nodes = {node.key: node for node in nodes}
        self._network = network
        self._preset = preset

    @property
    def name(self) -> str:
        """Name of the policy."""
        return self._policy.name

    @property
    def hold(self) -> Hold:
        """That of the policy."""
        return self._policy.hold

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """The policy's choice on the snapshot as it truly is."""
        return self._policy.choose(request, self._reveal(snapshot), rng)

    def _reveal(self, snapshot: Snapshot) -> Snapshot:
        columns, now_ns = snapshot.columns.copy(), snapshot.now_ns
        for position, view in enumerate(snapshot.workers):
            node = self._nodes.get(view.key)
            if node is None:
                continue
            columns.gpu_free_ns[position] = now_ns + node.engine.work_ns()
            columns.out_free_ns[position] = now_ns + self._network.backlog_out_ns(node.number)
            columns.in_free_ns[position] = now_ns + self._network.backlog_in_ns(node.number)
        curve = whole_curve(self._preset)
        columns.curves[:] = ((curve.t0_ns,), (curve.token_ns,), (curve.pair_ns,))
        link = LinkCurve(float(self._preset.alpha_ns), 1.0 / self._network.rate_bytes_per_ns)
        return snapshot._replace(columns=columns, links=TrueLinks(link, len(columns)), fastest=curve)


def whole_curve(preset: Preset) -> PrefillCurve:
    """Prefill of a whole prompt: every chunk pays the fixed time of a step, and on average half a chunk is not full."""
    curve = preset.curve
    per_token = curve.token_ns + curve.t0_ns / preset.chunk_tokens
    return PrefillCurve(0.5 * curve.t0_ns, per_token, curve.pair_ns)
