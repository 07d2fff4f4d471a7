"""The law, and whether a run kept it: judged offline from the history alone.  (pure)

Each rule is one function from a story to violations; `RULES` lists them all, and each has a canary in the tests that
breaks it. A violation names the lines of the history that show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvpool.errors import CapacityError, DeadlineError, KVPoolError, StaleError, TransferError, UnavailableError
from kvpool.faults.history import CORRUPTING, DRAINED, KILLED, STOPPED, Record
from kvpool.faults.measures import Bounds, Recovery, recoveries
from kvpool.faults.story import Attempt, Fault, Request, Story, read_story


def _codes(kinds: Iterable[type[KVPoolError]]) -> frozenset[str]:
    """Codes of some errors and of everything below them."""
    return frozenset(code for kind in kinds for code in (kind.code, *_codes(kind.__subclasses__())))


DISK = "disk"
"""What a worker calls a load from its own disk that the file system refused."""

KNOWN_REASONS = _codes((UnavailableError, StaleError, CapacityError, TransferError)) | {DISK}
"""Names under which a request may fall back on another worker or on redoing what it could not load."""


class Rule(Enum):
    """What must hold."""

    WHOLE = "the history is whole, and every fault was healed"
    OUTPUTS_EQUAL = "outputs equal the reference run"
    NONE_LOST = "no request is lost"
    NONE_HUNG = "no request hangs past its deadline"
    ANSWERED_ONCE = "no request is answered twice"
    FALLBACKS_NAMED = "every fallback is counted and named"
    CORRUPT_REFUSED = "no block with a wrong checksum is accepted"
    DEAD_NOT_OFFERED = "a dead holder is off every decision in time"
    INDEX_EQUAL = "after healing, the index equals the workers' truth"
    BOOKS_BALANCE = "at rest, no page or request is left over"
    RECOVERED = "service is back in time after healing"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: what happened, and the lines of the history that show it."""

    rule: Rule
    message: str
    lines: tuple[int, ...]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.lines)) or "the end"
        return f"{self.rule.value}: {self.message} (line {shown})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checker says of a history."""

    story: Story
    violations: tuple[Violation, ...]
    recoveries: tuple[Recovery, ...]
    fallbacks: dict[str, int]

    @property
    def holds(self) -> bool:
        """No rule was broken."""
        return not self.violations


def check_history(records: Iterable[Record], bounds: Bounds | None = None) -> Verdict:
    """Judge a history by every rule."""
    bounds = bounds or Bounds()
    story = read_story(records)
    violations = tuple(violation for rule in RULES for violation in rule(story, bounds))
    return Verdict(story, violations, recoveries(story, bounds), count_fallbacks(story))


def count_fallbacks(story: Story) -> dict[str, int]:
    """How often a request went another way than planned, by name.

    ``retry.CODE``: the attempt ended with that error and another was made. ``load.CODE``: a load failed like that and
    was redone. ``load.not_needed``: a load was planned and nothing failed, but the worker had the blocks by then or
    computed them sooner.
    """
    counts: Counter[str] = Counter()
    for request in story.requests.values():
        counts.update(f"retry.{attempt.code or 'unnamed'}" for attempt in request.attempts[:-1])
        end = request.end
        if end is None or not end.stats:
            continue
        failures = end.stats.get("load_failures", ())
        counts.update(f"load.{code}" for code in failures)
        planned = request.attempts[-1].planned_tokens if request.attempts else 0
        if planned and not failures and not end.stats.get("tokens_loaded"):
            counts["load.not_needed"] += 1
    return dict(sorted(counts.items()))


