"""Clusters to decide in: everything that a snapshot can say, in ranges where prices are not lost in rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

from hypothesis import strategies as st

from kvpool.types import Tier, WorkerId, WorkerKey
from router.estimators import LinkCurve, PrefillCurve
from router.planning import Harm, Params
from router.signals import Features, Footprint, Snapshot
from tests.unit.router_kit import CURVE, FOOTPRINT, FixedFailures, Worker, key, snapshot

MOST_WORKERS = 7
times = st.floats(0.0, 1e11)
curves = st.builds(PrefillCurve, t0_ns=st.floats(0, 1e9), token_ns=st.floats(1.0, 1e7), pair_ns=st.floats(0.0, 1e4))
links = st.one_of(
    st.builds(LinkCurve, alpha_ns=st.floats(0, 1e9), byte_ns=st.floats(0.0, 1e4)),
    st.builds(LinkCurve, alpha_ns=st.floats(0, 1e6), byte_ns=st.floats(0.0, 1.0)),
)
features = st.builds(Features, split=st.booleans())
several = st.builds(Features, split=st.booleans(), stripes=st.sampled_from([1, 2, 3, 4, 4]))
rates = st.floats(0.0, 0.9)
harms = st.builds(
    Harm,
    base=st.floats(0.0, 3.0),
    follow=st.floats(0.0, 3.0),
    cap_ns=st.floats(1.0, 1e11),
    share=st.floats(0.0, 1.0),
    beside=st.floats(0.0, 1.0),
    keep=st.sampled_from([0.0, 0.5, 3.0]),
    several=st.sampled_from([0.0, 0.05]),
)
PLAIN = Params(harm=Harm())


@st.composite
def clusters(draw: st.DrawFn, least: int = 1) -> list[Worker]:
    size = draw(st.integers(least, 6))
    return [
        Worker(
            number=number,
            blocks=draw(st.sampled_from([0, 0, 1, 40, 99, 150])),
            wait_ns=draw(st.one_of(st.just(0.0), times, st.none())),
            in_ns=draw(st.one_of(st.just(0.0), times)),
            out_ns=draw(st.one_of(st.just(0.0), times)),
            requests=draw(st.integers(0, 3)),
            curve=draw(curves),
            tier=draw(st.sampled_from(Tier)),
            in_memory=draw(st.sampled_from([0, 0, 1, 40])),
            in_device=draw(st.sampled_from([0, 1, 40])),
            fill_byte_ns=draw(st.sampled_from([None, None, 0.0, 0.2, 1e3])),
        )
        for number in range(size)
    ]


@st.composite
def close_clusters(draw: st.DrawFn) -> list[Worker]:
    """Workers between which, and whose plans, it is a near thing; loads from several holders often pay."""
    size = draw(st.integers(2, MOST_WORKERS))
    return [
        Worker(
            number=number,
            blocks=draw(st.sampled_from([0, 0, 5, 20, 60, 90, 95, 99, 99])),
            wait_ns=draw(st.sampled_from([0.0, 0.0, 1e7, 3e7, 9e7, 0.2e9, 0.3e9])),
            in_ns=draw(st.sampled_from([0.0, 0.0, 2e7])),
            out_ns=draw(st.sampled_from([0.0, 0.0, 2e7, 5e7])),
            curve=replace(CURVE, token_ns=CURVE.token_ns * draw(st.sampled_from([0.8, 1.0, 1.0, 1.3]))),
            tier=draw(st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.HOST, Tier.DISK])),
            in_memory=draw(st.sampled_from([0, 0, 5, 40])),
            in_device=draw(st.sampled_from([0, 0, 5, 40])),
            fill_byte_ns=draw(st.sampled_from([None, None, None, 0.1, 0.5, 3.0])),
        )
        for number in range(size)
    ]


@dataclass(frozen=True)
class World:
    """A cluster and everything else that a decision sees."""

    workers: list[Worker]
    link: LinkCurve
    pairs: Mapping[tuple[WorkerId, WorkerId], LinkCurve] = field(default_factory=dict)
    rates: Mapping[WorkerKey, float] = field(default_factory=dict)
    features: Features = field(default_factory=Features)
    footprint: Footprint = FOOTPRINT

    def shot(self) -> Snapshot:
        return snapshot(
            self.workers,
            links=self.link,
            pairs=self.pairs,
            failures=FixedFailures(0.0, self.rates),
            features=self.features,
            footprint=self.footprint,
        )

    def faster(self, factor: float) -> World:
        """All links faster."""
        pairs = {pair: _faster(link, factor) for pair, link in self.pairs.items()}
        return replace(self, link=_faster(self.link, factor), pairs=pairs)


def _faster(link: LinkCurve, factor: float) -> LinkCurve:
    return LinkCurve(link.alpha_ns / factor, link.byte_ns / factor)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """All of the ranges, near things more often than chance would have them."""
    close = draw(st.booleans())
    workers = draw(close_clusters() if close else clusters(2))
    speeds = links
    if close:
        speeds = st.builds(LinkCurve, alpha_ns=st.just(1e6), byte_ns=st.sampled_from([0.5, 1.0, 2.0, 3.0, 8.0, 50.0]))
    names = [key(worker.number) for worker in workers]
    every = [(a.worker_id, b.worker_id) for a, b in combinations(names, 2)]
    own = [(name.worker_id, name.worker_id) for name in names]
    chosen = draw(st.lists(st.sampled_from([*every, *((b, a) for a, b in every), *own]), max_size=4, unique=True))
    failing = st.sampled_from([0.0, 0.0, 0.01, 0.01, 0.3, 0.8]) if close else rates
    return World(
        workers,
        draw(speeds),
        {pair: draw(speeds) for pair in chosen},
        {name: draw(failing) for name in names},
        draw(several),
        replace(FOOTPRINT, fixed_bytes=draw(st.sampled_from([0, 0, 10**7, 10**9]))),
    )
