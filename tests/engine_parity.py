"""What engine tests share: tiny random models, a hand-driven sequence, and what counts as equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from kvpool.request import SamplingParams, TokenLogprobs
from kvpool.types import BlockId
from tests.worker_support import WatchedDevice
from workers.engine.base import SequenceSlice
from workers.engine.torch_engine import TorchEngine

LOGPROB_TOLERANCE = 1e-4


class WatchedTorch(WatchedDevice, TorchEngine):
    """The torch engine, its device pages watched."""

    poison = math.nan


GREEDY = SamplingParams(logprobs=5)

_TINY = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 3,
}


def tiny_llama() -> PreTrainedConfig:
    """Grouped-query attention, head dim from the hidden size."""
    return LlamaConfig(**_TINY)


def tiny_qwen3() -> PreTrainedConfig:
    """Grouped-query attention, normalised queries and keys, a head dim of its own."""
    return Qwen3Config(**_TINY, head_dim=16)


def tiny_mistral_windowed() -> PreTrainedConfig:
    """A sliding window in every layer."""
    return MistralConfig(**_TINY, sliding_window=11)


def tiny_gemma3() -> PreTrainedConfig:
    """Windowed and full layers in turn, each kind with a rotary scheme of its own."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(**_TINY, head_dim=16, sliding_window=9, layer_types=kinds, bos_token_id=1, pad_token_id=0)


def save_random_model(config: PreTrainedConfig, path: Path) -> Path:
    """Write a model with seeded random weights as a Hugging Face directory."""
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@dataclass(slots=True)
class Running:
    """One sequence driven through an engine by hand."""

    engine: TorchEngine
    prompt: tuple[int, ...]
    slot: int
    done: int = 0

    @classmethod
    def start(cls, engine: TorchEngine, prompt: Sequence[int], *, extra: int = 64) -> Running:
        """Open a sequence with room for ``extra`` more tokens."""
        return cls(engine, tuple(prompt), engine.open(len(prompt) + extra))

    def chunk(self, stop: int) -> SequenceSlice:
        """The slice from where the sequence stands up to ``stop`` of the prompt."""
        tokens = self.prompt[self.done : stop]
        piece = SequenceSlice(self.slot, tokens, self.done, GREEDY if stop >= len(self.prompt) else None)
        self.done += len(tokens)
        return piece

    def next(self, token: int) -> SequenceSlice:
        """A decode slice."""
        piece = SequenceSlice(self.slot, (token,), self.done, GREEDY)
        self.done += 1
        return piece

    def finish(self, count: int, *, chunks: Sequence[int] = ()) -> list[TokenLogprobs]:
        """Prefill the rest with cuts at ``chunks`` and decode until ``count`` tokens are there."""
        for stop in chunks:
            assert self.engine.step([self.chunk(stop)]) == [None]
        result = self.engine.step([self.chunk(len(self.prompt))])[0]
        assert result is not None
        return self.decode(result, count)

    def decode(self, first: TokenLogprobs, count: int) -> list[TokenLogprobs]:
        """Go on after ``first`` until ``count`` tokens are there, and close."""
        results = [first]
        while len(results) < count:
            result = self.engine.step([self.next(results[-1].token)])[0]
            assert result is not None
            results.append(result)
        self.engine.close(self.slot)
        return results


def assert_same(ours: Sequence[TokenLogprobs], plain: Sequence[TokenLogprobs]) -> None:
    """Tokens equal; log-probabilities of the chosen and of the most likely tokens within the tolerance."""
    assert [item.token for item in ours] == [item.token for item in plain]
    for mine, theirs in zip(ours, plain, strict=True):
        assert abs(mine.logprob - theirs.logprob) <= LOGPROB_TOLERANCE
        for (_, mine_top), (_, theirs_top) in zip(mine.top, theirs.top, strict=True):
            assert abs(mine_top - theirs_top) <= LOGPROB_TOLERANCE


def attach(engine: TorchEngine, num_blocks: int) -> bytearray:
    """Give an engine zeroed pages of its own."""
    memory = bytearray(num_blocks * engine.layout.block_bytes)
    engine.attach_pages(memoryview(memory), num_blocks)
    return memory


def block_ids(*ids: int) -> list[BlockId]:
    """Typed block ids."""
    return [BlockId(number) for number in ids]
