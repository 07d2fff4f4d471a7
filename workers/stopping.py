"""When a generation ends: stop tokens, end of sequence, stop strings, length.  (pure)

Stop strings are looked for in the decoded tail only, so a step costs the same however long the output is. The client
cuts the text before the stop string (`kvpool.text`); the worker only stops computing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.request import FinishReason, SamplingParams

_BYTES_PER_CHARACTER = 4
_MARGIN_TOKENS = 8

Decode = Callable[[Sequence[int]], str]


def finish_reason(
    sampling: SamplingParams, eos_token_ids: frozenset[int], output: Sequence[int], decode: Decode | None
) -> FinishReason | None:
    """Why the generation ends with the last token of ``output``, None when it goes on.

    Args:
        sampling: the request's conditions.
        eos_token_ids: end-of-sequence tokens of the model.
        output: everything generated, at least one token.
        decode: tokens → text; without it stop strings are not seen.
    """
    if ends_silently(sampling, eos_token_ids, output[-1]):
        return FinishReason.STOP
    if decode is not None and sampling.stop and _contains_stop(sampling.stop, output, decode):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(output) >= sampling.max_tokens else None


def ends_silently(sampling: SamplingParams, eos_token_ids: frozenset[int], token: int) -> bool:
    """This token ends the generation and is not part of the output."""
    return token in sampling.stop_token_ids or (not sampling.ignore_eos and token in eos_token_ids)


def _contains_stop(stop: Sequence[str], output: Sequence[int], decode: Decode) -> bool:
    # A token may be as little as one byte of a character, and the last one may begin inside a stop string.
    window = _BYTES_PER_CHARACTER * max(map(len, stop)) + _MARGIN_TOKENS
    tail = decode(output[-window:])
    return any(text in tail for text in stop)
