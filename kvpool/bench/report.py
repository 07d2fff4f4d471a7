"""One kind of benchmark report: rows of ours against a reference measured in the same run.

Speeds on a shared machine mean little alone, so a row is a ratio; a bar states what the ratio must reach.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        name: what was measured.
        ours, reference: medians in ``unit``; ``reference`` is None for a figure without one.
        reference_name: what the reference is (a peer, memcpy, a socket, the plain model).
        bar: least `ratio` that counts as holding; None when nothing was promised.
        higher_is_better: whether ``unit`` counts speed (True) or cost (False).
        runs: interleaved runs behind the medians.
        spread: (max - min) / median of our runs.
        skipped: why there is no measurement, empty otherwise.
    """

    name: str
    ours: float
    reference: float | None
    unit: str
    reference_name: str = ""
    bar: float | None = None
    higher_is_better: bool = True
    runs: int = 0
    spread: float = 0.0
    skipped: str = ""

    @property
    def ratio(self) -> float | None:
        """How much better than the reference: above 1 is better, whatever the unit."""
        if self.skipped or self.reference is None or not self.ours or not self.reference:
            return None
        return self.ours / self.reference if self.higher_is_better else self.reference / self.ours

    @property
    def holds(self) -> bool | None:
        """Whether the bar is reached; None without a bar or when skipped."""
        if self.bar is None or self.skipped:
            return None
        return self.ratio is not None and self.ratio >= self.bar

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable form with the derived fields."""
        return {**asdict(self), "ratio": self.ratio, "holds": self.holds}


def skipped(name: str, reference_name: str, why: str) -> Row:
    """A row for a peer that is not installed: visible, never a silent gap."""
    return Row(name=name, ours=0.0, reference=None, unit="", reference_name=reference_name, skipped=why)


def interleave(subjects: Sequence[Callable[[], object]], *, runs: int) -> list[list[float]]:
    """Time the subjects in turn, A B A B …; seconds per run of each. One uncounted warm-up run first."""
    for subject in subjects:
        subject()
    seconds: list[list[float]] = [[] for _ in subjects]
    for _ in range(runs):
        for taken, subject in zip(seconds, subjects, strict=True):
            start = time.perf_counter()
            subject()
            taken.append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float]) -> float:
    """(max - min) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Header and rows as text, for any table printer."""
    lines: list[tuple[str, ...]] = [("name", "ours", "reference", "unit", "ratio", "bar", "holds", "runs", "spread")]
    for row in rows:
        if row.skipped:
            lines.append((row.name, "–", row.reference_name, "", "–", "–", f"skipped: {row.skipped}", "", ""))
            continue
        against = "–" if row.reference is None else f"{row.reference:.4g} ({row.reference_name})"
        lines.append(
            (
                row.name,
                f"{row.ours:.4g}",
                against,
                row.unit,
                "–" if row.ratio is None else f"{row.ratio:.2f}",
                "–" if row.bar is None else f"{row.bar:.2f}",
                {True: "yes", False: "NO", None: "–"}[row.holds],
                str(row.runs),
                f"{row.spread:.0%}",
            )
        )
    return lines
