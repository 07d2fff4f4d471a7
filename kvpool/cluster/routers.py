"""Which of a cluster's routers is asked, and who is asked next when it does not answer.  (no Ray, no clock)

Every request has a router of its own, by a hash of its id, and goes to it again after a retry: its promises, its place
among those that wait and all its records are in one place, and no client has to remember anything. Any other router can
answer just as well, since all of them hear the same directory and reports; so when the own one is silent or unavailable
the next one is asked, and the first answer counts. What another one then still decides, or decides for a client that
has given up, is given back to it (`RouterActor.release`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.config import MAX_ROUTERS
from kvpool.errors import DeadlineError, KVPoolError, UnavailableError

ROUTER_NAME = "router"
PATIENCE_S = 0.5
"""How long one router may be silent before another one is asked as well. The first is not given up: on a machine that
is merely busy its answer still counts."""
SILENCE_S = 1.0
"""How long a router may be silent about a trifle before it is named and not waited for, once another has answered."""
SHUN_S = 5.0
"""How long a router that failed or was overtaken comes last: by then Ray has usually started it again."""


def router_name(number: int) -> str:
    """Name of the actor; the first has the name that a lone router has."""
    return ROUTER_NAME if not number else f"{ROUTER_NAME}-{number}"


def is_router(actor: str) -> bool:
    """Whether an actor of that name is a router."""
    return actor == ROUTER_NAME or actor.startswith(f"{ROUTER_NAME}-")


def first_asked(count: int, key: str) -> int:
    """The number of the router, of ``count``, that ``key`` names."""
    if count == 1:
        return 0
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % count


class Routers:
    """The routers as one client knows them. Until `learn` has been called they are all names there could be."""

    def __init__(self) -> None:
        self._names = tuple(router_name(number) for number in range(MAX_ROUTERS))
        self._known = False
        self._shunned_until_s: dict[str, float] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the cluster; empty as long as nobody has told."""
        return self._names if self._known else ()

    def learn(self, names: Sequence[str]) -> None:
        """These routers the cluster has."""
        self._names, self._known = tuple(names), True

    def order(self, key: str, now_s: float) -> tuple[str, ...]:
        """Whom to ask first, second, … about what ``key`` names; those that failed lately come last."""
        names = self._names
        start = first_asked(len(names), key) if self._known else 0
        rotated = names[start:] + names[:start]
        return tuple(sorted(rotated, key=lambda name: self._shunned_until_s.get(name, 0.0) > now_s))

    def failed(self, name: str, now_s: float) -> None:
        """It was silent, not reachable, or knew no worker."""
        self._shunned_until_s[name] = now_s + SHUN_S

    def answered(self, name: str) -> None:
        """It answered."""
        self._shunned_until_s.pop(name, None)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came first.

    Attributes:
        value: what was said.
        by: who said it.
        late: who was asked before, and has not answered or only at the same time.
    """

    value: Any
    by: str
    late: tuple[str, ...]


async def ask_in_turn(order: Sequence[str], ask: Callable[[str], Awaitable[Any]], patience_s: float) -> Answer:
    """Ask the first; whenever one is unavailable, or ``patience_s`` passes without an answer, the next one as well.

    Args:
        order: whom to ask; at least one.
        ask: one call, which ends by a deadline of its own.
        patience_s: see above. The last one is waited for as long as its call takes, and so are the others then.

    Raises:
        KVPoolError: an answer that is an error and that another router would give as well.
        UnavailableError: all are unavailable. One that does not exist (``gone``) is reported only if none does.
    """
    left, asked, errors = list(order), dict[str, asyncio.Future[Any]](), dict[str, KVPoolError]()
    try:
        while True:
            if left:
                name = left.pop(0)
                asked[name] = asyncio.ensure_future(ask(name))
            running = {name: call for name, call in asked.items() if name not in errors}
            if not running:
                raise next((error for error in errors.values() if not error.details.get("gone")), errors[order[0]])
            timeout_s = patience_s if left else None
            await asyncio.wait(running.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for name, call in running.items():
                if not call.done():
                    continue
                error = call.exception()
                if error is None:
                    before = tuple(running)[: list(running).index(name)]
                    return Answer(call.result(), name, before)
                if not isinstance(error, UnavailableError):
                    raise error
                errors[name] = error
    finally:
        for call in asked.values():
            call.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)


async def who_answers(
    names: Sequence[str], ask: Callable[[str], Awaitable[Any]], silence_s: float
) -> dict[str, Any | KVPoolError]:
    """Ask everybody a trifle at once. Who has not answered after ``silence_s`` is not waited for if another one has.

    Args:
        names: whom to ask.
        ask: one call, which ends by a deadline of its own; so long is waited when nobody answers.
        silence_s: see above.

    Returns:
        For everyone in the order of ``names`` what was said, or the error; `DeadlineError` for the silent.
    """
    calls = {name: asyncio.ensure_future(_said(ask(name))) for name in names}
    try:
        if calls:
            await asyncio.wait(calls.values(), timeout=silence_s)
        while not all(call.done() for call in calls.values()):
            if any(call.done() and not isinstance(call.result(), KVPoolError) for call in calls.values()):
                break
            running = [call for call in calls.values() if not call.done()]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return {name: call.result() if call.done() else _silent(silence_s) for name, call in calls.items()}
    finally:
        for call in calls.values():
            call.cancel()
        await asyncio.gather(*calls.values(), return_exceptions=True)


async def _said(call: Awaitable[Any]) -> Any | KVPoolError:
    try:
        return await call
    except KVPoolError as error:
        return error


def _silent(silence_s: float) -> DeadlineError:
    return DeadlineError(
        f"silent for {silence_s:g} s while another router answers: stopped, cut off, overloaded, or just starting"
    )
