"""Checks of what a user gives to a request beside its prompt, before anything travels.  (pure)"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from kvpool.errors import RequestError
from kvpool.request import SamplingParams

MAX_TIMEOUT_S = 30 * 86_400.0


def require_known(options: Iterable[str], of: Callable[..., Any], call: str) -> None:
    """Refuse a keyword as Python does, by the name of what was called and not of what that calls.

    Args:
        options: the keywords that were given.
        of: takes those that there are.
        call: what the user called.

    Raises:
        TypeError: one is unknown; names the nearest.
    """
    known = [item.name for item in inspect.signature(of).parameters.values() if item.kind is item.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{meant}")


def require_fits(tokens: tuple[int, ...], sampling: SamplingParams, max_context_tokens: int) -> None:
    """Refuse here what no worker can take, before a prompt of any size travels to the router.

    Raises:
        RequestError: prompt and answer do not fit the model together.
    """
    if len(tokens) + sampling.max_tokens > max_context_tokens:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens and max_tokens is {sampling.max_tokens}, but the model takes "
            f"{max_context_tokens} in all; shorten the prompt or lower max_tokens",
            field="prompt" if len(tokens) >= max_context_tokens else "max_tokens",
        )


def limit_ns(seconds: float | None, field: str) -> int | None:
    """A limit in seconds as nanoseconds; None is none.

    Raises:
        RequestError: it is no number of seconds.
    """
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TIMEOUT_S:
        raise RequestError(
            f"{field} must be a number of seconds above 0 and up to {MAX_TIMEOUT_S:.0f}, got {seconds!r}", field=field
        )
    return max(1, int(seconds * 1e9))


def checked_timeout_s(timeout_s: float) -> float:
    """The budget of a request.

    Raises:
        RequestError: it is no number of seconds.
    """
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise RequestError(
            f"timeout_s must be a number of seconds above 0 and up to {MAX_TIMEOUT_S:.0f}, got {timeout_s!r}",
            field="timeout_s",
        )
    return timeout_s
