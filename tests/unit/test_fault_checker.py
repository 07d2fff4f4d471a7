"""The law of fault runs: one canary per rule that breaks it, and an honest history that keeps it.

Histories are written here by hand, as lines, so that the whole way from the file to the verdict is under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.faults.checker import RULES, Rule, Verdict, check_history, count_fallbacks
from kvpool.faults.history import parse_record
from kvpool.faults.measures import Bounds, detection_ns
from kvpool.faults.report import as_data, html, row, verdict_line

S = 1_000_000_000
MS = 1_000_000
TOKENS = [5, 6, 7, 8]
HOLDER, READER, SUCCESSOR = "worker-0@1", "worker-1@2", "worker-0@9"
FAULT_S, HEAL_S, END_S = 6.0, 8.0, 20.0
PERIOD_S = 0.25


class Story:
    """Writes a history, line by line; the canaries change it before it is judged."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def add(self, at_s: float, kind: str, **data: Any) -> dict[str, Any]:
        line = {"at_ns": int(at_s * S), "kind": kind, **data}
        self.lines.append(line)
        return line

    def ask(self, number: int, at_s: float, *, took_s: float = 0.1, **changes: Any) -> None:
        """A request that is answered at once."""
        name = f"q-{number}"
        self.add(at_s, "invoke", **{**INVOKED, "id": name, **changes})
        self.add(at_s, "attempt", id=name, number=1, worker=READER, plan="redo", holders=[], planned_tokens=0)
        self.add(at_s + took_s, "chunk", id=name, tokens=TOKENS)
        self.add(at_s + took_s, "attempt_end", id=name, number=1, code=None)
        self.add(at_s + took_s, "response", id=name, tokens=TOKENS, finish="length", stats={"attempts": 1})

    def find(self, kind: str, **wanted: Any) -> dict[str, Any]:
        """The first line of a kind."""
        for line in self.lines:
            if line["kind"] == kind and all(line.get(name) == value for name, value in wanted.items()):
                return line
        raise AssertionError(f"no {kind} {wanted}")

    def drop(self, kind: str, **wanted: Any) -> None:
        self.lines.remove(self.find(kind, **wanted))

    def judge(self) -> Verdict:
        """Through text and back, sorted as they would have been written."""
        ordered = sorted(self.lines, key=lambda line: line["at_ns"])
        return check_history(parse_record(at, json.dumps(line)) for at, line in enumerate(ordered, start=1))


INVOKED = {"prompt": "p", "style": "stream", "timeout_ns": 10 * S, "may_expire": False, "max_tokens": 4}


def honest() -> Story:
    """A holder is killed and comes back under a steady load; every promise is kept."""
    story = Story()
    run = {"scenario": "kill-holder", "seed": 1, "mechanisms": ["a real signal"], "lease_ns": 2 * S}
    story.add(0.0, "run", **run, ttft_limit_ns=S)
    story.add(0.0, "reference", prompt="p", tokens=TOKENS)
    story.add(0.5, "start")
    for number in range(int((END_S - 1.0) / PERIOD_S)):
        story.ask(number, 1.0 + PERIOD_S * number)
    story.add(5.9, "state", alive=[HOLDER, READER])
    story.add(FAULT_S, "fault", fault="f-1", name="kill-holder", target="worker-0", key=HOLDER, mechanism="SIGKILL")
    story.add(6.4, "state", alive=[READER])
    story.add(HEAL_S, "heal", fault="f-1", how="a new process serves")
    story.add(END_S + 0.2, "rest")
    held = {SUCCESSOR: "2:aa", READER: "3:bb"}
    workers = {
        name: {"key": key, "digest": held[key], "broken": None, "active": 0, "failures": {}}
        for name, key in (("worker-0", SUCCESSOR), ("worker-1", READER))
    }
    story.add(END_S + 0.4, "audit", workers=workers, router=dict(held), directories={"a:1": dict(held)})
    story.add(END_S + 0.5, "end", errors=[])
    return story


def audit(story: Story) -> dict[str, Any]:
    return story.find("audit")


# ── canaries: each breaks one rule on purpose ────────────────────────────────────────────────────────────────────────


def breaks_off(story: Story) -> None:
    story.drop("end")


def never_healed(story: Story) -> None:
    story.drop("heal")


def run_failed(story: Story) -> None:
    story.find("end")["errors"] = ["worker-0 did not come back"]


def about_nobody(story: Story) -> None:
    story.add(9.0, "chunk", id="never-invoked", tokens=[1])


def wrong_token(story: Story) -> None:
    story.find("response", id="q-7")["tokens"] = [5, 6, 7, 9]


def short_answer(story: Story) -> None:
    story.find("response", id="q-7")["tokens"] = TOKENS[:3]
    story.find("chunk", id="q-7")["tokens"] = TOKENS[:3]


