"""Routes made by hand, for tests and benchmarks that must know which worker does what.

They go the way of every route after the router has answered: same worker, same data plane, same checks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvpool.errors import UnavailableError
from kvpool.hashing import Namespace, block_hashes
from kvpool.metadata.watcher import MetadataWatcher
from kvpool.plan import REDO, LoadSlice, Plan, PlanKind, Route
from kvpool.types import MemberInfo, RequestId, Tier, WorkerId

LOAD_DEADLINE_NS = 30_000_000_000
STALL_NS = 5_000_000_000
EXPECTED_NS = 200_000_000
"""What the worker is told to expect of a load: short, so that it waits a moment before it computes instead."""


@dataclass(frozen=True, slots=True)
class ManualRouter:
    """Builds routes from a watched directory.

    Attributes:
        watcher: started; its owner closes it.
        namespace: of the cluster (`ClusterInfo.namespace`).
    """

    watcher: MetadataWatcher
    namespace: Namespace

    def member(self, worker_id: WorkerId) -> MemberInfo:
        """What a member announced.

        Raises:
            UnavailableError: it is not a member.
        """
        for key, member in self.watcher.members().items():
            if key.worker_id == worker_id:
                return member.info
        raise UnavailableError(f"{worker_id} is not a member of the pool")

    def held_blocks(self, worker_id: WorkerId, prompt: tuple[int, ...]) -> int:
        """Leading blocks of the prompt that the directory says the worker holds; 0 when it is not a member."""
        held = self.watcher.prefixes(block_hashes(prompt, self.namespace))
        tiers = [tiers for key, tiers in held.items() if key.worker_id == worker_id]
        return max((blocks for item in tiers for blocks in item.values()), default=0)

    def wait_held(self, worker_id: WorkerId, prompt: tuple[int, ...], blocks: int, timeout_s: float = 30.0) -> None:
        """Wait until the directory shows ``blocks`` leading blocks at the worker.

        Raises:
            UnavailableError: it does not within ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        while (held := self.held_blocks(worker_id, prompt)) < blocks:
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"{worker_id} holds {held} of {blocks} blocks", timeout_s=timeout_s)
            self.watcher.wait_for(lambda: False, 0.02)

    def redo(self, request_id: str, worker_id: WorkerId) -> Route:
        """Everything the worker lacks is prefilled there."""
        return self._route(request_id, worker_id, REDO)

    def load(
        self,
        request_id: str,
        worker_id: WorkerId,
        *,
        holder: WorkerId,
        blocks: tuple[int, int],
        deadline_ns: int = LOAD_DEADLINE_NS,
        stall_ns: int = STALL_NS,
    ) -> Route:
        """Blocks ``[start, stop)`` of the prompt come from ``holder``."""
        source = self.member(holder)
        piece = LoadSlice(*blocks, source.key, source.transport, source.data_address, Tier.HOST)
        plan = Plan(
            kind=PlanKind.LOAD,
            loads=(piece,),
            load_deadline_ns=deadline_ns,
            stall_ns=stall_ns,
            predicted_ttft_ns=EXPECTED_NS,
            predicted_load_ns=EXPECTED_NS,
        )
        return self._route(request_id, worker_id, plan)

    def _route(self, request_id: str, worker_id: WorkerId, plan: Plan) -> Route:
        info = self.member(worker_id)
        return Route(RequestId(request_id), f"manual-{request_id}", worker_id, info.key, info.control_address, plan)
