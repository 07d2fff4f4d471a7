"""The lines at the top of ``kvpool status``."""

from __future__ import annotations

from typing import Any

from kvpool.cluster.summary import MAX_PROBLEMS, summary

DEAD = {"error": "not reachable: ActorUnavailableError", "code": "unavailable"}


def _worker(**counters: int) -> dict[str, Any]:
    failures = {name.partition(".")[2]: count for name, count in counters.items() if "." in name}
    return {"healthy": True, "failure": None, "running": 1, "waiting": 2, "counters": counters, "failures": failures}


def _status() -> dict[str, Any]:
    rows = [{"worker": f"worker-{number}@1", "state": "alive"} for number in range(2)]
    return {
        "model": "m",
        "router": {"workers": rows, "decisions": {"load": 2, "redo": 5}, "goodput": {"met": 7, "shed": 1}},
        "routers": {"router": {"directory": "connected"}, "router-1": {"directory": "connected"}},
        "workers": {
            "worker-0": _worker(goodput_met=3, goodput_missed_ttft=1),
            "worker-1": _worker(**{"goodput_met": 3, "load_failures.stall": 2, "request_failures.unavailable": 1}),
        },
        "metadata": {"a:1": {"members": []}},
    }


def test_a_healthy_cluster_fits_five_lines_and_nothing_is_wrong() -> None:
    assert dict(summary(_status())) == {
        "members": "2 of 2 workers, 2 of 2 routers, 1 of 1 metadata servers",
        "requests": "7 finished, 1 shed, 2 running, 4 waiting at workers, 0 at the router; failed attempts 1",
        "decisions": "load 2, redo 5",
        "failures": "stall 2, unavailable 1",
        "wrong now": "nothing",
    }


def test_whoever_is_down_broken_deaf_or_not_offered_is_named_and_a_drained_worker_is_not_missed() -> None:
    status = _status()
    status["workers"]["worker-0"] = DEAD
    status["workers"]["worker-1"] |= {"healthy": False, "failure": "the engine raised"}
    status["workers"]["worker-2"] = {"state": "left", "detail": "drained"}
    status["routers"]["router-1"]["directory"] = "not connected"
    status["router"]["workers"][0]["state"] = "suspect"
    lines = dict(summary(status))
    assert lines["members"].startswith("1 of 2 workers")
    for text in (
        "worker-0 does not answer",
        "worker-1 is broken: the engine raised",
        "router-1 hears no",
        "is suspect",
    ):
        assert text in lines["wrong now"]


def test_a_cluster_without_a_router_says_so_first() -> None:
    status = {"router": DEAD, "routers": {}, "workers": {}, "metadata": {}}
    assert dict(summary(status))["wrong now"].startswith("no router answers: not reachable")


def test_many_problems_and_long_ones_are_cut() -> None:
    status = _status()
    status["workers"] = {f"worker-{number}": {"error": "x" * 5000, "code": "c"} for number in range(50)}
    text = dict(summary(status))["wrong now"]
    assert len(text) < 200 * (MAX_PROBLEMS + 1)
    assert text.endswith("and 46 more")
