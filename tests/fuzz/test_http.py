"""Every request to the HTTP gateway has an answer in OpenAI's shape, and none is the gateway's own bug.

The app is the real one, called as a server would; only the cluster behind it is missing, so that whatever would start
is answered with 503.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from kvpool.errors import UnavailableError
from kvpool.tokenizer import TokenizerFiles
from router.gateway import build_app
from tests.fuzz.decoders import CHAT, COMPLETION
from tests.fuzz.strategies import fuzzing, json_files

EXPECTED = {400, 404, 405, 413, 429, 503, 504}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


class Nobody:
    """A cluster whose router never has a worker; a budget would be waited for, so it says that waiting is no use."""

    async def info(self) -> Any:
        return SimpleNamespace(model="m", max_context_tokens=128, workers=())

    async def tokenizer(self) -> TokenizerFiles:
        backend = Backend(WordLevel({"a": 0, "?": 1}, unk_token="?"))
        return TokenizerFiles("m", backend.to_str(), TEMPLATE, ())

    async def route(self, *_: Any, **__: Any) -> Any:
        raise UnavailableError("no worker", gone=True)

    async def call(self, *_: Any, **__: Any) -> Any:
        raise UnavailableError("no router", gone=True)


async def _ask(path: str, body: list[bytes], headers: list[tuple[bytes, bytes]], method: str = "POST") -> Any:
    """One ASGI exchange: status and body."""
    pieces = [{"type": "http.request", "body": piece, "more_body": True} for piece in body]
    incoming = iter([*pieces, {"type": "http.request", "body": b"", "more_body": False}])
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return next(incoming, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(errors="replace"), "root_path": "", "scheme": "http", "query_string": b"",
        "headers": headers, "server": ("h", 1), "client": ("c", 1),
    }  # fmt: skip
    app = build_app(Nobody(), 4)  # type: ignore[arg-type]
    await asyncio.wait_for(app(scope, receive, send), 20)
    return sent[0]["status"], b"".join(item.get("body", b"") for item in sent)


def _holds(path: str, pieces: list[bytes], headers: list[tuple[bytes, bytes]], method: str = "POST") -> None:
    status, raw = asyncio.run(_ask(path, pieces, headers, method))
    assert status in EXPECTED, raw[:300]
    error = json.loads(raw)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert len(raw) < 20_000, "an error is for reading"


BODIES = st.sampled_from(sorted(PATHS)).flatmap(lambda path: st.tuples(st.just(path), json_files(PATHS[path])))
HEADERS = st.lists(
    st.tuples(st.sampled_from([b"x-request-id", b"content-type", b"content-length", b"x"]), st.binary(max_size=200)),
    max_size=3,
)


@fuzzing
@given(BODIES, HEADERS, st.integers(1, 5))
def test_every_body_is_answered_by_name(asked: tuple[str, bytes], headers: Any, parts: int) -> None:
    path, body = asked
    step = len(body) // parts + 1
    _holds(path, [body[start : start + step] for start in range(0, len(body), step)], headers)


@fuzzing
@given(st.text(max_size=30), st.sampled_from(["GET", "POST", "PUT", "OPTIONS", "x"]))
def test_every_other_path_and_method_is_answered(path: str, method: str) -> None:
    _holds("/" + path, [b"x"], [], method)


def test_a_body_without_end_is_cut_off() -> None:
    _holds("/v1/completions", [b" " * (1 << 20)] * 9, [])
