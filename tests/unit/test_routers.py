"""Several routers as clients and operators see them: who is asked, who is asked next, and one status of all."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvpool.cluster.decisions import all_records, explain
from kvpool.cluster.merge import merge, router_rows
from kvpool.cluster.routers import SHUN_S, Answer, Routers, ask_in_turn, is_router, router_name, who_answers
from kvpool.cluster.status import cluster_status
from kvpool.config import MAX_ROUTERS, parse_config
from kvpool.errors import ConfigError, DeadlineError, KVPoolError, OverloadError, RequestError, UnavailableError
from kvpool.types import RequestId

THREE = ("router", "router-1", "router-2")
SOON_S, NEVER_S = 0.01, 60.0


def _routers(*names: str) -> Routers:
    routers = Routers()
    routers.learn(names or THREE)
    return routers


# ---- whom to ask


def test_a_lone_router_keeps_the_name_it_had_and_workers_are_none() -> None:
    assert [router_name(number) for number in range(3)] == list(THREE)
    assert [is_router(name) for name in (*THREE, "worker-0", "routers")] == [True] * 3 + [False] * 2


def test_every_client_sends_a_request_to_the_same_router_and_all_routers_get_their_share() -> None:
    one, other = _routers(), _routers()
    ids = [f"req-{number}" for number in range(3000)]
    assert [one.order(name, 0.0) for name in ids] == [other.order(name, 9.0) for name in ids]
    firsts = Counter(one.order(name, 0.0)[0] for name in ids)
    assert set(firsts) == set(THREE)
    assert max(firsts.values()) < 1.1 * len(ids) / len(THREE)
    assert all(sorted(one.order(name, 0.0)) == sorted(THREE) for name in ids[:20])


def test_a_router_that_failed_comes_last_for_a_while_and_not_once_it_has_answered() -> None:
    routers = _routers()
    own = routers.order("r", 0.0)[0]
    routers.failed(own, 100.0)
    assert routers.order("r", 100.0 + SHUN_S / 2)[-1] == own
    assert routers.order("r", 100.0 + SHUN_S)[0] == own
    routers.failed(own, 200.0)
    routers.answered(own)
    assert routers.order("r", 200.0)[0] == own
    for name in THREE:
        routers.failed(name, 300.0)
    assert routers.order("r", 300.0)[0] == own


def test_before_anybody_has_told_every_name_there_could_be_is_asked_the_first_one_first() -> None:
    routers = Routers()
    assert routers.names == ()
    assert routers.order("anything", 0.0) == tuple(router_name(number) for number in range(MAX_ROUTERS))
    routers.learn(THREE)
    assert routers.names == THREE


@pytest.mark.parametrize("count", [0, MAX_ROUTERS + 1])
def test_the_number_of_routers_has_bounds(count: int) -> None:
    with pytest.raises(ConfigError, match=r"router\.count"):
        parse_config({"router": {"count": count}})


# ---- one after the other


class _Script:
    """What each router does: raises, answers, or waits until its event is set and answers then."""

    def __init__(self, **does: Any) -> None:
        self.does = {name.replace("_", "-"): item for name, item in does.items()}
        self.asked: list[str] = []
        self.cancelled: list[str] = []

    async def ask(self, name: str) -> Any:
        self.asked.append(name)
        item = self.does.get(name, UnavailableError("no such actor", gone=True))
        try:
            if isinstance(item, asyncio.Event):
                await item.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if isinstance(item, Exception):
            raise item
        return f"by {name}"


def _run(script: Callable[[], _Script], patience_s: float = NEVER_S) -> tuple[Answer | KVPoolError, _Script]:
    async def run() -> tuple[Answer | KVPoolError, _Script]:
        made = script()
        try:
            return await ask_in_turn(THREE, made.ask, patience_s), made
        except KVPoolError as error:
            return error, made

    return asyncio.run(asyncio.wait_for(run(), 20.0))


def test_an_answer_of_the_first_is_all_that_is_asked_for() -> None:
    answer, script = _run(lambda: _Script(router="ok", router_1="ok"))
    assert isinstance(answer, Answer)
    assert (answer.value, answer.late, script.asked) == ("by router", (), ["router"])


def test_the_next_one_is_asked_at_once_when_the_first_is_unavailable() -> None:
    answer, script = _run(lambda: _Script(router=UnavailableError("died"), router_1="ok"))
    assert isinstance(answer, Answer)
    assert (answer.value, answer.late, script.asked) == ("by router-1", (), ["router", "router-1"])


def test_a_silent_router_is_asked_no_longer_once_another_one_has_answered_and_is_named() -> None:
    answer, script = _run(lambda: _Script(router=asyncio.Event(), router_1="ok"), SOON_S)
    assert isinstance(answer, Answer)
    assert (answer.value, answer.late, script.cancelled) == ("by router-1", ("router",), ["router"])


def test_a_router_that_was_asked_last_is_not_called_late_when_an_earlier_one_answers() -> None:
    second = asyncio.Event()

    class Script(_Script):
        async def ask(self, name: str) -> Any:
            if name == "router-1":
                second.set()
            return await super().ask(name)

    answer, script = _run(lambda: Script(router=second, router_1=asyncio.Event()), SOON_S)
    assert isinstance(answer, Answer)
    assert (answer.value, answer.late, script.asked) == ("by router", (), ["router", "router-1"])


def test_a_router_that_is_merely_slow_is_not_given_up_when_the_others_fail() -> None:
    slow = asyncio.Event()

    class Script(_Script):
        async def ask(self, name: str) -> Any:
            if name == "router-1":
                slow.set()
            return await super().ask(name)

    answer, _ = _run(lambda: Script(router=slow, router_1=UnavailableError("died")), SOON_S)
    assert isinstance(answer, Answer)
    assert answer.value == "by router"


def test_a_refusal_that_every_router_would_give_is_final() -> None:
    error, script = _run(lambda: _Script(router=OverloadError("too much"), router_1="ok"))
    assert isinstance(error, OverloadError)
    assert script.asked == ["router"]


def test_a_router_that_does_not_exist_is_reported_only_if_none_does() -> None:
    error, _ = _run(lambda: _Script(router_1=DeadlineError("late")))
    assert isinstance(error, DeadlineError)
    error, script = _run(_Script)
    assert isinstance(error, UnavailableError)
    assert error.details == {"gone": True}
    assert script.asked == list(THREE)


def test_who_stops_waiting_leaves_no_call_behind() -> None:
    async def run() -> _Script:
        script = _Script(router=asyncio.Event(), router_1=asyncio.Event())
        asking = asyncio.ensure_future(ask_in_turn(THREE[:2], script.ask, 0.0))
        while len(script.asked) < 2:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        return script

    assert sorted(asyncio.run(asyncio.wait_for(run(), 20.0)).cancelled) == ["router", "router-1"]


# ---- all at once


def _ask_all(script: Callable[[], _Script], silence_s: float) -> tuple[dict[str, Any], _Script]:
    async def run() -> tuple[dict[str, Any], _Script]:
        made = script()
        return await who_answers(THREE, made.ask, silence_s), made

    return asyncio.run(asyncio.wait_for(run(), 20.0))


def test_all_routers_are_asked_at_once_and_a_silent_one_is_named_and_not_waited_for() -> None:
    answers, script = _ask_all(lambda: _Script(router=asyncio.Event(), router_1="ok", router_2=asyncio.Event()), SOON_S)
    assert script.asked == list(THREE)
    assert answers["router-1"] == "by router-1"
    assert all(isinstance(answers[name], DeadlineError) for name in ("router", "router-2"))
    assert "silent for 0.01 s" in str(answers["router-2"])
    assert script.cancelled == ["router", "router-2"]


def test_nobody_is_called_silent_as_long_as_no_other_router_has_answered() -> None:
    slow = asyncio.Event()

    class Script(_Script):
        async def ask(self, name: str) -> Any:
            if name == "router-1":
                await asyncio.sleep(5 * SOON_S)
                slow.set()
                raise UnavailableError("died")
            return await super().ask(name)

    answers, _ = _ask_all(lambda: Script(router=slow, router_2=slow), SOON_S)
    assert answers["router"] == "by router"
    assert isinstance(answers["router-1"], UnavailableError)


# ---- records


class _Connection:
    """Stands in for `ClusterConnection`: each router's answer, or its error."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {name.replace("_", "-"): item for name, item in answers.items()}

    async def ask_routers(self, *_: Any, **__: Any) -> dict[str, Any]:
        return self.answers


