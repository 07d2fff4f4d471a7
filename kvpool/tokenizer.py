"""Text ↔ token ids, from a model directory's own files: ``tokenizer.json`` and its chat template.

Needs neither torch nor the model library, so a client on another machine can have it from bytes (`TokenizerFiles`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _Tokenizer

from kvpool.errors import ModelError, RequestError
from kvpool.jsontext import parse_json


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer of a model as plain data, to send to clients.

    Attributes:
        model: model name, for error messages.
        tokenizer_json: text of ``tokenizer.json``.
        chat_template: Jinja source, None when the model has none.
        special_tokens: names the template may use (``bos_token`` …).
    """

    model: str
    tokenizer_json: str
    chat_template: str | None
    special_tokens: tuple[tuple[str, str], ...]


def read_tokenizer_files(path: Path, model: str) -> TokenizerFiles:
    """Read a model directory's tokenizer.

    Raises:
        ModelError: ``tokenizer.json`` is missing or unreadable.
    """
    try:
        tokenizer_json = (path / "tokenizer.json").read_text()
        config_path = path / "tokenizer_config.json"
        config = parse_json(config_path.read_bytes()) if config_path.exists() else {}
        if not isinstance(config, Mapping):
            raise ValueError("tokenizer_config.json is no object")
        template_path = path / "chat_template.jinja"
        template = template_path.read_text() if template_path.exists() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise ModelError(f"model {model}: cannot read its tokenizer ({error}); a fast tokenizer is needed") from error
    special = tuple((name, _content(config[name])) for name in ("bos_token", "eos_token") if config.get(name))
    return TokenizerFiles(model, tokenizer_json, template if isinstance(template, str) else None, special)


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)


class Tokenizer:
    """Encodes and decodes; safe to use from several threads."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        self._tokenizer = _Tokenizer.from_str(files.tokenizer_json)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_template_error
        self._template = environment.from_string(files.chat_template) if files.chat_template else None

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text``, special tokens written in it included.

        Raises:
            RequestError: the text has half a surrogate pair, which no encoding can carry.
        """
        return self._ids(text, add_special_tokens=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens`` without special tokens. A cut multi-byte character shows as U+FFFD."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a chat, rendered with the model's template and opened for the assistant's answer.

        Raises:
            RequestError: the model has no template, or the template or the tokenizer refuses the messages.
        """
        if self._template is None:
            raise RequestError(f"model {self._files.model} has no chat template; send a plain prompt", field="messages")
        try:
            text = self._template.render(
                messages=list(messages), add_generation_prompt=True, **dict(self._files.special_tokens)
            )
        except (TemplateError, TypeError, ValueError) as error:  # a template computes with what it is given
            raise RequestError(f"the chat template refused the messages: {error}", field="messages") from error
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # what the binding says of text that is not valid Unicode
            raise RequestError(
                "the prompt is not valid Unicode text; it has half a surrogate pair", field="prompt"
            ) from (error)


def _raise_template_error(message: str) -> NoReturn:
    raise TemplateError(message)
