"""The bound on what the HTTP gateway holds, whoever runs or waits behind it."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send

from router.gateway import _Limit


class _App:
    """Holds every request until it is let go."""

    def __init__(self) -> None:
        self.inside = 0
        self.let_go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.inside += 1
        await self.let_go.wait()


async def _receive() -> dict[str, Any]:
    raise AssertionError("a request that is refused is not read")


async def _call(limit: _Limit, method: str, sent: list[Any]) -> None:
    async def send(message: Any) -> None:
        sent.append(message)

    await limit({"type": "http", "method": method, "path": "/", "headers": []}, _receive, send)


async def _fill() -> None:
    app, refused = _App(), list[Any]()
    limit = _Limit(app, 2)
    held = [asyncio.ensure_future(_call(limit, method, [])) for method in ("POST", "POST", "GET")]
    while app.inside < 3:  # each is held at its first step
        await asyncio.sleep(0)
    await _call(limit, "POST", refused)
    start, body = refused
    assert (start["status"], (b"retry-after", b"1") in start["headers"]) == (429, True)
    assert b"run or wait" in body["body"]
    app.let_go.set()
    await asyncio.gather(*held)
    await _call(limit, "POST", refused)
    assert (app.inside, len(refused)) == (4, 2)


def test_what_is_held_counts_whatever_it_does_and_more_is_refused_unread_until_one_has_left() -> None:
    asyncio.run(asyncio.wait_for(_fill(), 30.0))
