"""What callers may give as a prompt, and how it becomes token ids."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvpool.errors import RequestError
from kvpool.tokenizer import Tokenizer

LONG_PROMPT_CHARS = 16 * 1024  # longer texts are tokenized on a thread: a megabyte takes half a second

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages (``{"role": …, "content": …}``)."""

_T = TypeVar("_T")


async def encode_beside(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """`encode_prompt`, without holding up the loop's other requests when the prompt may be long."""
    if isinstance(prompt, str) and len(prompt) <= LONG_PROMPT_CHARS:
        return encode_prompt(tokenizer, prompt)
    return await asyncio.to_thread(encode_prompt, tokenizer, prompt)


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt.

    Raises:
        RequestError: it is none.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    items: tuple[Any, ...] = tuple_of(prompt, "prompt")
    if items and all(isinstance(item, Mapping) for item in items):
        return tokenizer.encode_chat(items)
    try:
        if not any(isinstance(item, bool) for item in items):
            return tuple(operator.index(item) for item in items)  # numpy's integers too
    except TypeError:
        pass  # answered below
    raise RequestError("the prompt must be text, a list of token ids, or a list of chat messages", field="prompt")


def tuple_of(values: Iterable[_T], field: str) -> tuple[_T, ...]:
    """``values`` as a tuple.

    Raises:
        RequestError: they are no sequence; names ``field``.
    """
    try:
        return tuple(values)
    except TypeError as error:
        raise RequestError(f"{field} must be a sequence, got {values!r}", field=field) from error
