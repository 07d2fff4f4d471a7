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
UNKNOWN = "unknown"
MAX_PROBLEMS = 4
MAX_PROBLEM_CHARS = 200


def summary(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A few lines as (word, text), from what `kvpool.cluster.status.cluster_status` returns."""
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
    problems = list(_problems(status))
    shown = [text if len(text) <= MAX_PROBLEM_CHARS else f"{text[:MAX_PROBLEM_CHARS]}…" for text in problems]
    more = [f"and {len(shown) - MAX_PROBLEMS} more"] if len(shown) > MAX_PROBLEMS else []
    return [
        ("members", ", ".join(_answering(status, kind, name) for kind, name in _KINDS)),
        (
            "requests",
            f"{finished} finished, {_told(router, 'goodput', 'shed')} shed, {running} running, {waiting} waiting at "
            f"workers, {_told(router, 'admissions', 'queued_now')} at the router; failed attempts {failed}"
            if workers
            else UNKNOWN,
        ),
        ("decisions", _counted(router["decisions"]) if "decisions" in router else UNKNOWN),
        ("failures", _counted(failures) if workers else UNKNOWN),
        ("restarts", _restarts(status)),
        *_metrics(status),
        ("wrong now", "; ".join([*shown[:MAX_PROBLEMS], *more]) or "nothing"),
    ]


_NO_ROUTER = "what runs goes on, what comes waits; Ray starts a dead one again, kill -9 ends one that stands still"
_KINDS = (("workers", "workers"), ("routers", "routers"), ("metadata", "metadata servers"))


def _answering(status: Mapping[str, Any], kind: str, name: str) -> str:
    if kind in status["unknown"]:
        return f"{UNKNOWN} {name}"
    expected = [part for part in status[kind].values() if part.get("state") != LEFT]
    return f"{sum('error' not in part for part in expected)} of {len(expected)} {name}"


def _told(router: Mapping[str, Any], group: str, name: str) -> str:
    """A number that only routers know."""
    return str(router[group][name]) if group in router else UNKNOWN


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count) or "none"


def _restarts(status: Mapping[str, Any]) -> str:
    """Who was started again, and how often; a drained worker does not count."""
    parts = {name: part for kind, _ in _KINDS for name, part in status[kind].items() if part.get("state") != LEFT}
    told = {name: part["restarts"] for name, part in parts.items() if "restarts" in part}
    if not told:
        return UNKNOWN
    silent = len(parts) - len(told)
    return _counted(told) + (f" ({UNKNOWN} of {silent})" if silent else "")


def _problems(status: Mapping[str, Any]) -> Iterator[str]:
    """What an operator should look at, the worst first."""
    mute = all("error" in part for part in status["routers"].values())
    if mute:
        yield f"no router answers ({status['router'].get('error', 'it is not there')}); {_NO_ROUTER}"
    for reason in dict.fromkeys(status["unknown"].values()):
        kinds = ", ".join(name for kind, name in _KINDS if status["unknown"].get(kind) == reason)
        yield f"nobody says which {kinds} there are: {reason}"
    for kind, _ in _KINDS:
        for name, part in status[kind].items():
            if "error" in part and kind == "routers" and mute:
                continue
            if "error" in part:
                yield f"{name} does not answer: {part['error']}"
            elif part.get("healthy") is False:
                yield f"{name} is broken: {part['failure']}"
            elif part.get("directory") == "not connected":
                yield f"{name} hears no metadata server"
            if disk := _disk_problem(part.get("disk") or {}):
                yield f"{name} {disk}"
    states = {row["worker"]: row["state"] for row in status["router"].get("workers", [])}
    if not mute and not any(state == MemberState.ALIVE.value for state in states.values()):
        yield "no worker takes requests"
    for worker, state in states.items():
        if state != MemberState.ALIVE.value:
            yield f"{worker} is {state}"


def _disk_problem(disk: Mapping[str, Any]) -> str:
    """What is wrong with a worker's disk tier; empty when nothing is."""
    if "error" in disk:
        return f"serves without its disk tier: {disk['error']}; put that right and restart it"
    if not disk.get("last_error"):
        return ""
    errors = ", ".join(f"{disk[name]} {name}" for name in ("write_errors", "read_errors", "corrupt") if disk.get(name))
    return f"had trouble with its disk ({errors or 'none counted'}), last: {disk['last_error']}"


def _metrics(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where metrics are served, whole, to be copied; nothing when they are not."""
    parts = [*status["routers"].values(), *status["metadata"].values()]
    urls = [part["metrics"] for part in parts if str(part.get("metrics", "")).startswith("http")]
    return [("metrics", " ".join(urls))] if urls else []
