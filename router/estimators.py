"""What the router learns from reports: prefill curves, link curves, failure rates.  (pure)

Every estimator is a plain object that is told observations with their time and asked for a curve; it knows no clock
and no RNG, and `to_dict`/`from_dict` carry it across a router restart. Nothing here decides anything.

Both curves are linear in features with coefficients ≥ 0 and are fitted on *relative* error (weights 1/T²):

    prefill  T(u | c) = t0 + (a + d·D)·u + b·(u·c + u²/2)   u new tokens over c cached ones beside D decoding requests
    link     T(bytes) = α + bytes/β

Invariants: coefficients are finite and ≥ 0; a curve exists before the first sample (the prior); the first sample
rescales the prior, whose *shape* is trusted more than its speed; one outlier moves a curve by a bounded step, a run
of them on one side is drift and is followed at once; an estimate that is no longer observed fades back to its
parent, so that a link found slow is tried again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from kvpool.types import Tier, WorkerEpoch, WorkerId, WorkerKey
from router.fit import Features, RelativeFit

PREFILL_FORGETTING = 0.99
LINK_FORGETTING = 0.9
LINK_HALF_LIFE_NS = 60_000_000_000  # an unobserved link fades to its parent with this half-life
MAX_MOMENT_NS = 1 << 62
FAILURE_HALF_LIFE_NS = 30_000_000_000
FAILURE_PRIOR = 0.01
FAILURE_PRIOR_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Predicted time of one prefill.

    Attributes:
        t0_ns: fixed time of a pass.
        token_ns: time per new token (``a``).
        pair_ns: time per pair of new token and token attended to (``b``).
        p90_ratio: 90th percentile of observed / predicted.
        beside_ns: extra time per new token for every request that decodes beside it (``d``).
    """

    t0_ns: float
    token_ns: float
    pair_ns: float
    p90_ratio: float = 1.5
    beside_ns: float = 0.0

    def beside(self, decoding: int) -> PrefillCurve:
        """The curve while ``decoding`` requests share the steps."""
        if not self.beside_ns or not decoding:
            return self
        return replace(self, token_ns=self.token_ns + self.beside_ns * decoding, beside_ns=0.0)

    def time_ns(self, new_tokens: float, context_tokens: float) -> float:
        """T(u | c) in nanoseconds; 0 when there is nothing to compute."""
        if new_tokens <= 0:
            return 0.0
        pairs = new_tokens * (context_tokens + 0.5 * new_tokens)
        return self.t0_ns + self.token_ns * new_tokens + self.pair_ns * pairs


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """Predicted time of one load: ``alpha_ns + bytes * byte_ns``; ``p90_ratio`` as in `PrefillCurve`."""

    alpha_ns: float
    byte_ns: float
    p90_ratio: float = 1.5

    def time_ns(self, num_bytes: float) -> float:
        """α + bytes/β in nanoseconds."""
        return self.alpha_ns + self.byte_ns * num_bytes

    @property
    def bytes_per_second(self) -> float:
        """β in human units; infinite for a free link."""
        return 1e9 / self.byte_ns if self.byte_ns > 0 else math.inf


PREFILL_PRIOR = PrefillCurve(t0_ns=10e6, token_ns=200e3, pair_ns=10.0, beside_ns=400.0)
"""A small accelerator or a big CPU. Slow on purpose: before the first sample a load is worth trying."""

LINK_PRIORS = {
    Tier.DEVICE: LinkCurve(alpha_ns=1e6, byte_ns=0.5),
    Tier.HOST: LinkCurve(alpha_ns=1e6, byte_ns=0.6),
    Tier.DISK: LinkCurve(alpha_ns=3e6, byte_ns=1.0),
}
"""2, 1.7 and 1 GB/s: slower than most links, faster than redoing on most models."""


def _prefill_features(new_tokens: float, context_tokens: float, decoding: float) -> Features:
    return (1.0, new_tokens, new_tokens * (context_tokens + 0.5 * new_tokens), new_tokens * decoding)


_PREFILL_PROBES = tuple(
    _prefill_features(u, c, d)
    for u, c, d in ((512, 0, 0), (2048, 0, 0), (8192, 0, 0), (512, 8192, 0), (2048, 0, 16), (2048, 0, 64))
)
_LINK_PROBES: tuple[Features, ...] = ((1.0, 1e5), (1.0, 1e6), (1.0, 1e8))