def _call(ask: Callable[..., Awaitable[Any]], *arguments: Any, **answers: Any) -> Any:
    return asyncio.run(ask(_Connection(**answers), *arguments))  # type: ignore[arg-type]


class _Unheard(_Connection):
    """No router says even which there are."""

    def __init__(self, error: KVPoolError) -> None:
        super().__init__()
        self.error = error

    async def ask_routers(self, *_: Any, **__: Any) -> dict[str, Any]:
        raise self.error


@pytest.mark.parametrize("ask", [lambda it: explain(it, RequestId("r")), all_records])
def test_without_any_router_whoever_asks_for_decisions_is_told_where_to_look_unless_the_cluster_is_gone(
    ask: Callable[[Any], Awaitable[Any]],
) -> None:
    with pytest.raises(UnavailableError, match=r"no router answers.*router\.info did not.*'kvpool status'"):
        asyncio.run(ask(_Unheard(DeadlineError("router.info did not answer in time"))))  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match="has another name"):
        asyncio.run(ask(_Unheard(UnavailableError("the cluster has another name", gone=True))))  # type: ignore[arg-type]


def _record(router: str, at_unix_ns: int, *, outcome: Any = None) -> dict[str, Any]:
    return {"router": router, "at_unix_ns": at_unix_ns, "outcome": outcome, "text": f"by {router}"}


