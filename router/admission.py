"""Whether a request starts now: admit, queue, degrade or shed, from what the router expects of it.  (pure)

    no limits                                    → admit, after waiting at the router while workers have more than
                                                   enough to do (`router.waiting`), and after yielding a moment to
                                                   those of higher priority that wait for slow decoding
    expected first token beyond its limit        → degrade if it may, after waiting at the router like those without
                                                   limits; else shed: waiting would not make it sooner. On an idle
                                                   worker whose speed nobody measured lately the benefit of the doubt
                                                   (`doubt`), else what was once found slow would stay so for ever
    every worker decodes too slowly for it       → queue while there is time left before its first token is due (a
                                                   moment, if it may degrade), then degrade or shed; at once when
                                                   nothing decodes there whose end would make it faster
    somebody of higher priority queues for that  → queue, while there is time left

A queued request waits at its client, which asks again; the router keeps only who waits with which priority, for as
long as they keep asking. Nothing is shed that carries no limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kvpool.request import Limits
from router.decoding import FADE_NS
from router.waiting import MAX_YIELD_NS, POLL_NS, poll_ns

MAX_QUEUE_NS = 30_000_000_000
"""A request without a limit on its first token waits for a worker that decodes fast enough for no longer than this."""
MAX_DEGRADABLE_QUEUE_NS = 2_000_000_000
"""One that may degrade waits for it no longer than this, whatever its limits."""
STAYS_SLOW_NS = math.inf
"""Gap between tokens on a worker that is too slow for the request with nothing on it, so that waiting does not help."""
MAX_HOLD_NS = 600_000_000_000
"""A request waits for a worker to come near the end of its queue for no longer than this. An end for the worst case:
whoever is sent on before its turn is bound early, and in a long overload that would be everybody."""
UNMEASURED_DOUBT, FADED_DOUBT = 10.0, 2.0
"""How many times too long a prefill on an idle worker may be expected to be: before the first request that it served
(what it measured as it started, it measured beside everything else that starts), and `FADE_NS` after the last."""
WORKERS_BUSY = "busy"
MIN_RETRY_NS, MAX_RETRY_NS = 100_000_000, 60_000_000_000


class Admission(Enum):
    """What becomes of a request that asks for a worker."""

    ADMIT = "admit"
    DEGRADE = "degrade"  # started, though a limit will not be met
    QUEUE = "queue"
    SHED = "shed"


@dataclass(frozen=True, slots=True)
class Ruling:
    """An admission; ``missed`` names the limit, or what is waited for; ``retry_after_ns`` is for `Admission.QUEUE` and
    `Admission.SHED`, ``waited_ns`` what it has waited at this router."""

    admission: Admission
    missed: str = ""
    retry_after_ns: int = 0
    waited_ns: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect of a request if it starts now.

    Attributes:
        ttft_ns: time to its first token from now.
        prefill_ns: of that, its own work on the worker.
        doubt: `doubt` about that work.
        tpot_ns: gap between its tokens on the best worker, None when its speed is unknown; see also `STAYS_SLOW_NS`.
        elapsed_ns: time since the user's call.
        outranked: somebody of higher priority waits.
        hold_ns: until its worker needs it, at the router.
    """

    ttft_ns: float
    tpot_ns: float | None = None
    elapsed_ns: int = 0
    outranked: bool = False
    hold_ns: float = 0.0
    prefill_ns: float = 0.0
    doubt: float = 1.0


def doubt(measured_ns: int | None, now_ns: int) -> float:
    """How many times too long a prefill on an idle worker may be expected to be.

    Args:
        measured_ns: when the last request told of the worker's speed; None for never.
    """
    if measured_ns is None:
        return UNMEASURED_DOUBT
    return FADED_DOUBT if now_ns - measured_ns >= FADE_NS else 1.0