# ── the rules ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _whole(story: Story, _bounds: Bounds) -> Iterator[Violation]:
    if not story.run:
        yield Violation(Rule.WHOLE, "the history does not say what was run", (1,))
    if story.end is None:
        yield Violation(Rule.WHOLE, "the history breaks off", (story.last_line,))
    else:
        for error in story.end.data.get("errors", ()):
            yield Violation(Rule.WHOLE, f"the run itself failed: {error}", (story.end.line,))
    if story.strays:
        yield Violation(Rule.WHOLE, "about something that never began", tuple(story.strays))
    for fault in story.faults.values():
        if fault.heal_ns is None:
            yield Violation(Rule.WHOLE, f"{fault.name} of {fault.target} was never healed", (fault.line,))


def _outputs_equal(story: Story, _bounds: Bounds) -> Iterator[Violation]:
    for request in story.requests.values():
        end = request.end
        if request.prompt is None:
            continue
        expected = story.references.get(request.prompt)
        if expected is None:
            yield Violation(Rule.OUTPUTS_EQUAL, f"{request.id} has no reference to compare with", (request.line,))
            continue
        delivered = tuple(request.delivered)
        if end is None or end.code is not None:
            if delivered != expected[: len(delivered)]:
                yield _wrong(request, delivered, expected, request.line)
        elif end.finish == "cancelled":
            if end.tokens != expected[: len(end.tokens)]:
                yield _wrong(request, end.tokens, expected, end.line)
        elif end.tokens != expected:
            yield _wrong(request, end.tokens, expected, end.line)
        elif delivered != end.tokens:
            yield Violation(
                Rule.OUTPUTS_EQUAL, f"{request.id} was streamed other tokens than its answer has", (end.line,)
            )


def _wrong(request: Request, got: tuple[int, ...], expected: tuple[int, ...], line: int) -> Violation:
    place = next((at for at, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), len(got))
    message = f"{request.id} differs from its reference at token {place} ({len(got)} tokens of {len(expected)})"
    return Violation(Rule.OUTPUTS_EQUAL, message, (request.line, line))


def _none_lost(story: Story, _bounds: Bounds) -> Iterator[Violation]:
    for request in story.requests.values():
        end = request.end
        if end is None:
            yield Violation(Rule.NONE_LOST, f"{request.id} never ended", (request.line,))
        elif end.code is not None and not (request.may_expire and end.code == DeadlineError.code):
            yield Violation(Rule.NONE_LOST, f"{request.id} ended with {end.code}", (request.line, end.line))
        elif end.finish == "cancelled" and not request.cancelled:
            yield Violation(Rule.NONE_LOST, f"{request.id} was cancelled by nobody", (request.line, end.line))


def _none_hung(story: Story, bounds: Bounds) -> Iterator[Violation]:
    for request in story.requests.values():
        end = request.end
        until_ns = story.last_ns if end is None else end.at_ns
        over_ns = until_ns - request.at_ns - request.timeout_ns
        if over_ns > bounds.deadline_grace_ns:
            lines = (request.line,) if end is None else (request.line, end.line)
            yield Violation(Rule.NONE_HUNG, f"{request.id} was {over_ns / 1e9:.1f} s past its deadline", lines)


def _answered_once(story: Story, _bounds: Bounds) -> Iterator[Violation]:
    for request in story.requests.values():
        if len(request.endings) > 1:
            lines = tuple(end.line for end in request.endings)
            yield Violation(Rule.ANSWERED_ONCE, f"{request.id} ended {len(lines)} times", lines)
        if request.late_lines:
            yield Violation(Rule.ANSWERED_ONCE, f"{request.id} went on after its end", tuple(request.late_lines))


