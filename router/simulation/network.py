"""Links of the simulated cluster: transfers share the bandwidth of both of their ends.

Every node has one way out and one way in, each of a fixed bandwidth. A transfer runs at the smaller of its equal
shares of both ends (times a factor below 1 for a straggler), after a latency α. Rates are worked out anew whenever a
transfer starts or ends at one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from router.simulation.events import EventLoop


@dataclass(slots=True)
class Flow:
    """One transfer. ``moved`` counts bytes up to ``since_ns``.

    Attributes:
        total: bytes to move.
        factor: share of its fair rate a straggler reaches.
        on_done: called once when all bytes have arrived.
    """

    source: int
    target: int
    total: float
    factor: float
    on_done: Callable[[Flow], None]
    started_ns: int
    moved: float = 0.0
    rate: float = 0.0
    since_ns: int = 0
    version: int = 0
    open: bool = False
    ended: bool = False

    def arrived(self, now_ns: int) -> float:
        """Bytes that have arrived by ``now_ns``."""
        if not self.open or self.ended:
            return self.moved
        return min(self.total, self.moved + self.rate * (now_ns - self.since_ns))


@dataclass(slots=True)
class _End:
    flows: dict[int, Flow] = field(default_factory=dict)


class Network:
    """All links of a cluster.

    Args:
        loop: simulated time.
        nodes: number of nodes.
        bandwidth_bytes_per_s: of each direction of each node.
        alpha_ns: latency of a transfer.
    """

    def __init__(self, loop: EventLoop, nodes: int, bandwidth_bytes_per_s: float, alpha_ns: int) -> None:
        self._loop = loop
        self._rate = bandwidth_bytes_per_s / 1e9
        self._alpha_ns = alpha_ns
        self._out = [_End() for _ in range(nodes)]
        self._in = [_End() for _ in range(nodes)]
        self.bytes_moved = 0.0

    @property
    def rate_bytes_per_ns(self) -> float:
        """Bandwidth of one end."""
        return self._rate

    def backlog_out_ns(self, node: int) -> float:
        """Time to move all that is on its way out of a node."""
        return self._backlog_ns(self._out[node])

    def backlog_in_ns(self, node: int) -> float:
        """Time to move all that is on its way into a node."""
        return self._backlog_ns(self._in[node])

    def _backlog_ns(self, end: _End) -> float:
        now_ns = self._loop.now_ns
        return sum(flow.total - flow.arrived(now_ns) for flow in end.flows.values()) / self._rate

    def start(
        self, source: int, target: int, total: float, on_done: Callable[[Flow], None], factor: float = 1.0
    ) -> Flow:
        """Begin a transfer of ``total`` bytes."""
        flow = Flow(source, target, max(1.0, total), factor, on_done, self._loop.now_ns)
        self._loop.after(self._alpha_ns, self._open, flow)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Give a transfer up; what has arrived stays counted. May be repeated."""
        if flow.ended:
            return
        flow.moved = flow.arrived(self._loop.now_ns)
        self._close(flow)

    def _open(self, flow: Flow) -> None:
        if flow.ended:
            return
        flow.open = True
        flow.since_ns = self._loop.now_ns
        self._out[flow.source].flows[id(flow)] = flow
        self._in[flow.target].flows[id(flow)] = flow
        self._share(flow)

    def _close(self, flow: Flow) -> None:
        flow.ended = True
        flow.version += 1
        self.bytes_moved += flow.moved
        if flow.open:
            del self._out[flow.source].flows[id(flow)]
            del self._in[flow.target].flows[id(flow)]
            self._share(flow)

    def _share(self, changed: Flow) -> None:
        """Work out the rates of every transfer that shares an end with ``changed``."""
        touched = {**self._out[changed.source].flows, **self._in[changed.target].flows}
        now_ns = self._loop.now_ns
        for flow in touched.values():
            sharers = max(len(self._out[flow.source].flows), len(self._in[flow.target].flows))
            rate = self._rate / sharers * flow.factor
            if rate == flow.rate:
                continue
            flow.moved = flow.arrived(now_ns)
            flow.since_ns = now_ns
            flow.rate = rate
            flow.version += 1
            rest_ns = int((flow.total - flow.moved) / rate) + 1
            self._loop.after(rest_ns, self._finish, flow, flow.version)

    def _finish(self, flow: Flow, version: int) -> None:
        if flow.ended or flow.version != version:
            return
        flow.moved = flow.total
        self._close(flow)
        flow.on_done(flow)
