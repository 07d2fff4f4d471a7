"""Whatever a prompt holds, the tokenizer answers with ids or with an error that names the prompt."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvpool.errors import RequestError
from kvpool.tokenizer import Tokenizer, TokenizerFiles

TEMPLATE = "{% for message in messages %}{{ message.role + ' ' + message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = Backend(WordLevel({"user": 0, "hello": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    return Tokenizer(TokenizerFiles("m", backend.to_str(), TEMPLATE, ()))


def test_text_and_chats_become_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello") == (1,)
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == (0, 1)


def test_half_a_surrogate_pair_is_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("half \ud800 of it")


@pytest.mark.parametrize("content", [None, ["a"], 5])
def test_a_message_the_template_cannot_render_is_refused_by_name(tokenizer: Tokenizer, content: Any) -> None:
    with pytest.raises(RequestError, match="chat template"):
        tokenizer.encode_chat([{"role": "user", "content": content}])