class PrefillEstimators:
    """Prefill curves of all workers; a worker without samples borrows the curve of all of them."""

    def __init__(self, prior: PrefillCurve = PREFILL_PRIOR) -> None:
        self._prior = prior
        self._all = self._new_fit(prior)
        self._fits: dict[WorkerId, RelativeFit] = {}
        self._curves: dict[WorkerId, PrefillCurve] = {}
        self._shared = prior

    def observe(
        self, worker: WorkerId, new_tokens: int, context_tokens: int, elapsed_ns: int, decoding: int = 0
    ) -> None:
        """Learn one prefill of a single request, beside ``decoding`` requests that decoded."""
        features = _prefill_features(new_tokens, context_tokens, decoding)
        fit = self._fits.get(worker)
        if fit is None:
            fit = self._fits[worker] = self._new_fit(self._shared)
        self._all.observe(features, elapsed_ns)
        fit.observe(features, elapsed_ns)
        self._shared = self._as_curve(self._all)
        self._curves[worker] = self._as_curve(fit)

    def curve(self, worker: WorkerId) -> PrefillCurve:
        """The worker's curve, the shared one before its first sample, the prior before any."""
        return self._curves.get(worker, self._shared)

    @property
    def shared(self) -> PrefillCurve:
        """The curve of all workers, which those without samples borrow."""
        return self._shared

    def samples(self, worker: WorkerId) -> int:
        """Passes learned from this worker."""
        fit = self._fits.get(worker)
        return 0 if fit is None else fit.count

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker that left for good."""
        self._fits.pop(worker, None)
        self._curves.pop(worker, None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the inverse of `restore`."""
        return {"all": self._all.to_dict(), "workers": {name: fit.to_dict() for name, fit in self._fits.items()}}

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `to_dict` saved.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it did not save this; drop the object then.
        """
        self._all.restore(data["all"])
        self._shared = self._as_curve(self._all) if self._all.count else self._prior
        for name, saved in data["workers"].items():
            fit = self._new_fit(self._shared)
            fit.restore(saved)
            self._fits[WorkerId(name)] = fit
            self._curves[WorkerId(name)] = self._as_curve(fit)

    @staticmethod
    def _new_fit(prior: PrefillCurve) -> RelativeFit:
        coefficients = (prior.t0_ns, prior.token_ns, prior.pair_ns, prior.beside_ns)
        return RelativeFit(coefficients, _PREFILL_PROBES, PREFILL_FORGETTING)

    @staticmethod
    def _as_curve(fit: RelativeFit) -> PrefillCurve:
        t0_ns, token_ns, pair_ns, beside_ns = fit.coefficients
        return PrefillCurve(t0_ns, token_ns, pair_ns, max(1.0, fit.quantile(0.9)), beside_ns)


LinkKey = tuple[WorkerId, WorkerId, Tier]
"""(holder, reader, tier)."""


@dataclass(slots=True)
class _Link:
    fit: RelativeFit
    curve: LinkCurve
    last_ns: int
    bytes: int = 0


class LinkEstimators:
    """Link curves per (holder, reader, tier), with the curve of the tier as parent and a prior above it."""

    def __init__(self, priors: dict[Tier, LinkCurve] | None = None, max_links: int = 100_000) -> None:
        self._priors = dict(LINK_PRIORS if priors is None else priors)
        self._tiers: dict[Tier, _Link] = {}
        self._links: dict[LinkKey, _Link] = {}
        self._readers: dict[tuple[WorkerId, Tier], set[WorkerId]] = {}
        self._max_links = max_links
        self._best: dict[Tier, LinkCurve] = {}

    def observe(self, key: LinkKey, num_bytes: int, elapsed_ns: int, now_ns: int, queued_bytes: int = 0) -> None:
        """Learn one finished load.

        Args:
            num_bytes: what was read.
            elapsed_ns: from its start to its end.
            queued_bytes: bytes of other loads that shared the link meanwhile; they took part of the time.
        """
        if num_bytes <= 0 or elapsed_ns <= 0:
            return
        tier = key[2]
        parent = self._tiers.get(tier)
        if parent is None:
            parent = self._tiers[tier] = self._new_link(self._priors[tier], now_ns)
        link = self._links.get(key)
        if link is None:
            self._make_room()
            # Not the parent's shape: links of unlike speed with loads of one size make that up out of noise.
            link = self._new_link(self._priors[tier], now_ns)
            self._add(key, link)
        for target in (parent, link):
            target.fit.observe((1.0, float(num_bytes + queued_bytes)), elapsed_ns)
            target.curve = self._as_curve(target.fit)
            target.last_ns = now_ns
            target.bytes += num_bytes
        self._best.clear()

    def curve(self, holder: WorkerId, reader: WorkerId, tier: Tier, now_ns: int) -> LinkCurve:
        """What to expect of this link now."""
        link = self._links.get((holder, reader, tier))
        parent = self._parent_curve(tier, now_ns)
        return parent if link is None else _fade(link.curve, parent, now_ns - link.last_ns)

    def curves_from(
        self, holder: WorkerId, tier: Tier, now_ns: int
    ) -> tuple[LinkCurve, list[tuple[WorkerId, LinkCurve]]]:
        """What to expect now of all links from a holder: what is common, and the readers that have a curve of their
        own."""
        parent = self._parent_curve(tier, now_ns)
        known = []
        for reader in self._readers.get((holder, tier), ()):
            link = self._links[holder, reader, tier]
            known.append((reader, _fade(link.curve, parent, now_ns - link.last_ns)))
        return parent, known

    def best(self, tier: Tier) -> LinkCurve:
        """A curve no link of the tier is better than, at any time: the bound that prunes candidates."""
        best = self._best.get(tier)
        if best is None:
            curves = [self._priors[tier]]
            if tier in self._tiers:
                curves.append(self._tiers[tier].curve)
            curves.extend(link.curve for key, link in self._links.items() if key[2] is tier)
            best = LinkCurve(min(c.alpha_ns for c in curves), min(c.byte_ns for c in curves), 1.0)
            self._best[tier] = best
        return best

    def known(self) -> dict[LinkKey, tuple[LinkCurve, int, int]]:
        """Every learned link: its own curve, samples and bytes, for the status."""
        return {key: (link.curve, link.fit.count, link.bytes) for key, link in self._links.items()}

    def to_dict(self, max_links: int) -> dict[str, Any]:
        """Plain data of the tiers and the ``max_links`` links observed last; the inverse of `restore`."""
        newest = sorted(self._links.items(), key=lambda item: -item[1].last_ns)[:max_links]
        return {
            "tiers": {tier.name: [link.last_ns, link.fit.to_dict()] for tier, link in self._tiers.items()},
            "links": [[h, r, t.name, link.bytes, link.last_ns, link.fit.to_dict()] for (h, r, t), link in newest],
        }

    def restore(self, data: dict[str, Any], shift_ns: int) -> None:
        """Take over what `to_dict` saved by a clock that ``shift_ns`` turns into ours.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it did not save this; drop the object then.
        """
        for name, (last_ns, saved) in data["tiers"].items():
            self._tiers[Tier[name]] = self._restored(saved, Tier[name], 0, _moment(last_ns, shift_ns))
        for holder, reader, name, num_bytes, last_ns, saved in data["links"][: self._max_links]:
            link = self._restored(saved, Tier[name], int(num_bytes), _moment(last_ns, shift_ns))
            self._add((WorkerId(holder), WorkerId(reader), Tier[name]), link)
        self._best.clear()

    def _restored(self, saved: dict[str, Any], tier: Tier, num_bytes: int, now_ns: int) -> _Link:
        link = self._new_link(self._priors[tier], now_ns)
        link.fit.restore(saved)
        link.curve = self._as_curve(link.fit)
        link.bytes = num_bytes
        return link

    def _parent_curve(self, tier: Tier, now_ns: int) -> LinkCurve:
        parent = self._tiers.get(tier)
        if parent is None:
            return self._priors[tier]
        return _fade(parent.curve, self._priors[tier], now_ns - parent.last_ns)

    def _make_room(self) -> None:
        if len(self._links) >= self._max_links:
            oldest = min(self._links, key=lambda key: self._links[key].last_ns)
            del self._links[oldest]
            holder, reader, tier = oldest
            self._readers[holder, tier].discard(reader)
            if not self._readers[holder, tier]:
                del self._readers[holder, tier]

    def _add(self, key: LinkKey, link: _Link) -> None:
        holder, reader, tier = key
        self._links[key] = link
        self._readers.setdefault((holder, tier), set()).add(reader)

    @classmethod
    def _new_link(cls, prior: LinkCurve, now_ns: int) -> _Link:
        fit = RelativeFit((prior.alpha_ns, prior.byte_ns), _LINK_PROBES, LINK_FORGETTING)
        return _Link(fit, prior, now_ns)

    @staticmethod
    def _as_curve(fit: RelativeFit) -> LinkCurve:
        alpha_ns, byte_ns = fit.coefficients
        return LinkCurve(alpha_ns, byte_ns, max(1.0, fit.quantile(0.9)))


def _fade(curve: LinkCurve, parent: LinkCurve, age_ns: int) -> LinkCurve:
    """Blend towards the parent by age; unchanged within an eighth of the half-life, where blending is noise."""
    if age_ns <= LINK_HALF_LIFE_NS // 8:
        return curve
    own = 0.5 ** (age_ns / LINK_HALF_LIFE_NS)
    rest = 1.0 - own
    return LinkCurve(
        own * curve.alpha_ns + rest * parent.alpha_ns,
        own * curve.byte_ns + rest * parent.byte_ns,
        own * curve.p90_ratio + rest * parent.p90_ratio,
    )


@dataclass(slots=True)
class _Failures:
    failed: float = 0.0
    tried: float = 0.0
    last_ns: int = 0


class FailureEstimators:
    """Chance that a load from a holder fails: a decayed mean with a small prior. Keyed by incarnation."""

    def __init__(self, prior: float = FAILURE_PRIOR) -> None:
        self._prior = prior
        self._holders: dict[WorkerKey, _Failures] = {}

    def observe(self, holder: WorkerKey, failed: bool, now_ns: int) -> None:
        """Learn how one load ended."""
        state = self._holders.setdefault(holder, _Failures(last_ns=now_ns))
        keep = _decay(now_ns - state.last_ns)
        state.failed = 0.95 * keep * state.failed + (1.0 if failed else 0.0)
        state.tried = 0.95 * keep * state.tried + 1.0
        state.last_ns = now_ns

    def probability(self, holder: WorkerKey, now_ns: int) -> float:
        """Chance in [0, 1) that the next load from this holder fails."""
        state = self._holders.get(holder)
        if state is None:
            return self._prior
        keep = _decay(now_ns - state.last_ns)
        weight = FAILURE_PRIOR_WEIGHT
        return (keep * state.failed + weight * self._prior) / (keep * state.tried + weight)

    def forget(self, holder: WorkerKey) -> None:
        """Drop an incarnation that is gone."""
        self._holders.pop(holder, None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the inverse of `restore`."""
        return {
            "holders": [
                [key.worker_id, key.worker_epoch, state.failed, state.tried, state.last_ns]
                for key, state in self._holders.items()
            ]
        }

    def restore(self, data: dict[str, Any], shift_ns: int) -> None:
        """Take over what `to_dict` saved by a clock that ``shift_ns`` turns into ours.

        Raises:
            ValueError, KeyError, TypeError: it did not save this; drop the object then.
        """
        for worker_id, epoch, failed, tried, last_ns in data["holders"]:
            if not (0.0 <= failed < math.inf and failed <= tried < math.inf):
                raise ValueError("a saved failure rate is out of range")
            key = WorkerKey(WorkerId(worker_id), WorkerEpoch(int(epoch)))
            self._holders[key] = _Failures(float(failed), float(tried), _moment(last_ns, shift_ns))


def _moment(saved_ns: Any, shift_ns: int) -> int:
    """A saved moment on our clock.

    Raises:
        ValueError, TypeError, OverflowError: it is no moment.
    """
    moment_ns = int(saved_ns) + shift_ns
    if abs(moment_ns) > MAX_MOMENT_NS:
        raise ValueError("a saved moment is out of range")
    return moment_ns


def _decay(age_ns: int) -> float:
    return float(0.5 ** (max(age_ns, 0) / FAILURE_HALF_LIFE_NS))
