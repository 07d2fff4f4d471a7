"""Which of a finished request's limits were met.  (pure)"""

from __future__ import annotations

from kvpool.reports import GOODPUT_MET, GOODPUT_MISSED_TPOT, GOODPUT_MISSED_TTFT
from kvpool.request import FinishReason
from workers.sequence import Sequence


def goodput_counter(sequence: Sequence, finish: FinishReason, now_ns: int) -> str | None:
    """Name of the counter that the request, which has just finished, counts in; None when another worker finishes it.

    The first token counts from the user's call, whichever attempt delivered it; the gaps are those of this worker.
    """
    request, first_ns = sequence.request, sequence.tally.first_token_ns
    limits, here = request.limits, sequence.generated_tokens - len(request.generated)
    if request.hands_over and finish is FinishReason.LENGTH:
        return None
    ttft_ns = request.ttft_ns
    if ttft_ns is None and first_ns is not None:
        ttft_ns = request.elapsed_ns + first_ns - sequence.arrival_ns
    if limits.ttft_ns is not None and ttft_ns is not None and ttft_ns > limits.ttft_ns:
        return GOODPUT_MISSED_TTFT
    if limits.tpot_ns is not None and first_ns is not None and here > 1:
        return GOODPUT_MISSED_TPOT if (now_ns - first_ns) / (here - 1) > limits.tpot_ns else GOODPUT_MET
    return GOODPUT_MET
