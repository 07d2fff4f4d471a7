"""Fits a line with non-negative coefficients to a stream of observations, on relative error.  (pure)

What `router.estimators` is made of. Invariants: coefficients are finite and ≥ 0; one outlier moves them by a bounded
step, a run of outliers on one side is drift and is followed at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

OUTLIER_RATIO = 3.0  # an observation this far from the prediction is suspicious
DRIFT_RUN = 4  # this many suspicious ones in a row on one side are drift
DRIFT_KEEP = 0.3  # share of the memory that survives each further observation of a drift
RESIDUALS_KEPT = 64
_PROXIMITY = 1e-4  # weight of the pull towards the current curve; keeps a fit of equal samples well-posed
_PRIOR_WEIGHT = 0.02  # weight of the prior's shape at each probe, in samples

Features = tuple[float, ...]


class RelativeFit:
    """Non-negative least squares of relative error with exponential forgetting.

    Minimises Σ λ^age · (1 − x·θ/T)² over θ ≥ 0. Information form of recursive least squares; exact for a few
    features. Not thread-safe.

    Args:
        coefficients: the prior θ, all ≥ 0, at least one above 0.
        probes: feature vectors that span the space; the prior's shape is remembered at these points.
        forgetting: λ in (0, 1).
    """

    __slots__ = ("_forgetting", "_gram", "_probes", "_rhs", "_run", "_sorted", "coefficients", "count", "ratios")

    def __init__(self, coefficients: Sequence[float], probes: Sequence[Features], forgetting: float) -> None:
        self.coefficients = tuple(float(value) for value in coefficients)
        self.count = 0
        self.ratios: list[float] = []
        self._sorted: list[float] | None = None
        self._probes = tuple(probes)
        self._forgetting = forgetting
        self._run = 0  # signed length of the current run of suspicious observations
        self._remember_curve()

    def predict(self, features: Features) -> float:
        """x·θ."""
        return sum(x * theta for x, theta in zip(features, self.coefficients, strict=True))

    def observe(self, features: Features, value: float) -> None:
        """Learn one observation; values that are not positive and finite are ignored."""
        if not (value > 0.0 and math.isfinite(value)):
            return
        predicted = self.predict(features)
        if self.count == 0 or predicted <= 0.0:
            self._rescale(value / predicted if predicted > 0.0 else 1.0)
            predicted = self.predict(features)
        self.count += 1
        ratio = value / predicted if predicted > 0.0 else 1.0
        self._note(ratio)
        keep, value = self._judge(ratio, predicted, value)
        size = len(features)
        row = [x / value for x in features]
        for i in range(size):
            self._rhs[i] = keep * self._rhs[i] + row[i]
            for j in range(size):
                self._gram[i][j] = keep * self._gram[i][j] + row[i] * row[j]
        self._solve()

    def quantile(self, share: float) -> float:
        """Quantile of observed / predicted over the last observations; 1.5 before there are eight."""
        if len(self.ratios) < 8:
            return 1.5
        if self._sorted is None:
            self._sorted = sorted(self.ratios)
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a file; the inverse of `restore`."""
        return {
            "coefficients": list(self.coefficients),
            "count": self.count,
            "ratios": list(self.ratios),
            "gram": [list(row) for row in self._gram],
            "rhs": list(self._rhs),
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `to_dict` saved.

        Raises:
            ValueError, KeyError, TypeError: it did not save this; the fit is unchanged.
        """
        size = len(self.coefficients)
        coefficients = _floats(data["coefficients"], size)
        ratios = _floats(data["ratios"], len(data["ratios"]))[-RESIDUALS_KEPT:]
        gram = [_floats(row, size) for row in data["gram"]]
        rhs = _floats(data["rhs"], size)
        count = int(data["count"])
        if len(gram) != size or min(coefficients) < 0.0 or max(coefficients) <= 0.0 or count < 0:
            raise ValueError("a saved fit is out of range")
        self.coefficients, self.count, self.ratios = tuple(coefficients), count, ratios
        self._sorted = None
        self._gram, self._rhs = gram, rhs

    def _judge(self, ratio: float, predicted: float, value: float) -> tuple[float, float]:
        """How much memory survives, and the value to learn: clipped for an outlier, as it is for drift."""
        if 1.0 / OUTLIER_RATIO <= ratio <= OUTLIER_RATIO:
            self._run = 0
            return self._forgetting, value
        side = 1 if ratio > 1.0 else -1
        self._run = self._run + side if self._run * side > 0 else side
        if abs(self._run) >= DRIFT_RUN:
            return DRIFT_KEEP * self._forgetting, value
        return self._forgetting, predicted * (OUTLIER_RATIO if side > 0 else 1.0 / OUTLIER_RATIO)

    def _rescale(self, factor: float) -> None:
        self.coefficients = tuple(factor * theta for theta in self.coefficients)
        self._remember_curve()

    def _remember_curve(self) -> None:
        size = len(self.coefficients)
        self._gram = [[0.0] * size for _ in range(size)]
        self._rhs = [0.0] * size
        self._add_probes(self._gram, self._rhs, _PRIOR_WEIGHT)

    def _add_probes(self, gram: list[list[float]], rhs: list[float], weight: float) -> None:
        for probe in self._probes:
            value = self.predict(probe)
            if value <= 0.0:
                continue
            row = [x / value for x in probe]
            for i, left in enumerate(row):
                rhs[i] += weight * left
                for j, right in enumerate(row):
                    gram[i][j] += weight * left * right

    def _solve(self) -> None:
        gram = [list(row) for row in self._gram]
        rhs = list(self._rhs)
        self._add_probes(gram, rhs, _PROXIMITY)
        solved = nonnegative_least_squares(gram, rhs)
        if solved is not None:
            self.coefficients = solved

    def _note(self, ratio: float) -> None:
        self.ratios.append(ratio)
        if len(self.ratios) > RESIDUALS_KEPT:
            del self.ratios[0]
        self._sorted = None


def nonnegative_least_squares(gram: Sequence[Sequence[float]], rhs: Sequence[float]) -> tuple[float, ...] | None:
    """Minimise θᵀGθ − 2rᵀθ over θ ≥ 0 for a few unknowns, by trying every support.

    Returns:
        The minimiser, or None when the system is degenerate.
    """
    size = len(rhs)
    scale = [math.sqrt(gram[i][i]) if gram[i][i] > 0.0 else 1.0 for i in range(size)]
    matrix = [[gram[i][j] / (scale[i] * scale[j]) for j in range(size)] for i in range(size)]
    target = [rhs[i] / scale[i] for i in range(size)]
    best: tuple[float, list[float]] | None = None
    for mask in range((1 << size) - 1, 0, -1):
        support = [i for i in range(size) if mask >> i & 1]
        part = _solve_linear([[matrix[i][j] for j in support] for i in support], [target[i] for i in support])
        if part is None or any(value < 0.0 or not math.isfinite(value) for value in part):
            continue
        full = [0.0] * size
        for i, value in zip(support, part, strict=True):
            full[i] = value
        gain = -sum(target[i] * full[i] for i in support)  # the objective at a stationary point
        if best is None or gain < best[0]:
            best = (gain, full)
        if len(support) == size:
            break  # the unconstrained minimum is feasible
    if best is None:
        return None
    return tuple(value / scale[i] for i, value in enumerate(best[1]))


def _solve_linear(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting; None when singular. Overwrites its arguments."""
    size = len(target)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) < 1e-13:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        target[column], target[pivot] = target[pivot], target[column]
        for row in range(column + 1, size):
            factor = matrix[row][column] / matrix[column][column]
            target[row] -= factor * target[column]
            for k in range(column, size):
                matrix[row][k] -= factor * matrix[column][k]
    for column in reversed(range(size)):
        rest = sum(matrix[column][k] * target[k] for k in range(column + 1, size))
        target[column] = (target[column] - rest) / matrix[column][column]
    return target


def _floats(values: Sequence[Any], size: int) -> list[float]:
    """``size`` finite numbers."""
    made = [float(value) for value in values]
    if len(made) != size or not all(map(math.isfinite, made)):
        raise ValueError(f"expected {size} finite numbers, got {values!r:.80}")
    return made
