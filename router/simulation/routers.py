"""Several simulated routers in the place of one: all hear the same, and every request goes to its own."""

from __future__ import annotations

from kvpool.cluster.routers import first_asked
from kvpool.plan import Route
from kvpool.reports import WorkerReport
from kvpool.types import MemberInfo, MemberState, RequestId, WorkerKey
from router.core import RouterCore
from router.door import RequestMeta


class SeveralRouters:
    """What `router.simulation.cluster.Cluster` needs of a router."""

    def __init__(self, cores: list[RouterCore]) -> None:
        self.cores = cores

    def route(self, meta: RequestMeta) -> Route:
        """See `RouterCore.route`, at the request's own router."""
        return self.cores[first_asked(len(self.cores), meta.request_id)].route(meta)

    def release(self, request_id: RequestId) -> None:
        """See `RouterCore.release`; clients tell all routers."""
        for core in self.cores:
            core.release(request_id)

    def on_report(self, report: WorkerReport) -> None:
        """See `RouterCore.on_report`."""
        for core in self.cores:
            core.on_report(report)

    def on_member_change(self, info: MemberInfo, state: MemberState | None) -> None:
        """See `RouterCore.on_member_change`."""
        for core in self.cores:
            core.on_member_change(info, state)

    def members(self) -> frozenset[WorkerKey]:
        """See `RouterCore.members`."""
        return self.cores[0].members()