def streamed_twice(story: Story) -> None:
    story.find("chunk", id="q-7")["tokens"] = [5, 6, 6, 7, 8]


def wrong_prefix_before_an_error(story: Story) -> None:
    line = story.find("response", id="q-7")
    line.update(kind="error", code="deadline_exceeded", message="")
    story.find("invoke", id="q-7")["may_expire"] = True
    story.find("chunk", id="q-7")["tokens"] = [5, 9]


def no_reference(story: Story) -> None:
    story.find("invoke", id="q-7")["prompt"] = "another"


def lost(story: Story) -> None:
    story.find("response", id="q-7").update(kind="error", code="unavailable", message="")


def expired_without_leave(story: Story) -> None:
    story.find("response", id="q-7").update(kind="error", code="deadline_exceeded", message="")


def cancelled_by_nobody(story: Story) -> None:
    story.find("response", id="q-7").update(finish="cancelled")


def never_ended(story: Story) -> None:
    story.drop("response", id="q-7")


def hung(story: Story) -> None:
    story.find("invoke", id="q-1")["timeout_ns"] = S
    story.find("response", id="q-1")["at_ns"] += 4 * S
    story.find("chunk", id="q-1")["at_ns"] += 4 * S


def answered_twice(story: Story) -> None:
    story.add(9.0, "response", id="q-3", tokens=TOKENS, finish="length", stats={"attempts": 1})


def error_after_the_answer(story: Story) -> None:
    story.add(9.0, "error", id="q-3", code="invalid_request", message="nothing is left to generate")


def chunk_after_the_end(story: Story) -> None:
    story.add(9.0, "chunk", id="q-3", tokens=[])


def nameless_retry(story: Story) -> None:
    story.find("attempt_end", id="q-7")["code"] = "RayActorError"
    story.add(4.0, "attempt", id="q-7", number=2, worker=READER, plan="redo", holders=[])
    story.find("response", id="q-7")["stats"] = {"attempts": 2}


def uncounted_retry(story: Story) -> None:
    story.find("attempt_end", id="q-7")["code"] = "unavailable"
    story.add(4.0, "attempt", id="q-7", number=2, worker=READER, plan="redo", holders=[])


def nameless_load_failure(story: Story) -> None:
    story.find("response", id="q-7")["stats"]["load_failures"] = ["kvpool_error"]


def load_failure_that_no_worker_counted(story: Story) -> None:
    story.find("response", id="q-7")["stats"]["load_failures"] = ["stall"]


def spoilt_block_accepted(story: Story) -> None:
    story.find("fault").update(name="link-corrupt", mechanism="corrupting transport: …")
    story.find("attempt", id="q-24").update(plan="load", holders=[HOLDER], planned_tokens=64, forced=True)
    story.find("response", id="q-24")["stats"]["tokens_loaded"] = 64


def dead_holder_offered(story: Story) -> None:
    line = story.find("attempt", id="q-36")  # sent 4 s after the kill, long after the lease
    line.update(plan="load", holders=[HOLDER], planned_tokens=64)


def dead_worker_chosen(story: Story) -> None:
    story.find("attempt", id="q-36")["worker"] = HOLDER


def failed_holder_offered_again(story: Story) -> None:
    """Within its lease, but more than a second after a load from it had failed."""
    story.find("attempt", id="q-20").update(plan="load", holders=[HOLDER], planned_tokens=64)
    story.find("response", id="q-20")["stats"]["load_failures"] = ["peer_gone"]
    audit(story)["workers"]["worker-1"]["failures"] = {"peer_gone": 1}
    story.find("attempt", id="q-26").update(plan="load", holders=[HOLDER], planned_tokens=64)


def never_audited(story: Story) -> None:
    story.drop("audit")


def index_forgot_blocks(story: Story) -> None:
    audit(story)["router"][READER] = "2:99"


def index_keeps_the_dead(story: Story) -> None:
    audit(story)["router"][HOLDER] = "1:11"


def index_does_not_know_the_successor(story: Story) -> None:
    del audit(story)["directories"]["a:1"][SUCCESSOR]


def worker_does_not_answer(story: Story) -> None:
    audit(story)["workers"]["worker-0"] = {"error": "unavailable"}


def directory_does_not_answer(story: Story) -> None:
    audit(story)["directories"]["a:1"] = {"error": "not connected"}


def page_leaked(story: Story) -> None:
    audit(story)["workers"]["worker-1"]["broken"] = "block 3 is referenced by nobody"


def request_left_over(story: Story) -> None:
    audit(story)["workers"]["worker-1"]["active"] = 1