NONE_KEPT = RequestError("no decision is kept")
ID = RequestId("r")


def test_explain_finds_the_record_on_whichever_router_has_it() -> None:
    found = _call(explain, ID, router=NONE_KEPT, router_1=_record("router-1", 5))
    assert found["router"] == "router-1"
    assert _call(explain, ID, router=UnavailableError("died"), router_1=found) == found


def test_of_several_decisions_the_one_that_was_followed_is_shown_and_the_text_tells_of_all() -> None:
    followed = _record("router-1", 5, outcome={"ttft_ns": 1})
    found = _call(explain, ID, router=_record("router", 9), router_1=followed)
    assert (found["router"], found["text"]) == ("router-1", "by router-1\nby router")


def test_a_record_that_a_silent_router_may_have_is_not_called_unknown() -> None:
    with pytest.raises(RequestError, match="no decision"):
        _call(explain, ID, router=NONE_KEPT, router_1=NONE_KEPT)
    with pytest.raises(UnavailableError, match="router-1 does not answer"):
        _call(explain, ID, router=NONE_KEPT, router_1=DeadlineError("late"))


def test_a_request_that_waits_at_one_router_is_not_called_unknown_because_others_are_asked_first() -> None:
    waits = RequestError("it has been waiting for 2 s", waiting_s=2.0)
    for other in (NONE_KEPT, DeadlineError("late")):
        with pytest.raises(RequestError, match="waiting for 2 s"):
            _call(explain, ID, router=other, router_1=waits)


def test_records_of_all_routers_come_in_the_order_of_their_decisions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="kvpool")  # a fault run in this process may have silenced it
    first, second, third = (json.dumps({"at_unix_ns": number}) for number in range(3))
    assert _call(all_records, router=[first, third], router_1=[second]) == [first, second, third]
    assert _call(all_records, router=[first], router_1=UnavailableError("died")) == [first]
    assert "router-1" in caplog.text
    with pytest.raises(UnavailableError):
        _call(all_records, router=UnavailableError("died"), router_1=UnavailableError("died"))


# ---- status


def _status(decided: int, *, failed: int = 0, members: int = 1, met: int = 0) -> dict[str, Any]:
    """As a router gives it; ``failed`` and ``met`` are what it heard."""
    links = [{"holder": "worker-0", "reader": f"worker-{number}", "tier": "host"} for number in range(1, members)]
    return {
        "router_id": "id",
        "policy": "kvpool",
        "workers": [{"worker": f"worker-{number}@1", "state": "alive"} for number in range(members)],
        "links": links,
        "decisions": {"redo": decided, "load": 1},
        "unfollowed": {"redo": 1},
        "admissions": {"queued_now": 1},
        "goodput": {"met": met, "missed_ttft": 0, "missed_tpot": 0, "shed": 2},
        "failures": {"stall": failed},
        "failures_by_link": [{"holder": "worker-0", "reader": "worker-1", "kind": "stall", "count": failed}],
        "records": decided + 1,
        "records_dropped": 0,
        "promises": 1,
        "share_of_the_traffic": 0.5,
        "counters": {"outcomes": decided, "reports_repeated": 3},
        "learned": {"started_from": "priors"},
        "metadata": {"connected": True},
        "metrics": "http://127.0.0.1:9100/metrics",
    }


