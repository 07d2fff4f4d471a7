"""The few lines at the top of ``kvpool status``: who answers, what was served, what is wrong now.  (pure)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvpool.reports import GOODPUT_MET, GOODPUT_MISSED_TPOT, GOODPUT_MISSED_TTFT
from kvpool.types import MemberState

FINISHED = (GOODPUT_MET, GOODPUT_MISSED_TTFT, GOODPUT_MISSED_TPOT)
FAILED = "request_failures."
LEFT = "left"
MAX_PROBLEMS = 4
MAX_PROBLEM_CHARS = 160


def summary(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Five lines as (word, text), from what `kvpool.cluster.status.cluster_status` returns."""
    router = status["router"]
    workers = [part for part in status["workers"].values() if "counters" in part]
    counters: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for part in workers:
        counters.update(part["counters"])
        failures.update(part["failures"])
    finished = sum(counters[name] for name in FINISHED)
    failed = sum(count for name, count in counters.items() if name.startswith(FAILED))
    running, waiting = (sum(part[name] for part in workers) for name in ("running", "waiting"))
    shed = router.get("goodput", {}).get("shed", 0)
    held = router.get("admissions", {}).get("queued_now", 0)
    problems = list(_problems(status))
    shown = [text if len(text) <= MAX_PROBLEM_CHARS else f"{text[:MAX_PROBLEM_CHARS]}…" for text in problems]
    more = [f"and {len(shown) - MAX_PROBLEMS} more"] if len(shown) > MAX_PROBLEMS else []
    return [
        ("members", ", ".join(_answering(status, kind, name) for kind, name in _KINDS)),
        (
            "requests",
            f"{finished} finished, {shed} shed, {running} running, {waiting} waiting at workers, {held} at the router; "
            f"failed attempts {failed}",
        ),
        ("decisions", _counted(router.get("decisions", {}))),
        ("failures", _counted(failures)),
        ("wrong now", "; ".join([*shown[:MAX_PROBLEMS], *more]) or "nothing"),
    ]


_KINDS = (("workers", "workers"), ("routers", "routers"), ("metadata", "metadata servers"))


def _answering(status: Mapping[str, Any], kind: str, name: str) -> str:
    expected = [part for part in status[kind].values() if part.get("state") != LEFT]
    return f"{sum('error' not in part for part in expected)} of {len(expected)} {name}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count) or "none"


def _problems(status: Mapping[str, Any]) -> Iterator[str]:
    """What an operator should look at, the worst first."""
    if not status["routers"]:
        yield f"no router answers: {status['router'].get('error', 'it is not there')}"
    for kind, _ in _KINDS:
        for name, part in status[kind].items():
            if "error" in part:
                yield f"{name} does not answer: {part['error']}"
            elif part.get("healthy") is False:
                yield f"{name} is broken: {part['failure']}"
            elif part.get("directory") == "not connected":
                yield f"{name} hears no metadata server"
    states = {row["worker"]: row["state"] for row in status["router"].get("workers", [])}
    if status["routers"] and not any(state == MemberState.ALIVE.value for state in states.values()):
        yield "no worker takes requests"
    for worker, state in states.items():
        if state != MemberState.ALIVE.value:
            yield f"{worker} is {state}"
