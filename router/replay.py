"""Decide recorded requests again, offline, with another policy.  (pure)

A record holds, for its moment: every eligible worker with its wait, its cached prefix and the price of redo there,
and the price of every load that could have been chosen. So replay knows exactly what another rule *over these prices
and prefixes* would have chosen, and what the router then expected it to cost.

It cannot know

- how a different choice would have changed what came after it: queues, links and caches are as recorded;
- the real TTFT of a choice that was not made: differences are between predictions;
- loads that were bounded away: they were dearer than the choice, by how much was never worked out;
- requests in flight, queued tokens, link curves, block hashes and the harm to others: rules that need them are
  refused. `kvpool simulate` runs every rule from a trace.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, NamedTuple

from kvpool.errors import RequestError
from kvpool.plan import PlanKind
from router.policies import make_policy

REDO = PlanKind.REDO.value


class Option(NamedTuple):
    """One worker and plan of a record; ``source`` and ``boundary`` only for loads."""

    worker: str
    plan: str
    price_ns: int
    wait_ns: int
    own_blocks: int
    source: str | None
    boundary: int

    @property
    def what(self) -> tuple[str, str, str | None, int]:
        """What is carried out; two options with the same are one choice."""
        return self.worker, self.plan, self.source, 0 if self.plan == REDO else self.boundary


class Recorded(NamedTuple):
    """What replay needs of one record.

    Attributes:
        chosen: the recorded choice at its recorded price.
        options: everything that was priced.
        ttft_ns: real TTFT, None when no outcome was reported.
    """

    decision_id: str
    policy: str
    chosen: Option
    options: tuple[Option, ...]
    ttft_ns: int | None


Rule = Callable[[Recorded, int, Random], Option]
"""Chooses among the options; the number counts decisions from 0."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What changes. Times are predictions in milliseconds; a negative difference is an improvement.

    Attributes:
        changed: decisions whose worker or plan differs; ``changed_workers`` those with another worker.
        recorded_ms, replayed_ms: mean predicted TTFT of the recorded and of the new choices.
        difference_share: difference of these, against ``recorded_ms``.
        changed_difference_ms: mean difference over the changed decisions.
        dearer, cheaper, equal: decisions whose predicted TTFT rises, falls or stays.
        outcomes: records with a real TTFT; ``median_error`` is that of real against predicted.
        notes: what this replay does not know.
    """

    policy: str
    decisions: int
    recorded_policies: dict[str, int]
    changed: int
    changed_workers: int
    recorded_ms: float
    replayed_ms: float
    difference_ms: float
    difference_share: float
    changed_difference_ms: float
    dearer: int
    cheaper: int
    equal: int
    outcomes: int
    median_error: float | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return asdict(self)


def replay_records(records: Iterable[Mapping[str, Any]], policy: str, seed: int = 0) -> Replay:
    """Decide every record again.

    Args:
        records: `router.record.DecisionRecord.to_dict` of each, in order.
        policy: one of `REPLAYABLE`.
        seed: of a random rule.

    Raises:
        RequestError: no record, a malformed one (the message names its number), or a rule that records cannot feed.
        ConfigError: no such policy.
    """
    rule = _rule(policy)
    parsed = [parse_record(number, record) for number, record in enumerate(records, 1)]
    if not parsed:
        raise RequestError("there are no records to replay", field="records")
    rng = Random(seed)
    pairs = [(item, rule(item, number, rng)) for number, item in enumerate(parsed)]
    return _summary(policy, pairs)


def parse_record(number: int, record: Mapping[str, Any]) -> Recorded:
    """One record from its JSON form.

    Raises:
        RequestError: a key is missing or of the wrong kind.
    """
    try:
        options = tuple(_option(item) for item in record["candidates"])
        loads, outcome = record["loads"], record["outcome"]
        source = loads[0]["holder"] if loads else None
        boundary = int(loads[-1]["stop"]) if loads else 0
        worker = str(record["worker"])
        wait_ns = next((item.wait_ns for item in options if item.worker == worker), 0)
        chosen = Option(
            worker, str(record["plan"]), int(record["price_ns"]), wait_ns, int(record["own_blocks"]), source, boundary
        )
        ttft_ns = None if outcome is None else int(outcome["ttft_ns"])
        made = Recorded(str(record["decision_id"]), str(record["policy"]), chosen, options, ttft_ns)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise RequestError(f"record {number} is malformed: {error!r:.200}", record=number) from error
    if not any(item.plan == REDO for item in options):
        raise RequestError(f"record {number} has no candidate that redoes; was it cut?", record=number)
    return made


def _option(item: Mapping[str, Any]) -> Option:
    return Option(
        worker=str(item["worker"]),
        plan=str(item["plan"]),
        price_ns=int(item["price_ns"]),
        wait_ns=int(item["wait_ns"]),
        own_blocks=int(item["own_blocks"]),
        source=item["source"],
        boundary=int(item["boundary_blocks"]),
    )


# ---- rules over recorded prices


def _least(options: Sequence[Option], chosen: Option, key: Callable[[Option], Any]) -> Option:
    """The option of least key; the recorded one among equals, so that ties do not count as changes."""
    return min(options, key=lambda item: (key(item), item.what != chosen.what, item.what[:2], str(item.source)))


def _redos(record: Recorded) -> list[Option]:
    return [item for item in record.options if item.plan == REDO]


def _kvpool(record: Recorded, number: int, rng: Random) -> Option:
    return _least(record.options, record.chosen, lambda item: item.price_ns)


def _redo_only(record: Recorded, number: int, rng: Random) -> Option:
    return _least(_redos(record), record.chosen, lambda item: item.price_ns)


def _affinity(record: Recorded, number: int, rng: Random) -> Option:
    return _least(_redos(record), record.chosen, lambda item: (-item.own_blocks, item.wait_ns))


def _shortest_wait(record: Recorded, number: int, rng: Random) -> Option:
    return _least(_redos(record), record.chosen, lambda item: item.wait_ns)


def _round_robin(record: Recorded, number: int, rng: Random) -> Option:
    workers = sorted(_redos(record), key=lambda item: item.worker)
    return workers[number % len(workers)]


def _random(record: Recorded, number: int, rng: Random) -> Option:
    return rng.choice(sorted(_redos(record), key=lambda item: item.worker))


REPLAYABLE: dict[str, Rule] = {
    "kvpool": _kvpool,
    "redo_only": _redo_only,
    "affinity": _affinity,
    "shortest_wait": _shortest_wait,
    "round_robin": _round_robin,
    "random": _random,
}
"""Rules that records hold everything for. ``shortest_wait`` has no counterpart among the routing policies."""

_RULE_NOTES = {
    "kvpool": "'kvpool' takes the least recorded price; what a choice costs the requests behind it is not recorded, "
    "so choices made for their sake show up as changes that look cheaper",
    "redo_only": "'redo_only' takes the least recorded price of a redo",
    "affinity": "among equal prefixes 'affinity' takes the shortest wait; the rule itself takes the fewest requests, "
    "which are not recorded",
}
_NOTES = (
    "prices are the router's predictions at the moment of each decision; queues, links and caches stay as recorded, so "
    "what a different choice would have changed later is not seen (kvpool simulate plays that out)",
    "the real TTFT of a choice that was not made is unknown; loads that were bounded away cannot be chosen again",
)


def _rule(policy: str) -> Rule:
    rule = REPLAYABLE.get(policy)
    if rule is not None:
        return rule
    make_policy(policy)  # an unknown name is said to be one
    raise RequestError(
        f"records do not hold what {policy!r} decides by (requests in flight, queued tokens, link or prefill curves); "
        f"replay knows {', '.join(sorted(REPLAYABLE))}; 'kvpool simulate' runs {policy!r} from a trace",
        field="policy",
    )


def _summary(policy: str, pairs: Sequence[tuple[Recorded, Option]]) -> Replay:
    count = len(pairs)
    changed = [(record, new) for record, new in pairs if new.what != record.chosen.what]
    differences = [
        new.price_ns - record.chosen.price_ns if new.what != record.chosen.what else 0 for record, new in pairs
    ]
    recorded_ns = sum(record.chosen.price_ns for record, _ in pairs)
    errors = [
        record.ttft_ns / record.chosen.price_ns - 1.0
        for record, _ in pairs
        if record.ttft_ns is not None and record.chosen.price_ns > 0
    ]
    total_ns = sum(differences)
    return Replay(
        policy=policy,
        decisions=count,
        recorded_policies=dict(Counter(record.policy for record, _ in pairs)),
        changed=len(changed),
        changed_workers=sum(1 for record, new in changed if new.worker != record.chosen.worker),
        recorded_ms=recorded_ns / count / 1e6,
        replayed_ms=(recorded_ns + total_ns) / count / 1e6,
        difference_ms=total_ns / count / 1e6,
        difference_share=total_ns / max(1, recorded_ns),
        changed_difference_ms=total_ns / max(1, len(changed)) / 1e6,
        dearer=sum(1 for value in differences if value > 0),
        cheaper=sum(1 for value in differences if value < 0),
        equal=sum(1 for value in differences if value == 0),
        outcomes=len(errors),
        median_error=statistics.median(errors) if errors else None,
        notes=(*_NOTES, *([_RULE_NOTES[policy]] if policy in _RULE_NOTES else [])),
    )