def test_what_each_router_did_is_added_up_and_what_all_of_them_heard_is_not() -> None:
    merged = merge({"router": _status(4, failed=2, met=9), "router-1": _status(6, failed=5, met=9, members=2)})
    assert merged["decisions"] == {"redo": 10, "load": 2}
    assert merged["admissions"] == {"queued_now": 2}
    assert (merged["records"], merged["promises"]) == (12, 2)
    assert merged["share_of_the_traffic"] == {"router": 0.5, "router-1": 0.5}
    assert merged["failures"] == {"stall": 5}
    assert [row["count"] for row in merged["failures_by_link"]] == [5]
    assert merged["goodput"] == {"met": 9, "missed_ttft": 0, "missed_tpot": 0, "shed": 4}
    assert merged["counters"] == {"outcomes": 10, "reports_repeated": 3}
    assert [row["worker"] for row in merged["workers"]] == ["worker-0@1", "worker-1@1"]
    assert len(merged["links"]) == 1
    assert json.loads(json.dumps(merged)) == merged


def test_a_lone_router_is_shown_as_it_is() -> None:
    status = _status(4)
    assert merge({"router": status}) == status


def test_status_says_for_each_router_what_it_shares_of_the_traffic_and_who_is_down() -> None:
    dead = {"error": "not reachable", "code": "unavailable"}
    rows = router_rows({"router": _status(5), "router-1": _status(2), "router-2": dead})
    assert rows["router-2"] == dead
    assert [rows[name]["decisions"] for name in THREE[:2]] == [6, 3]
    assert rows["router"]["share_of_decisions"] == pytest.approx(2 / 3)
    assert rows["router-1"]["directory"] == "connected"


class _NoRouter:
    """Stands in for a connection to a cluster whose routers stand still."""

    namespace = "kvpool-of-nobody"

    async def info(self, _timeout_s: float) -> Any:
        raise DeadlineError("router.info did not answer in time")

    async def actors(self) -> tuple[str, ...]:
        return "router", "router-1", "worker-0"

    async def ask_ray(self, *_: Any) -> dict[str, int]:
        raise UnavailableError("Ray did not answer in time")

    async def call(self, actor: str, _: str, **__: Any) -> dict[str, Any]:
        return {"running": 1, "of": actor}


def test_without_any_router_the_status_still_has_the_workers_and_names_the_routers() -> None:
    status = asyncio.run(cluster_status(_NoRouter()))  # type: ignore[arg-type]
    assert status["workers"] == {"worker-0": {"running": 1, "of": "worker-0"}}
    assert [part["code"] for part in (status["router"], *status["routers"].values())] == ["deadline_exceeded"] * 3
    assert (status["metadata"], status["unknown"].keys()) == ({}, {"metadata"})


class _NoRay(_NoRouter):
    """Ray does not answer either."""

    async def actors(self) -> tuple[str, ...]:
        raise UnavailableError("Ray did not answer in time")


class _Nobody(_NoRouter):
    """Ray knows nobody of that name."""

    async def actors(self) -> tuple[str, ...]:
        return ()


def test_a_cluster_that_is_not_there_is_an_error_and_not_an_empty_status() -> None:
    with pytest.raises(UnavailableError, match=r"'kvpool-of-nobody'.*another name"):
        asyncio.run(cluster_status(_Nobody()))  # type: ignore[arg-type]


def test_without_ray_the_status_says_that_nothing_is_known_instead_of_that_nothing_is_there() -> None:
    status = asyncio.run(cluster_status(_NoRay()))  # type: ignore[arg-type]
    assert [len(status[kind]) for kind in ("routers", "workers", "metadata")] == [0, 0, 0]
    assert status["unknown"].keys() == {"routers", "workers", "metadata"}
    assert "Ray did not answer" in status["unknown"]["workers"]