def _fallbacks_named(story: Story, _bounds: Bounds) -> Iterator[Violation]:
    seen: Counter[tuple[str, str]] = Counter()
    for request in story.requests.values():
        for attempt in request.attempts[:-1]:
            if attempt.code not in KNOWN_REASONS:
                line = attempt.end_line or attempt.line
                yield Violation(Rule.FALLBACKS_NAMED, f"{request.id} was retried for {attempt.code!r}", (line,))
        end = request.end
        if end is None or end.code is not None or not request.attempts:
            continue
        told = end.stats.get("attempts", 1)
        if told != len(request.attempts):
            message = f"{request.id} counts {told} attempts and made {len(request.attempts)}"
            yield Violation(Rule.FALLBACKS_NAMED, message, (end.line,))
        for code in end.stats.get("load_failures", ()):
            if code not in KNOWN_REASONS:
                yield Violation(Rule.FALLBACKS_NAMED, f"{request.id}: a load failed as {code!r}", (end.line,))
            seen[request.attempts[-1].worker, code] += 1
    yield from _counted_by_workers(story, seen)


def _counted_by_workers(story: Story, seen: Counter[tuple[str, str]]) -> Iterator[Violation]:
    """Incarnations that live at the end have counted at least what their clients saw."""
    if not story.audits:
        return
    audit = story.audits[-1]
    counted = {item["key"]: item.get("failures", {}) for item in audit.data["workers"].values() if "key" in item}
    for (worker, code), count in sorted(seen.items()):
        if worker in counted and counted[worker].get(code, 0) < count:
            message = f"{worker} counts {counted[worker].get(code, 0)} failures {code!r}, its clients saw {count}"
            yield Violation(Rule.FALLBACKS_NAMED, message, (audit.line,))


def _corrupt_refused(story: Story, bounds: Bounds) -> Iterator[Violation]:
    """While everything a holder offers is spoilt, nothing may count as loaded from it.

    Only forced loads are looked at: they have no other holder to turn to. The bytes themselves are right, so that
    outputs would not show it. A worker never orders a block twice, so a request may get blocks that another one loads
    there from another holder at that time: such a request says nothing.
    """
    for fault in story.faults.values():
        if not fault.mechanism.startswith(CORRUPTING) or fault.key is None:
            continue
        for request in story.requests.values():
            end, attempt = request.end, request.attempts[-1] if request.attempts else None
            if end is None or attempt is None or not attempt.forced or attempt.holders != (fault.key,):
                continue
            inside = fault.at_ns + bounds.settle_ns < attempt.at_ns and end.at_ns < (fault.heal_ns or story.last_ns)
            if inside and end.stats.get("tokens_loaded") and not _joined_others(story, attempt, fault.key, end.at_ns):
                message = f"{request.id} counts {end.stats['tokens_loaded']} tokens as loaded from {fault.key}"
                yield Violation(Rule.CORRUPT_REFUSED, message, (fault.line, attempt.line, end.line))


def _joined_others(story: Story, attempt: Attempt, holder: str, until_ns: int) -> bool:
    """Meanwhile somebody else loads on the same worker from another holder."""
    for request in story.requests.values():
        for other in request.attempts:
            if other.worker != attempt.worker or not set(other.holders) - {holder}:
                continue
            end_ns = story.last_ns if request.end is None else request.end.at_ns
            if other.at_ns < until_ns and attempt.at_ns < end_ns:
                return True
    return False


def _dead_not_offered(story: Story, bounds: Bounds) -> Iterator[Violation]:
    lease_ns = int(story.run.get("lease_ns", 0))
    for fault in story.faults.values():
        is_told = fault.mechanism.startswith(DRAINED)
        is_off = is_told or fault.mechanism.startswith((KILLED, STOPPED))
        if fault.key is None or not is_off or _news_cut_off(story, fault):
            continue
        may_return = fault.mechanism.startswith(STOPPED)
        until_ns = (may_return and fault.heal_ns) or story.last_ns
        limit_ns = fault.at_ns + bounds.detect_ns + (0 if is_told else lease_ns)
        failed_ns = _first_failed_load(story, fault, until_ns)
        if failed_ns is not None:
            limit_ns = min(limit_ns, failed_ns + bounds.detect_ns)
        for request in story.requests.values():
            for attempt in request.attempts:
                if limit_ns < attempt.at_ns < until_ns and _offers(attempt, fault.key):
                    late_s = (attempt.at_ns - fault.at_ns) / 1e9
                    message = f"{request.id} was sent to {fault.key} {late_s:.1f} s after {fault.name}"
                    yield Violation(Rule.DEAD_NOT_OFFERED, message, (fault.line, attempt.line))


