"""The lines at the top of ``kvpool status``."""

from __future__ import annotations

from typing import Any

from kvpool.cluster.summary import MAX_PROBLEMS, summary

DEAD = {"error": "not reachable: ActorUnavailableError", "code": "unavailable"}


def _worker(**counters: int) -> dict[str, Any]:
    failures = {name.partition(".")[2]: count for name, count in counters.items() if "." in name}
    return {
        **{"healthy": True, "failure": None, "restarts": 0, "running": 1, "waiting": 2},
        **{"counters": counters, "failures": failures},
    }


def _status() -> dict[str, Any]:
    rows = [{"worker": f"worker-{number}@1", "state": "alive"} for number in range(2)]
    return {
        "model": "m",
        "router": {
            "workers": rows,
            "decisions": {"load": 2, "redo": 5},
            "goodput": {"met": 7, "shed": 1},
            "admissions": {"queued_now": 0},
        },
        "routers": {name: {"directory": "connected", "restarts": 0} for name in ("router", "router-1")},
        "workers": {
            "worker-0": _worker(goodput_met=3, goodput_missed_ttft=1),
            "worker-1": _worker(**{"goodput_met": 3, "load_failures.stall": 2, "request_failures.unavailable": 1}),
        },
        "metadata": {"a:1": {"members": [], "restarts": 0}},
        "unknown": {},
    }


def test_a_healthy_cluster_fits_six_lines_and_nothing_is_wrong() -> None:
    assert dict(summary(_status())) == {
        "members": "2 of 2 workers, 2 of 2 routers, 1 of 1 metadata servers",
        "requests": "7 finished, 1 shed, 2 running, 4 waiting at workers, 0 at the router; failed attempts 1",
        "decisions": "load 2, redo 5",
        "failures": "stall 2, unavailable 1",
        "restarts": "none",
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


def test_a_cluster_without_a_router_says_so_first_and_what_to_do() -> None:
    status: dict[str, Any] = {"router": DEAD, "routers": {}, "workers": {}, "metadata": {}, "unknown": {}}
    assert dict(summary(status))["wrong now"].startswith("no router answers (not reachable")
    status = _status()
    status |= {"router": DEAD, "routers": {"router": DEAD, "router-1": DEAD}}
    lines = dict(summary(status))
    assert lines["members"] == "2 of 2 workers, 0 of 2 routers, 1 of 1 metadata servers"
    assert "kill -9" in lines["wrong now"]
    assert "router-1" not in lines["wrong now"]  # once is enough


def test_what_nobody_can_say_is_unknown_and_not_nought() -> None:
    status = _status()
    status |= {"router": DEAD, "routers": {"router": DEAD}, "workers": {"worker-0": DEAD}, "metadata": {}}
    status["unknown"] = {"metadata": "no worker answers"}
    lines = dict(summary(status))
    assert lines["members"] == "0 of 1 workers, 0 of 1 routers, unknown metadata servers"
    assert {lines["requests"], lines["decisions"], lines["failures"]} == {"unknown"}
    assert "nobody says which metadata servers there are: no worker answers" in lines["wrong now"]
    status |= {"workers": {"worker-0": _worker(goodput_met=3)}}
    assert "3 finished, unknown shed, 1 running" in dict(summary(status))["requests"]
    status |= {
        "routers": {},
        "workers": {},
        "unknown": dict.fromkeys(("routers", "workers", "metadata"), "Ray is down"),
    }
    lines = dict(summary(status))
    assert lines["members"] == "unknown workers, unknown routers, unknown metadata servers"
    assert lines["wrong now"].count("Ray is down") == 1


def test_whoever_was_started_again_is_named_and_counted_and_who_is_not_known_of_is_not_nought() -> None:
    status = _status()
    status["metadata"]["a:1"]["restarts"] = 2
    status["workers"]["worker-1"]["restarts"] = 1
    assert dict(summary(status))["restarts"] == "a:1 2, worker-1 1"
    status["workers"]["worker-0"] = DEAD
    assert dict(summary(status))["restarts"] == "a:1 2, worker-1 1 (unknown of 1)"
    status |= {"routers": {}, "workers": {"worker-0": DEAD}, "metadata": {}}
    assert dict(summary(status))["restarts"] == "unknown"


def test_a_disk_tier_that_is_missing_or_refuses_blocks_is_something_wrong() -> None:
    status = _status()
    status["workers"]["worker-0"]["disk"] = {"error": "the directory /x cannot be used: Not a directory"}
    status["workers"]["worker-1"]["disk"] = {"last_error": "No space left on device", "write_errors": 7, "corrupt": 0}
    wrong = dict(summary(status))["wrong now"]
    assert "worker-0 serves without its disk tier: the directory /x cannot" in wrong
    assert "worker-1 had trouble with its disk (7 write_errors), last: No space left on device" in wrong
    status["workers"] = {"worker-1": {**_worker(), "disk": {"last_error": "", "write_errors": 0}}}
    assert dict(summary(status))["wrong now"] == "nothing"


def test_addresses_of_metrics_stand_whole_in_a_line_of_their_own() -> None:
    status = _status()
    status["routers"]["router"]["metrics"] = "http://127.0.0.1:9100/metrics"
    status["routers"]["router-1"]["metrics"] = "not served; set router.metrics_port"
    status["metadata"]["a:1"]["metrics"] = "http://127.0.0.1:9102/metrics"
    assert dict(summary(status))["metrics"] == "http://127.0.0.1:9100/metrics http://127.0.0.1:9102/metrics"


def test_many_problems_and_long_ones_are_cut() -> None:
    status = _status()
    status["workers"] = {f"worker-{number}": {"error": "x" * 5000, "code": "c"} for number in range(50)}
    text = dict(summary(status))["wrong now"]
    assert len(text) < 250 * (MAX_PROBLEMS + 1)
    assert text.endswith("and 46 more")
