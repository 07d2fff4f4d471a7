"""What a worker's queue means for the next request.  (pure)"""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.reports import WorkerLoad
from workers.block_table import READABLE, PageState
from workers.sequence import Sequence


def queue_load(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> WorkerLoad:
    """The part of a `WorkerLoad` that follows from the sequences alone; decoding ones have nothing to prefill.

    Blocks in flight count as work that is not needed: the router knows its loads and prices them itself.
    """
    runs, waits = list(running), list(waiting)
    todo = context = 0
    for sequence in (*runs, *waits):
        if sequence.decoding:
            continue
        there = _there_tokens(sequence)
        if there < len(sequence.tokens):
            todo += len(sequence.tokens) - there
            context += there
    return WorkerLoad(
        waiting_requests=len(waits),
        running_requests=len(runs),
        queued_prefill_tokens=todo,
        queued_context_tokens=context,
    )


def _there_tokens(sequence: Sequence) -> int:
    """Tokens that are computed, readable or on their way."""
    size, table = sequence.table.block_tokens, sequence.table
    first = -(-sequence.computed_tokens // size)
    coming = sum(
        state in READABLE or state is PageState.FLYING for state in map(table.state, range(first, sequence.full_blocks))
    )
    return min(len(sequence.tokens) - 1, sequence.computed_tokens + coming * size)
