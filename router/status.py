"""What ``kvpool status`` shows of a router's workers and links, in human units.  (pure)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.reports import GOODPUT_MET, GOODPUT_MISSED_TPOT, GOODPUT_MISSED_TTFT
from kvpool.types import MemberState, WorkerKey
from router.estimators import LinkEstimators
from router.fleet import Fleet
from router.learned import Learned


@dataclass(frozen=True, slots=True)
class Vitals:
    """A router's state at one moment.

    Attributes:
        states: how many workers are known, by state.
        report_age_ns: age of the oldest last report among workers that have work; idle ones need not report.
        queued: requests that were told to ask again.
        promises: requests whose promises still count.
    """

    states: Mapping[MemberState, int]
    report_age_ns: int
    queued: int
    promises: int


_GOODPUT = {"met": GOODPUT_MET, "missed_ttft": GOODPUT_MISSED_TTFT, "missed_tpot": GOODPUT_MISSED_TPOT}


def vitals(fleet: Fleet, queued: int, promises: int, now_ns: int) -> Vitals:
    """See `Vitals`."""
    reported = fleet.columns.reported_ns
    due = reported[np.isfinite(reported)]
    age_ns = max(0, now_ns - int(due.min())) if len(due) else 0
    return Vitals(Counter(view.state for view in fleet.workers), age_ns, queued, promises)


def worker_rows(
    fleet: Fleet, learned: Learned, counters: Mapping[WorkerKey, Mapping[str, int]], now_ns: int
) -> list[dict[str, Any]]:
    """One row a member, in the fleet's order."""
    return [_worker_row(fleet, position, learned, counters, now_ns) for position in range(len(fleet))]


def _worker_row(
    fleet: Fleet, position: int, learned: Learned, counters: Mapping[WorkerKey, Mapping[str, int]], now_ns: int
) -> dict[str, Any]:
    view, columns = fleet.workers[position], fleet.columns
    key, requests = view.key, columns.requests.item(position)
    curve = learned.prefills.curve(key.worker_id)
    tpot_ns = learned.decodes.tpot_ns(key.worker_id, max(1.0, requests), now_ns)
    return {
        "worker": str(key),
        "role": view.role.value,
        "state": view.state.value,
        "wait_ms": max(0.0, float(columns.gpu_free_ns[position]) - now_ns) / 1e6,
        "requests": int(requests),
        "queued_tokens": int(columns.queued_tokens[position]),
        "prefill_t0_ms": curve.t0_ns / 1e6,
        "prefill_us_per_token": curve.token_ns / 1e3,
        "prefill_ps_per_pair": curve.pair_ns * 1e3,
        "prefill_ns_per_token_and_decoding_request": curve.beside_ns,
        "prefill_samples": learned.prefills.samples(key.worker_id),
        "tpot_ms": None if tpot_ns is None else tpot_ns / 1e6,
        "load_failure_probability": learned.failures.probability(key, now_ns),
        "counters": counters.get(key, {}),
    }


def link_rows(links: LinkEstimators) -> list[dict[str, Any]]:
    """One row a learned link."""
    return [
        {
            "holder": holder,
            "reader": reader,
            "tier": tier.name.lower(),
            "alpha_ms": curve.alpha_ns / 1e6,
            "beta_gbytes_per_s": curve.bytes_per_second / 1e9,
            "samples": samples,
            "bytes": num_bytes,
        }
        for (holder, reader, tier), (curve, samples, num_bytes) in sorted(links.known().items())
    ]


def goodput(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Finished requests by the limits they met, summed over workers."""
    totals = list(counters)
    return {shown: sum(item.get(name, 0) for item in totals) for shown, name in _GOODPUT.items()}
