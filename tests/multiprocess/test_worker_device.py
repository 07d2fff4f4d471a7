"""A worker with a device tier: hits come from it, and tokens and log-probabilities equal a run without it.

With the fake engine, whose output depends on every byte of KV, and with the torch engine. Whenever places are read,
those that hold nothing are poisoned, and what is read must equal its page (`tests.worker_support.WatchedDevice`). The
same runs on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from kvpool.config import parse_config
from kvpool.errors import ConfigError, InvariantViolation, NumericsError
from kvpool.hashing import block_hashes
from kvpool.plan import REDO
from kvpool.request import FinishReason, GenerateRequest, TokenLogprobs
from kvpool.store.segment import Segment
from kvpool.store.selection import Selection
from kvpool.types import BlockHash, RequestId
from tests.engine_parity import LOGPROB_TOLERANCE, WatchedTorch, save_random_model, tiny_llama
from tests.multiprocess.worker_core_support import BLOCK_TOKENS, FAKE, SECOND_NS, Pool, load_plan, make_kind
from tests.worker_support import Collector, WatchedFake, make_request
from workers.core import WorkerCore
from workers.engine.base import SequenceSlice
from workers.puller import PullOrder, PullSource


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tiny_llama(), tmp_path_factory.mktemp("llama"))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(params=["fake", "cpu", pytest.param("cuda", marks=needs_gpu)])
def pool(request: pytest.FixtureRequest, llama: Path) -> Iterator[Pool]:
    if request.param == "fake":
        kind = replace(FAKE, make=lambda: WatchedFake(block_tokens=BLOCK_TOKENS))
    else:
        kind = replace(
            make_kind("torch over ucx", llama),
            make=lambda: WatchedTorch(llama, device=request.param, block_tokens=BLOCK_TOKENS),
        )
    made = Pool(kind)
    yield made
    made.close()


@pytest.fixture
def fake_pool() -> Iterator[Pool]:
    made = Pool(replace(FAKE, make=lambda: WatchedFake(block_tokens=BLOCK_TOKENS)))
    yield made
    made.close()


def ask(name: str, prompt: list[int], tokens: int = 6) -> GenerateRequest:
    return make_request(name, prompt, tokens, ignore_eos=True, logprobs=1)


def chain_of(core: WorkerCore, prompt: list[int]) -> list[BlockHash]:
    return list(block_hashes(prompt, core._parts.namespace_for("")))


def counted(core: WorkerCore, *names: str) -> list[int]:
    counters = core.counters()
    return [counters[name] for name in names]


def same(got: Collector, wanted: Collector) -> None:
    assert got.tokens == wanted.tokens
    assert [item.logprob for item in got.logprobs] == [item.logprob for item in wanted.logprobs]


def test_a_hit_comes_from_device_memory_bit_for_bit(pool: Pool) -> None:
    with_tier, without = pool.add(device_blocks=64), pool.add()
    prompt = pool.prompt(40)
    longer = prompt + pool.prompt(11)
    for name, asked in (("first", prompt), ("again", prompt), ("longer", longer), ("longer again", longer)):
        same(pool.run(with_tier, ask(name, asked)), pool.run(without, ask(name, asked)))
    names = ("device_fills", "host_fills", "device_promotions", "device_evictions")
    assert counted(with_tier, *names) == [10 + 10 + 12, 0, 0, 0]
    assert counted(with_tier, "device_fill_bytes") == [32 * with_tier.segment.config.block_bytes]
    assert with_tier.status()["device"]["blocks"] == len(with_tier.device_hashes()) == len(with_tier.held_hashes())
    assert without.status()["device"] is None
    assert "device_fills" not in without.counters()


def test_a_tier_smaller_than_the_prompt_serves_its_front_and_pages_the_rest(pool: Pool) -> None:
    with_tier, without = pool.add(device_blocks=4), pool.add()
    prompt = pool.prompt(40)
    for name in ("first", "again", "third"):
        same(pool.run(with_tier, ask(name, prompt)), pool.run(without, ask(name, prompt)))
    assert counted(with_tier, "device_fills", "host_fills") == [2 * 4, 2 * 6]
    assert with_tier.status()["device"] == {"blocks": 4, "total_blocks": 4, "fill_mib_ns": with_tier._fill_mib_ns()}


def test_a_block_that_left_the_tier_is_filled_from_its_page_and_comes_back(pool: Pool) -> None:
    with_tier, without = pool.add(device_blocks=12), pool.add()
    prompt, other = pool.prompt(40), pool.prompt(44)
    for name, asked in (("a", prompt), ("b", other), ("c", prompt), ("d", prompt)):
        same(pool.run(with_tier, ask(name, asked)), pool.run(without, ask(name, asked)))
    fills, promoted, evicted = counted(with_tier, "host_fills", "device_promotions", "device_evictions")
    assert fills > 0
    assert promoted > 0
    assert evicted > 0
    assert pool.publishers[0].held == set(with_tier.held_hashes()), "peers see what they saw without the tier"


def test_what_leaves_the_segment_leaves_the_tier_first(pool: Pool) -> None:
    core = pool.add(device_blocks=64)
    prompt = pool.prompt(40)
    first = pool.run(core, ask("first", prompt))
    assert core.wait_idle(SECOND_NS)
    core.evict(Selection(chain=chain_of(core, prompt)[:1]))
    assert core.device_hashes() == []
    again = pool.run(core, ask("again", prompt))
    same(again, first)
    assert again.stats is not None
    assert again.stats.tokens_redone == 40
    assert counted(core, "device_fills", "device_drops") == [0, 11]


def test_a_storm_of_evictions_preemptions_and_cancellations_changes_no_output(pool: Pool) -> None:
    rng = Random(3)
    core, plain = pool.add(num_blocks=22, device_blocks=9), pool.add(num_blocks=400)
    shared = pool.prompt(16)
    prompts = [shared[: 4 * rng.randrange(5)] + pool.prompt(rng.randrange(1, 24)) for _ in range(8)]
    expected = {number: pool.run(plain, ask(f"plain-{number}", asked, 24)) for number, asked in enumerate(prompts)}
    for turn in range(8):
        sinks: list[tuple[int, Collector]] = []
        for place in range(5):
            number, sink = rng.randrange(len(prompts)), Collector()
            name = f"{turn}-{place}"
            core.submit(ask(name, prompts[number], rng.randrange(1, 25)), REDO, "d", sink)
            if rng.random() < 0.2:
                core.cancel(RequestId(name))
            sinks.append((number, sink))
        if turn % 3 == 2:
            core.evict(Selection(chain=chain_of(core, rng.choice(prompts))[:1]))
        for number, sink in sinks:
            sink.result()
            wanted = expected[number]
            assert sink.finish in (FinishReason.LENGTH, FinishReason.CANCELLED)
            assert sink.tokens == wanted.tokens[: len(sink.tokens)]
            probabilities = [item.logprob for item in wanted.logprobs][: len(sink.tokens)]
            assert [item.logprob for item in sink.logprobs] == pytest.approx(probabilities, abs=LOGPROB_TOLERANCE)
    for name in ("preemptions", "evictions", "device_fills", "host_fills", "device_evictions", "device_drops"):
        assert core.counters()[name] > 0, name


def test_a_corrupted_block_of_a_peer_never_reaches_the_tier(pool: Pool) -> None:
    holder, reader = pool.add(device_blocks=64), pool.add(device_blocks=64)
    prompt = pool.prompt(42)
    pool.run(holder, ask("warm", prompt))
    page = holder.segment.lookup(chain_of(holder, prompt)[3])
    assert page is not None
    holder._arena.memory[holder.segment.offset(page) + 5] ^= 0xFF
    plain = pool.run(pool.add(), ask("load", prompt))
    for name in ("load", "again"):
        got = pool.run(reader, ask(name, prompt), load_plan(pool.slice(0, 0, 10)))
        assert got.tokens == plain.tokens
        probabilities = [item.logprob for item in plain.logprobs]
        assert [item.logprob for item in got.logprobs] == pytest.approx(probabilities, abs=LOGPROB_TOLERANCE)
    assert reader.counters()["load_failures.integrity"] == 1
    assert counted(reader, "device_fills", "host_fills") == [10, 9]


@pytest.mark.parametrize("length", [40, 41])
def test_what_a_peer_sent_for_a_request_is_in_the_tier_as_in_its_pages(pool: Pool, length: int) -> None:
    holder, reader = pool.add(), pool.add(device_blocks=64)
    prompt = pool.prompt(length)
    pool.run(holder, ask("warm", prompt))
    first = pool.run(reader, ask("load", prompt), load_plan(pool.slice(0, 0, 10)))
    assert first.stats is not None
    assert first.stats.tokens_loaded == 40 - (length == 40)
    same(pool.run(reader, ask("again", prompt)), first)
    assert counted(reader, "device_fills", "host_fills") == ([10, 10] if length == 41 else [9, 11])


def test_what_a_peer_sent_is_in_the_tier_once_it_was_read_here(fake_pool: Pool) -> None:
    holder, reader = fake_pool.add(), fake_pool.add(device_blocks=64)
    prompt = fake_pool.prompt(42)
    expected = fake_pool.run(holder, ask("warm", prompt)).tokens
    source = fake_pool.slice(0, 0, 10)
    reader.pull(
        PullOrder(
            "",
            tuple(chain_of(reader, prompt)),
            (PullSource(source.holder, source.transport, source.data_address, 10),),
            5 * SECOND_NS,
        )
    )
    assert len(reader.held_hashes()) == 10
    assert reader.device_hashes() == []
    assert fake_pool.run(reader, ask("read", prompt)).tokens == expected
    assert counted(reader, "host_fills", "device_promotions") == [10, 10]
    assert set(chain_of(reader, prompt)) <= set(reader.device_hashes())


def test_reports_say_how_fast_pages_are_filled_where_there_is_a_device_tier(fake_pool: Pool) -> None:
    assert fake_pool.add().load().fill_mib_ns == 0
    assert fake_pool.add(device_blocks=8).load().fill_mib_ns > 0


def test_a_drop_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary: with this bug the checks of this file must not pass."""
    pool = Pool(replace(FAKE, make=lambda: WatchedFake(block_tokens=BLOCK_TOKENS)))
    core = pool.add(device_blocks=64)
    pool.run(core, ask("first", pool.prompt(40)))
    assert core.wait_idle(SECOND_NS)
    assert core.segment.device is not None
    monkeypatch.setattr(core.segment.device, "drop", lambda hashes: None)
    pool.publishers[0].in_device.clear()
    Segment.clear(core.segment)
    with pytest.raises(InvariantViolation, match="outlived"):
        core.check()
    core.close()