def slow_after_healing(story: Story) -> None:
    """First tokens take longer than the limit until 6 s after the healing."""
    for line in story.lines:
        if line["kind"] in ("chunk", "response") and HEAL_S <= line["at_ns"] / S < HEAL_S + 6.0:
            line["at_ns"] += 2 * S


def never_back(story: Story) -> None:
    for line in story.lines:
        if line["kind"] in ("chunk", "response") and line["at_ns"] / S >= HEAL_S:
            line["at_ns"] += 2 * S
    for kind, at_s in (("rest", 23.0), ("audit", 23.1), ("end", 23.2)):
        story.find(kind)["at_ns"] = int(at_s * S)


CANARIES: dict[Rule, tuple[Callable[[Story], None], ...]] = {
    Rule.WHOLE: (breaks_off, never_healed, run_failed, about_nobody),
    Rule.OUTPUTS_EQUAL: (wrong_token, short_answer, streamed_twice, wrong_prefix_before_an_error, no_reference),
    Rule.NONE_LOST: (lost, expired_without_leave, cancelled_by_nobody, never_ended),
    Rule.NONE_HUNG: (hung,),
    Rule.ANSWERED_ONCE: (answered_twice, error_after_the_answer, chunk_after_the_end),
    Rule.FALLBACKS_NAMED: (
        nameless_retry,
        uncounted_retry,
        nameless_load_failure,
        load_failure_that_no_worker_counted,
    ),
    Rule.CORRUPT_REFUSED: (spoilt_block_accepted,),
    Rule.DEAD_NOT_OFFERED: (dead_holder_offered, dead_worker_chosen, failed_holder_offered_again),
    Rule.INDEX_EQUAL: (
        never_audited,
        index_forgot_blocks,
        index_keeps_the_dead,
        index_does_not_know_the_successor,
        worker_does_not_answer,
        directory_does_not_answer,
    ),
    Rule.BOOKS_BALANCE: (page_leaked, request_left_over),
    Rule.RECOVERED: (slow_after_healing, never_back),
}


def test_an_honest_history_breaks_no_rule() -> None:
    assert [str(item) for item in honest().judge().violations] == []


def test_every_rule_has_a_canary() -> None:
    assert set(CANARIES) == set(Rule)
    assert len(RULES) == len(Rule)


@pytest.mark.parametrize(
    ("rule", "canary"),
    [(rule, canary) for rule, canaries in CANARIES.items() for canary in canaries],
    ids=lambda item: item.name if isinstance(item, Rule) else item.__name__,
)
def test_a_canary_is_caught_by_its_rule(rule: Rule, canary: Callable[[Story], None]) -> None:
    story = honest()
    canary(story)
    verdict = story.judge()
    assert rule in {violation.rule for violation in verdict.violations}
    assert not verdict.holds


def test_a_violation_points_at_the_lines_that_show_it() -> None:
    story = honest()
    wrong_token(story)
    (violation,) = story.judge().violations
    ordered = sorted(story.lines, key=lambda line: line["at_ns"])
    assert [ordered[line - 1]["kind"] for line in violation.lines] == ["invoke", "response"]
    assert {ordered[line - 1]["id"] for line in violation.lines} == {"q-7"}


# ── what is no violation ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_with_a_tight_deadline_may_expire() -> None:
    story = honest()
    expired_without_leave(story)
    story.find("invoke", id="q-7")["may_expire"] = True
    assert story.judge().holds


def test_a_cancelled_request_may_end_after_any_prefix() -> None:
    story = honest()
    story.find("response", id="q-7").update(finish="cancelled", tokens=TOKENS[:2])
    story.add(2.8, "cancel", id="q-7")
    assert story.judge().holds


def test_a_named_and_counted_retry_is_a_fallback_and_no_violation() -> None:
    story = honest()
    story.find("attempt_end", id="q-7")["code"] = "unavailable"
    story.add(2.8, "attempt", id="q-7", number=2, worker=READER, plan="redo", holders=[])
    story.find("response", id="q-7")["stats"] = {"attempts": 2}
    verdict = story.judge()
    assert verdict.holds
    assert verdict.fallbacks == {"retry.unavailable": 1}


def test_blocks_that_another_request_loads_there_meanwhile_are_not_held_against_a_spoilt_holder() -> None:
    story = honest()
    spoilt_block_accepted(story)
    assert {item.rule for item in story.judge().violations} == {Rule.CORRUPT_REFUSED}
    worker, at_ns = (story.find("attempt", id="q-24")[name] for name in ("worker", "at_ns"))
    other = story.find("attempt", id="q-23")
    other.update(plan="load", holders=["worker-9@1"], planned_tokens=64, worker=worker)
    story.find("response", id="q-23")["at_ns"] = at_ns + 1
    assert Rule.CORRUPT_REFUSED not in {item.rule for item in story.judge().violations}


