"""Blocking questions beside an event loop: every caller waits as long as it wants, and no question is asked twice at a
time.

Without its head Ray blocks for a minute. The threads of a loop's own pool are few, and would all end up waiting for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

Found = concurrent.futures.Future[Any]


class Lookups:
    """Questions that are being asked, by name. For one event loop."""

    def __init__(self) -> None:
        self.running: dict[str, Found] = {}

    def begin(self, name: str, look: Callable[[], Any]) -> Found:
        """Ask on a thread; while the question of that name is being asked, the same answer is everybody's."""
        search = self.running.get(name)
        if search is not None and not search.done():
            return search
        search = concurrent.futures.Future()
        threading.Thread(target=answer, args=(search, look), name=f"kvpool-find-{name}", daemon=True).start()
        self.running[name] = search  # not before: a thread that cannot be started answers nobody
        return search


async def wait_for(search: Found, timeout_s: float) -> Any:
    """The answer; TimeoutError when it does not come in time. The question goes on then."""
    found = asyncio.wrap_future(search)
    found.add_done_callback(_seen)  # who waits no longer must not be told by a traceback that it came to nothing
    return await asyncio.wait_for(asyncio.shield(found), timeout_s)


def answer(search: Found, look: Callable[[], Any]) -> None:
    """Ask here and now."""
    try:
        search.set_result(look())
    except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
        search.set_exception(error)


def _seen(found: asyncio.Future[Any]) -> None:
    if not found.cancelled():
        found.exception()
