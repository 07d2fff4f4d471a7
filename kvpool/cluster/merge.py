"""One picture of several routers, for ``kvpool status``.  (pure)

What a router did itself is added up: decisions, admissions, promises, records. What all of them hear is not: every
report reaches every router, so failures, goodput, speeds and members are the same news told several times, and the one
who has heard the most of it counts. A router that was started again has forgotten; the others have not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OWN_NUMBERS = ("records", "records_dropped", "promises")
OWN_COUNTS = ("decisions", "unfollowed", "admissions")
HEARD_COUNTERS = frozenset({"reports_of_strangers", "reports_repeated"})
OF_EACH = ("router_id", "share_of_the_traffic", "learned", "metadata", "metrics")


def merge(statuses: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The statuses of all routers that answer (`router.core.RouterCore.status` and what its shell adds) as one.

    Args:
        statuses: by name; at least one. A single one is returned as it is.
    """
    parts = list(statuses.values())
    lead = max(parts, key=lambda part: len(part["workers"]))  # the first of those that know the most members
    if len(parts) == 1:
        return dict(lead)
    ordered = [lead, *(part for part in parts if part is not lead)]
    counters = [part["counters"] for part in parts]
    return {
        **lead,
        **{name: {router: part[name] for router, part in statuses.items()} for name in OF_EACH},
        **{name: sum(part[name] for part in parts) for name in OWN_NUMBERS},
        **{name: _sums(part[name] for part in parts) for name in OWN_COUNTS},
        "workers": _union(ordered, "workers", ("worker",)),
        "links": _union(ordered, "links", ("holder", "reader", "tier")),
        "goodput": {**_most(part["goodput"] for part in parts), "shed": sum(part["goodput"]["shed"] for part in parts)},
        "failures": _most(part["failures"] for part in parts),
        "failures_by_link": _most_by_link(parts),
        "counters": {
            **_sums({name: count for name, count in item.items() if name not in HEARD_COUNTERS} for item in counters),
            **_most({name: count for name, count in item.items() if name in HEARD_COUNTERS} for item in counters),
        },
    }


def router_rows(statuses: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each router does by itself, by name.

    Args:
        statuses: by name; who does not answer has an ``error`` instead.
    """
    decided = {name: sum(part.get("decisions", {}).values()) for name, part in statuses.items()}
    total = sum(decided.values())
    return {
        name: dict(part)
        if "error" in part or "workers" not in part
        else {
            "decisions": decided[name],
            "share_of_decisions": decided[name] / total if total else 0.0,
            "share_of_the_traffic": part["share_of_the_traffic"],
            "promises": part["promises"],
            "queued_now": part["admissions"]["queued_now"],
            "records": part["records"],
            "members": len(part["workers"]),
            "directory": "connected" if part["metadata"]["connected"] else "not connected",
            "started_from": part["learned"]["started_from"],
            "metrics": part["metrics"],
        }
        for name, part in statuses.items()
    }


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for item in counts:
        total.update(item)  # keeps what is zero
    return dict(total)


def _most(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    most: dict[str, int] = {}
    for item in counts:
        most.update({name: max(count, most.get(name, 0)) for name, count in item.items()})
    return most


def _most_by_link(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    most: Counter[tuple[str, str, str]] = Counter()
    for part in parts:
        most |= Counter({(row["holder"], row["reader"], row["kind"]): row["count"] for row in part["failures_by_link"]})
    return [
        {"holder": holder, "reader": reader, "kind": kind, "count": count}
        for (holder, reader, kind), count in sorted(most.items())
    ]


def _union(parts: Sequence[Mapping[str, Any]], table: str, identity: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the first part, and those of the others that it lacks."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in parts:
        for row in part[table]:
            rows.setdefault(tuple(row[name] for name in identity), row)
    return list(rows.values())
