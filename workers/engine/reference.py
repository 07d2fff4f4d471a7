"""The plain Hugging Face model, without pool, pages or scheduler: what every output is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@lru_cache(maxsize=1)
def _plain_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def plain_generate(path: Path, prompt: Sequence[int], *, max_tokens: int) -> tuple[tuple[int, ...], float]:
    """Greedy tokens of the plain model, and the log-probability of the first of them.

    Args:
        path: model directory.
        prompt: token ids.
        max_tokens: tokens to generate at most; the end-of-sequence token ends it earlier and is not returned.
    """
    model = _plain_model(path)
    ends = model.generation_config.eos_token_id
    end_ids = set(ends if isinstance(ends, list) else [ends])
    tokens: list[int] = []
    first_logprob = 0.0
    with torch.inference_mode():
        output = model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
        while True:
            logits = output.logits[0, -1].float()
            token = int(logits.argmax())
            if not tokens:
                first_logprob = float(logits.log_softmax(-1)[token])
            if token in end_ids:
                return tuple(tokens), first_logprob
            tokens.append(token)
            if len(tokens) == max_tokens:
                return tuple(tokens), first_logprob
            output = model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