def test_a_tier_larger_than_the_segment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"store\.device_blocks is 65 and engine\.num_blocks 64"):
        parse_config({"workers": [{"engine": {"num_blocks": 64}, "store": {"device_blocks": 65}}]})


class _Broken(WatchedFake):
    """Fails the request that reaches token 80, once it is told to."""

    breaks = False

    def step(self, batch: Sequence[SequenceSlice]) -> list[TokenLogprobs | None]:
        slots = [str(part.slot) for part in batch if part.start + len(part.tokens) >= 80]
        if self.breaks and slots:
            raise NumericsError("not finite", slots=",".join(slots))
        return super().step(batch)


def test_a_request_that_breaks_in_the_beat_in_which_its_load_landed_ends_alone(fake_pool: Pool) -> None:
    engine = _Broken(block_tokens=BLOCK_TOKENS)
    holder, core = fake_pool.add(), fake_pool.add(engine, device_blocks=24)
    front = fake_pool.prompt(80)
    whole = front + fake_pool.prompt(5)
    fake_pool.run(holder, make_request("warm", whole, 2, ignore_eos=True))
    fake_pool.run(core, make_request("front", front[:40], 1, ignore_eos=True))
    fake_pool.run(core, make_request("other", fake_pool.prompt(96), 1, ignore_eos=True))  # pushes it out of the tier
    engine.breaks = True
    broken, neighbour = Collector(), Collector()
    plan = load_plan(fake_pool.slice(0, 10, 20))
    core.submit(make_request("broken", whole, 4, ignore_eos=True), plan, "d", broken)
    core.submit(make_request("neighbour", [5, 6, 7], 60, ignore_eos=True), REDO, "d", neighbour)
    with pytest.raises(NumericsError):
        broken.result()
    assert len(neighbour.result()) == 60
    assert core.failure is None
