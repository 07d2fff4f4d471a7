"""Which of a finished request's limits were met.  (pure)"""

from __future__ import annotations

from kvpool.reports import GOODPUT_MET, GOODPUT_MISSED_TPOT, GOODPUT_MISSED_TTFT
from workers.sequence import Sequence


def goodput_counter(sequence: Sequence, now_ns: int) -> str:
    """Name of the counter that the request, which has just finished, counts in.

    The first token counts from the user's call; one that an earlier attempt delivered is not judged here.
    """
    request, first_ns = sequence.request, sequence.tally.first_token_ns
    limits, here = request.limits, sequence.generated_tokens - len(request.generated)
    if first_ns is None:
        return GOODPUT_MET
    ttft_ns = request.elapsed_ns + first_ns - sequence.arrival_ns
    if limits.ttft_ns is not None and not request.generated and ttft_ns > limits.ttft_ns:
        return GOODPUT_MISSED_TTFT
    if limits.tpot_ns is not None and here > 1 and (now_ns - first_ns) / (here - 1) > limits.tpot_ns:
        return GOODPUT_MISSED_TPOT
    return GOODPUT_MET