def _news_cut_off(story: Story, fault: Fault) -> bool:
    """Router or directory were down as well, so the news had to wait for them."""
    end_ns = fault.heal_ns or story.last_ns
    return any(
        other.target.startswith(("router", "metadata"))
        and other.at_ns < end_ns
        and (other.heal_ns or story.last_ns) > fault.at_ns
        for other in story.faults.values()
    )


def _first_failed_load(story: Story, fault: Fault, until_ns: int) -> int | None:
    """When a client first saw that a load from the fault's victim had failed."""
    times = [
        end.at_ns
        for request in story.requests.values()
        if (end := request.end) is not None
        and end.stats.get("load_failures")
        and request.attempts
        and fault.at_ns <= end.at_ns < until_ns
        and request.attempts[-1].holders == (fault.key,)
        and request.attempts[-1].at_ns >= fault.at_ns
    ]
    return min(times, default=None)


def _offers(attempt: Attempt, key: str) -> bool:
    return attempt.worker == key or (key in attempt.holders and not attempt.forced)


def _index_equal(story: Story, _bounds: Bounds) -> Iterator[Violation]:
    if not story.audits:
        yield Violation(Rule.INDEX_EQUAL, "nobody was audited", (story.last_line,))
        return
    audit = story.audits[-1]
    truth = {}
    for name, item in audit.data["workers"].items():
        if "error" in item:
            yield Violation(Rule.INDEX_EQUAL, f"{name} does not answer: {item['error']}", (audit.line,))
        else:
            truth[item["key"]] = item["digest"]
    believers = {"the router": audit.data["router"], **audit.data["directories"]}
    for name, belief in believers.items():
        for message in _differences(truth, belief):
            yield Violation(Rule.INDEX_EQUAL, f"{name}: {message}", (audit.line,))


def _differences(truth: dict[str, Any], belief: dict[str, Any]) -> Iterator[str]:
    if "error" in belief:
        yield f"does not answer: {belief['error']}"
        return
    for key in sorted(truth.keys() | belief.keys()):
        if key not in belief:
            yield f"does not know {key}"
        elif key not in truth:
            yield f"still knows {key}"
        elif truth[key] != belief[key]:
            yield f"believes that {key} holds {belief[key]}, it holds {truth[key]}"


def _books_balance(story: Story, _bounds: Bounds) -> Iterator[Violation]:
    for audit in story.audits[-1:]:
        for name, item in audit.data["workers"].items():
            if item.get("broken"):
                yield Violation(Rule.BOOKS_BALANCE, f"{name}: {item['broken']}", (audit.line,))
            if item.get("active"):
                yield Violation(Rule.BOOKS_BALANCE, f"{name} is not at rest: {item['active']} active", (audit.line,))


def _recovered(story: Story, bounds: Bounds) -> Iterator[Violation]:
    found = recoveries(story, bounds)
    for item in found:
        took_ns = item.took_ns
        if took_ns is None:
            message = f"goodput was not back at {bounds.recovery_share:.0%} after {item.names} before the run ended"
            yield Violation(Rule.RECOVERED, message, (item.heal_line,))
        elif took_ns > bounds.recovery_ns:
            message = f"goodput took {took_ns / 1e9:.1f} s to be back after {item.names}"
            yield Violation(Rule.RECOVERED, message, (item.heal_line,))


RULES: tuple[Callable[[Story, Bounds], Iterator[Violation]], ...] = (
    _whole,
    _outputs_equal,
    _none_lost,
    _none_hung,
    _answered_once,
    _fallbacks_named,
    _corrupt_refused,
    _dead_not_offered,
    _index_equal,
    _books_balance,
    _recovered,
)