def test_a_forced_load_from_a_dead_holder_is_not_held_against_the_router() -> None:
    story = honest()
    dead_holder_offered(story)
    story.find("attempt", id="q-36")["forced"] = True
    assert story.judge().holds


def test_a_dead_holder_may_be_offered_while_the_directory_is_down_too() -> None:
    story = honest()
    dead_holder_offered(story)
    story.add(5.9, "fault", fault="f-2", name="kill-metadata", target="metadata-0", mechanism="SIGKILL")
    story.add(10.5, "heal", fault="f-2", how="a new process serves")
    assert Rule.DEAD_NOT_OFFERED not in {item.rule for item in story.judge().violations}


def test_a_drained_worker_must_get_nothing_new_at_once() -> None:
    story = honest()
    story.find("fault").update(name="drain-under-load", mechanism="drain")
    story.find("attempt", id="q-25")["worker"] = HOLDER  # sent 1.25 s after the drain
    assert {item.rule for item in story.judge().violations} == {Rule.DEAD_NOT_OFFERED}


# ── measures and reports ─────────────────────────────────────────────────────────────────────────────────────────────


def test_detection_is_the_first_look_at_the_router_without_the_victim() -> None:
    story = honest().judge().story
    assert detection_ns(story, story.faults["f-1"]) == 400 * MS


def test_recovery_is_counted_from_the_healing() -> None:
    story = honest()
    for line in story.lines:
        if line["kind"] in ("chunk", "response") and HEAL_S <= line["at_ns"] / S < HEAL_S + 2.0:
            line["at_ns"] += 2 * S
    (recovery,) = story.judge().recoveries
    assert recovery.took_ns is not None
    assert 1 * S < recovery.took_ns < 2.5 * S


def test_faults_without_room_between_them_recover_as_one() -> None:
    story = honest()
    story.add(9.0, "fault", fault="f-2", name="pause-router", target="router", mechanism="SIGSTOP")
    story.add(10.0, "heal", fault="f-2", how="SIGCONT")
    (recovery,) = story.judge().recoveries
    assert recovery.names == "kill-holder, pause-router"
    assert recovery.heal_ns == 10 * S


def test_bounds_can_be_made_stricter_offline() -> None:
    ordered = sorted(honest().lines, key=lambda line: line["at_ns"])
    records = [parse_record(at, json.dumps(line)) for at, line in enumerate(ordered, start=1)]
    strict = check_history(records, Bounds(recovery_share=1.1))
    assert {item.rule for item in strict.violations} == {Rule.RECOVERED}


def test_a_report_shows_every_number_and_every_violation() -> None:
    story = honest()
    wrong_token(story)
    verdict = story.judge()
    numbers = row(verdict)
    assert (numbers["wrong"], numbers["lost"], numbers["violations"]) == (1, 0, 1)
    page = html([(verdict, "run.jsonl")])
    assert "q-7 differs from its reference at token 3" in page
    assert "<svg" in page
    assert "http" not in page
    json.dumps(as_data(verdict, "run.jsonl"))


def test_every_request_sent_is_answered_cancelled_expired_or_lost() -> None:
    story = honest()
    for number, change in (
        (3, {"kind": "error", "code": "unavailable"}),
        (4, {"kind": "error", "code": "unavailable"}),
    ):
        story.find("response", id=f"q-{number}").update(change)
    story.find("invoke", id="q-4")["may_expire"] = True  # which allows no other error
    story.find("response", id="q-5").update(kind="error", code="deadline_exceeded")
    story.find("invoke", id="q-5")["may_expire"] = True
    story.find("response", id="q-6").update(finish="cancelled", tokens=TOKENS[:2])
    story.add(2.8, "cancel", id="q-6")
    cancelled_by_nobody(story)  # q-7
    story.drop("response", id="q-8")
    numbers = row(story.judge())
    parts = [numbers[key] for key in ("ok", "cancelled", "expired", "lost")]
    assert parts[1:] == [1, 1, 4]
    assert sum(parts) == numbers["requests"]


def test_the_verdict_in_words_names_each_broken_rule_once() -> None:
    assert verdict_line(honest().judge()) == "every rule holds"
    story = honest()
    wrong_token(story)
    assert verdict_line(story.judge()) == "1 rule broken: outputs equal the reference run"
    for number in (3, 4):
        story.find("response", id=f"q-{number}").update(kind="error", code="unavailable", message="")
    said = verdict_line(story.judge())
    assert said.startswith("2 rules broken: ")
    assert said.count("no request is lost") == 1


def test_an_empty_history_is_reported_and_not_crashed_on() -> None:
    verdict = Story().judge()
    assert not verdict.holds
    assert "Nothing was sent" in html([(verdict, "empty.jsonl")])
    assert count_fallbacks(verdict.story) == {}