def admit(limits: Limits, forecast: Forecast) -> Ruling:
    """Rule on one request."""
    late_ns = 0.0
    if limits.ttft_ns is not None:  # what is loaded takes its time, however fast the worker turns out to be
        spared_ns = min(forecast.prefill_ns, forecast.ttft_ns) * (1.0 - 1.0 / forecast.doubt)
        late_ns = forecast.elapsed_ns + forecast.ttft_ns - spared_ns - limits.ttft_ns
    slow = limits.tpot_ns is not None and forecast.tpot_ns is not None and forecast.tpot_ns > limits.tpot_ns
    missed = "ttft" if late_ns > 0.0 else "tpot" if slow else ""
    if missed == "tpot" and forecast.tpot_ns != STAYS_SLOW_NS and _patience_ns(limits, late_ns, forecast) > POLL_NS:
        return Ruling(Admission.QUEUE, missed, POLL_NS)
    held = forecast.hold_ns > 0.0 and forecast.elapsed_ns < MAX_HOLD_NS
    if held and (limits.ttft_ns is None or late_ns > 0.0) and (limits.may_degrade or not missed):
        return Ruling(Admission.QUEUE, WORKERS_BUSY, poll_ns(forecast.hold_ns))
    if missed:
        alone = limits.ttft_ns is not None and forecast.prefill_ns > limits.ttft_ns  # on whatever worker, when ever
        return _too_much(limits, missed, late_ns if missed == "ttft" and not alone else FADE_NS)
    if forecast.outranked and _time_left_ns(limits, late_ns, forecast, MAX_YIELD_NS) > POLL_NS:
        return Ruling(Admission.QUEUE, "", POLL_NS)
    return Ruling(Admission.ADMIT)


def gap_ns(limits: Limits, tpot_ns: float | None, others: float) -> float | None:
    """`Forecast.tpot_ns` where ``tpot_ns`` are expected on a worker that has ``others`` requests."""
    if limits.tpot_ns is None or tpot_ns is None:
        return None
    return STAYS_SLOW_NS if tpot_ns > limits.tpot_ns and not others else tpot_ns


def _patience_ns(limits: Limits, late_ns: float, forecast: Forecast) -> float:
    """How long the request may still wait for faster decoding."""
    left_ns = _time_left_ns(limits, late_ns, forecast, MAX_QUEUE_NS)
    return min(left_ns, MAX_DEGRADABLE_QUEUE_NS - forecast.elapsed_ns) if limits.may_degrade else left_ns


def _time_left_ns(limits: Limits, late_ns: float, forecast: Forecast, most_ns: int) -> float:
    """How long the request may still wait before it starts."""
    return most_ns - forecast.elapsed_ns if limits.ttft_ns is None else -late_ns


def _too_much(limits: Limits, missed: str, late_ns: float) -> Ruling:
    if limits.may_degrade:
        return Ruling(Admission.DEGRADE, missed)
    return Ruling(Admission.SHED, missed, round(min(MAX_RETRY_NS, max(MIN_RETRY_NS, late_ns))))


def queue_message(ruling: Ruling) -> str:
    """For the request that should ask again."""
    if ruling.missed == WORKERS_BUSY:
        return "the workers have more than enough to do; ask again"
    if ruling.missed:
        return "every worker that could take the request decodes more slowly than its limit allows; ask again"
    return "requests of higher priority wait; ask again"


def shed_message(limits: Limits, ruling: Ruling, forecast_ns: float, prefill_ns: float) -> str:
    """For the user whose request is refused.

    Args:
        forecast_ns: what was expected of the limit that would be missed; of the first token, from the user's call on.
        prefill_ns: the request's own work.
    """
    limit_ns = (limits.ttft_ns if ruling.missed == "ttft" else limits.tpot_ns) or 0
    what = "first token" if ruling.missed == "ttft" else "gap between tokens"
    way_out = "come again later, raise the limit, or set may_degrade"
    if ruling.missed == "ttft" and prefill_ns > limit_ns:
        way_out = "its prefill alone takes longer, so raise the limit or set may_degrade"
    return f"the request's limit on the {what} is {_time(limit_ns)} and {_time(forecast_ns)} are expected; {way_out}"


def _time(value_ns: float) -> str:
    return f"{value_ns / 1e9:.3f} s" if value_ns >= 1e7 else f"{value_ns / 1e6:.3g} ms"
