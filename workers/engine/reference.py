"""The plain Hugging Face model, unchanged, without pool, pages or scheduler: what every output is compared with.

Used by tests, benchmarks and the demo's check; never to serve. Its arithmetic is torch's own, none of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvpool.request import TokenLogprobs
from workers.engine.models import quiet_progress


class PlainModel:
    """The reference over a model directory, in float32 on the CPU, with transformers' default attention."""

    def __init__(self, path: Path) -> None:
        with quiet_progress():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        self._model: Any = model.eval()
        self._cache: Any = None
        ends = self._model.generation_config.eos_token_id
        self.eos_token_ids = frozenset(ends if isinstance(ends, list) else [ends]) - {None}

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], *, keep_cache: bool = True) -> torch.Tensor:
        """Run a whole prompt; logits after its last token, float32 [vocab_size].

        Args:
            tokens: the prompt.
            keep_cache: fill a fresh cache for `decode`; False runs without any.
        """
        self._cache = DynamicCache(config=self._model.config) if keep_cache else None
        return self._forward(list(tokens))

    @torch.inference_mode()
    def decode(self, token: int) -> torch.Tensor:
        """Run one token after what the cache holds; logits after it."""
        return self._forward([token])

    def greedy(self, prompt: Sequence[int], count: int, *, logprobs: int = 0) -> list[TokenLogprobs]:
        """``count`` greedy tokens after the prompt, by torch's own arithmetic."""
        chosen = [_best(self.prefill(prompt), logprobs)]
        while len(chosen) < count:
            chosen.append(_best(self.decode(chosen[-1].token), logprobs))
        return chosen

    def _forward(self, tokens: list[int]) -> torch.Tensor:
        rows = torch.tensor([tokens])
        keep_cache = self._cache is not None
        output = self._model(input_ids=rows, cache=self._cache, use_cache=keep_cache, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits


def plain_generate(path: Path, prompt: Sequence[int], *, max_tokens: int) -> tuple[tuple[int, ...], float]:
    """Greedy tokens of the plain model, and the log-probability of the first of them.

    The model stays loaded between calls with the same path.

    Args:
        path: model directory.
        prompt: token ids.
        max_tokens: tokens to generate at most; the end-of-sequence token ends it earlier and is not returned.
    """
    model = _loaded(path)
    best = first = _best(model.prefill(prompt), 0)
    tokens: list[int] = []
    while best.token not in model.eos_token_ids:
        tokens.append(best.token)
        if len(tokens) == max_tokens:
            break
        best = _best(model.decode(best.token), 0)
    return tuple(tokens), first.logprob


@lru_cache(maxsize=1)
def _loaded(path: Path) -> PlainModel:
    return PlainModel(path)


def _best(logits: torch.Tensor, count: int) -> TokenLogprobs:
    logprobs = logits.log_softmax(-1)
    token = int(logprobs.argmax())
    best = logprobs.topk(count)
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(token=token, logprob=float(logprobs[token]), top=top)
