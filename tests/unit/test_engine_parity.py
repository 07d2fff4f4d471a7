"""The torch engine equals the plain Hugging Face model, on tiny random models and every way to come to a context."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool.errors import CapacityError, InvariantViolation, NumericsError
from kvpool.request import SamplingParams
from tests.engine_parity import (
    GREEDY,
    Running,
    assert_same,
    attach,
    block_ids,
    save_random_model,
    tiny_gemma3,
    tiny_llama,
    tiny_mistral_windowed,
    tiny_qwen3,
)
from workers.engine.base import SequenceSlice
from workers.engine.reference import PlainModel
from workers.engine.torch_engine import TorchEngine

BLOCK_TOKENS = 8
OUTPUT = 6


class Pair:
    """An engine and its reference over the same weights."""

    def __init__(self, path: Path) -> None:
        self.plain = PlainModel(path)
        self.engine = TorchEngine(path, block_tokens=BLOCK_TOKENS, torch_threads=1)


@pytest.fixture(
    scope="module",
    params=[tiny_llama, tiny_qwen3, tiny_mistral_windowed, tiny_gemma3],
    ids=["llama", "qwen3", "mistral-windowed", "gemma3"],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(save_random_model(request.param(), tmp_path_factory.mktemp("model")))


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed * 1000 + length)
    return tuple(rng.randrange(4, 211) for _ in range(length))


@pytest.mark.parametrize("length", [1, 5, 8, 40, 77])
def test_a_cold_prompt_gives_the_plain_models_tokens_and_logprobs(pair: Pair, length: int) -> None:
    prompt = prompt_of(length)
    assert_same(Running.start(pair.engine, prompt).finish(OUTPUT), pair.plain.greedy(prompt, OUTPUT, logprobs=5))


@pytest.mark.parametrize("chunks", [(1,), (7, 8, 9), (13, 50), tuple(range(1, 61))])
def test_prefill_in_odd_chunks_changes_nothing(pair: Pair, chunks: Sequence[int]) -> None:
    prompt = prompt_of(61)
    assert_same(
        Running.start(pair.engine, prompt).finish(OUTPUT, chunks=chunks), pair.plain.greedy(prompt, OUTPUT, logprobs=5)
    )


@pytest.mark.parametrize(("length", "blocks"), [(48, 5), (48, 1), (53, 6), (9, 1)])
def test_a_prefix_that_went_through_pages_continues_the_same(pair: Pair, length: int, blocks: int) -> None:
    attach(pair.engine, 12)
    prompt = prompt_of(length)
    ids = block_ids(11, 3, 4, 5, 0, 9)[:blocks]
    first = Running.start(pair.engine, prompt)
    pair.engine.step([first.chunk(length)])
    pair.engine.store_blocks(first.slot, 0, ids)
    pair.engine.close(first.slot)
    second = Running.start(pair.engine, prompt)
    pair.engine.load_blocks(second.slot, 0, ids)
    second.done = blocks * BLOCK_TOKENS
    assert_same(second.finish(OUTPUT), pair.plain.greedy(prompt, OUTPUT, logprobs=5))


def test_a_tail_may_be_loaded_before_the_front_is_computed(pair: Pair) -> None:
    attach(pair.engine, 8)
    prompt = prompt_of(50)
    holder = Running.start(pair.engine, prompt)
    pair.engine.step([holder.chunk(50)])
    pair.engine.store_blocks(holder.slot, 3, block_ids(6, 1, 2))
    pair.engine.close(holder.slot)
    reader = Running.start(pair.engine, prompt)
    pair.engine.load_blocks(reader.slot, 3, block_ids(6, 1, 2))
    pair.engine.step(
        [
            reader.chunk(11),
        ]
    )
    pair.engine.step([reader.chunk(24)])
    reader.done = 48
    assert_same(reader.finish(OUTPUT), pair.plain.greedy(prompt, OUTPUT, logprobs=5))


def test_a_preempted_request_resumes_from_its_blocks_and_redoes_its_tail(pair: Pair) -> None:
    attach(pair.engine, 8)
    prompt = prompt_of(21)
    running = Running.start(pair.engine, prompt)
    result = pair.engine.step([running.chunk(21)])[0]
    assert result is not None
    results = [result]
    for _ in range(5):
        result = pair.engine.step([running.next(results[-1].token)])[0]
        assert result is not None
        results.append(result)
    pair.engine.store_blocks(running.slot, 0, block_ids(5, 2, 7))
    pair.engine.close(running.slot)
    resumed = Running.start(pair.engine, (*prompt, *(item.token for item in results)))
    pair.engine.load_blocks(resumed.slot, 0, block_ids(5, 2, 7))
    resumed.done = 3 * BLOCK_TOKENS
    assert_same(results + resumed.finish(4), pair.plain.greedy(prompt, 10, logprobs=5))


def test_eight_sequences_mixed_in_one_step_equal_eight_alone(pair: Pair) -> None:
    prompts = [prompt_of(length, seed=length) for length in (1, 8, 17, 30, 44, 12, 64, 25)]
    running = [Running.start(pair.engine, prompt) for prompt in prompts]
    results = {index: [] for index in range(8)}
    for index in range(4):  # four decode already, two stand in the middle of their prompt, two are new
        results[index] = pair.engine.step([running[index].chunk(len(prompts[index]))])
    pair.engine.step([running[4].chunk(20), running[5].chunk(3)])
    for _ in range(OUTPUT):
        batch = [
            sequence.next(results[index][-1].token) if results[index] else sequence.chunk(len(prompts[index]))
            for index, sequence in enumerate(running)
        ]
        for index, result in enumerate(pair.engine.step(batch)):
            results[index].append(result)
    for index, prompt in enumerate(prompts):
        pair.engine.close(running[index].slot)
        assert_same(results[index][:OUTPUT], pair.plain.greedy(prompt, OUTPUT, logprobs=5))


def test_a_sequence_grows_to_the_last_token_of_the_models_context(pair: Pair) -> None:
    prompt = prompt_of(500)
    running = Running.start(pair.engine, prompt, extra=12)
    assert_same(running.finish(13), pair.plain.greedy(prompt, 13, logprobs=5))


def test_a_step_may_be_repeated(pair: Pair) -> None:
    running = Running.start(pair.engine, prompt_of(20))
    piece = running.chunk(20)
    assert pair.engine.step([piece]) == pair.engine.step([piece])
    pair.engine.close(running.slot)


def test_sampled_tokens_do_not_depend_on_chunks_or_neighbours(pair: Pair) -> None:
    prompt, params = prompt_of(30), SamplingParams(temperature=0.9, top_p=0.9, seed=17)
    alone = pair.engine.open(64)
    whole = pair.engine.step([SequenceSlice(alone, prompt, 0, params)])[0]
    neighbour, cut = pair.engine.open(64), pair.engine.open(64)
    pair.engine.step([SequenceSlice(cut, prompt[:11], 0, None)])
    _, again = pair.engine.step(
        [SequenceSlice(neighbour, prompt_of(9), 0, GREEDY), SequenceSlice(cut, prompt[11:], 11, params)]
    )
    assert whole is not None
    assert again is not None
    assert whole.token == again.token
    for slot in (alone, neighbour, cut):
        pair.engine.close(slot)


def test_broken_pages_end_only_the_request_that_used_them(pair: Pair) -> None:
    memory = attach(pair.engine, 2)
    memory[:] = b"\xff" * len(memory)  # every element a NaN
    prompt = prompt_of(12)
    sick, healthy = Running.start(pair.engine, prompt), Running.start(pair.engine, prompt)
    pair.engine.load_blocks(sick.slot, 0, block_ids(1))
    sick.done = BLOCK_TOKENS
    bad, good = sick.chunk(12), healthy.chunk(12)
    with pytest.raises(NumericsError) as caught:
        pair.engine.step([bad, good])
    assert caught.value.details["slots"] == str(sick.slot)
    pair.engine.close(sick.slot)
    result = pair.engine.step([good])[0]
    assert result is not None
    assert_same(healthy.decode(result, OUTPUT), pair.plain.greedy(prompt, OUTPUT, logprobs=5))


def test_what_an_earlier_sequence_left_in_a_reused_view_is_never_read(pair: Pair) -> None:
    memory = attach(pair.engine, 10)
    memory[:] = b"\xff" * len(memory)
    dirty = pair.engine.open(80)
    pair.engine.load_blocks(dirty, 0, block_ids(*range(10)))
    pair.engine.close(dirty)
    prompt = prompt_of(45)
    assert_same(
        Running.start(pair.engine, prompt, extra=35).finish(OUTPUT, chunks=(10, 30)),
        pair.plain.greedy(prompt, OUTPUT, logprobs=5),
    )


def test_a_sequence_longer_than_the_context_is_refused(pair: Pair) -> None:
    with pytest.raises(CapacityError, match="512"):
        pair.engine.open(513)


def test_calls_that_break_the_contract_are_named(pair: Pair) -> None:
    slot = pair.engine.open(16)
    with pytest.raises(InvariantViolation, match="twice"):
        pair.engine.step([SequenceSlice(slot, (5,), 0, None), SequenceSlice(slot, (5,), 1, None)])
    with pytest.raises(InvariantViolation, match="outside"):
        pair.engine.step([SequenceSlice(slot, (211,), 0, None)])
    with pytest.raises(InvariantViolation, match="leaves its view"):
        pair.engine.step([SequenceSlice(slot, (5,), 100_000, None)])
    with pytest.raises(InvariantViolation, match="at least one"):
        pair.engine.step([])
    pair.engine.close(slot)
    with pytest.raises(InvariantViolation, match="not open"):
        pair.engine.close(slot)
    attach(pair.engine, 2)
    slot = pair.engine.open(16)
    with pytest.raises(InvariantViolation, match="block ids"):
        pair.engine.load_blocks(slot, 0, block_ids(2))
    with pytest.raises(InvariantViolation, match="writable"):
        pair.engine.attach_pages(memoryview(bytes(pair.engine.layout.block_bytes)), 1)
    pair.engine.close(slot)
