"""Worker cores on real threads, over real transports and the real loader: tokens always equal the plain run.

What touches KV runs with the fake engine, whose output depends on every byte of it, over memory and over UCX, and with
the torch engine and a tiny random Llama over UCX, compared with the plain Hugging Face model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.hashing import block_hashes
from kvpool.plan import REDO, PlanKind
from tests.engine_parity import save_random_model, tiny_llama
from tests.multiprocess.worker_core_support import BLOCK_TOKENS, FAKE, SECOND_NS, Kind, Pool, load_plan, make_kind
from tests.worker_support import (
    Collector,
    FakeEngine,
    make_request,
    reference,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tiny_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["fake over memory", "fake over ucx", "torch over ucx"])
def kind(request: pytest.FixtureRequest, llama: Path) -> Kind:
    return make_kind(request.param, llama)


@pytest.fixture
def pool(kind: Kind) -> Iterator[Pool]:
    made = Pool(kind)
    yield made
    made.close()


def test_cold_prompts_of_any_length_equal_the_plain_model(pool: Pool) -> None:
    core = pool.add(max_step_tokens=10)
    for length in (1, 3, 4, 5, 8, 40, 63):
        request = make_request(f"cold-{length}", pool.prompt(length), 9, ignore_eos=True)
        assert pool.run(core, request).tokens == pool.kind.plain(request)


def test_a_prompt_seen_before_is_cached_and_gives_the_same_tokens(pool: Pool) -> None:
    core = pool.add()
    prompt = pool.prompt(40)
    first = pool.run(core, make_request("a", prompt, 6, ignore_eos=True))
    again = pool.run(core, make_request("b", prompt, 6, ignore_eos=True))
    assert first.tokens == again.tokens == pool.kind.plain(make_request("c", prompt, 6, ignore_eos=True))
    assert first.stats is not None
    assert (first.stats.tokens_cached, first.stats.tokens_redone) == (0, 40)
    assert again.stats is not None
    assert (again.stats.tokens_cached, again.stats.tokens_redone) == (39, 1)


def test_blocks_of_one_token_are_cached_too() -> None:
    pool = Pool(replace(FAKE, make=lambda: FakeEngine(block_tokens=1)))
    core = pool.add()
    request = replace(make_request("short", pool.prompt(20), 3, ignore_eos=True), timeout_ns=20 * SECOND_NS)
    for _ in range(2):
        sink = pool.run(core, request)
        assert sink.tokens == reference(request)
    assert sink.stats is not None
    assert sink.stats.tokens_redone == 1
    pool.close()


def test_generated_blocks_are_reused_by_the_next_turn(pool: Pool) -> None:
    core = pool.add()
    prompt = pool.prompt(10)
    first = pool.run(core, make_request("turn-1", prompt, 14, ignore_eos=True))
    request = make_request("turn-2", prompt + first.tokens + pool.prompt(3), 5, ignore_eos=True)
    second = pool.run(core, request)
    assert second.tokens == pool.kind.plain(request)
    assert second.stats is not None
    assert second.stats.tokens_cached == 20


def test_blocks_of_a_peer_are_loaded_instead_of_redone(pool: Pool) -> None:
    holder, reader = pool.add(), pool.add()
    prompt = pool.prompt(42)
    pool.run(holder, make_request("warm", prompt, 2, ignore_eos=True))
    request = make_request("load", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 0, 10)))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert (got.stats.tokens_loaded, got.stats.tokens_redone) == (40, 2)
    assert got.stats.bytes_loaded == 10 * reader.segment.config.block_bytes
    assert not got.stats.load_failures
    assert reader.wait_idle(SECOND_NS * 10)
    chain = block_hashes(prompt, pool.cores[0]._parts.namespace_for(""))
    assert set(chain) <= pool.publishers[1].held, "the reader became a holder"
    assert reader.counters()["loads"] == 1


def test_a_prefix_may_be_partly_local_partly_loaded_and_partly_redone(pool: Pool) -> None:
    holder, reader = pool.add(), pool.add()
    prompt = pool.prompt(48)
    pool.run(holder, make_request("warm", prompt[:40], 2, ignore_eos=True))
    pool.run(reader, make_request("own", prompt[:16], 2, ignore_eos=True))
    request = make_request("mixed", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 4, 10)))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert (got.stats.tokens_cached, got.stats.tokens_loaded, got.stats.tokens_redone) == (16, 24, 8)


def test_a_split_over_a_link_worth_waiting_for_loads_its_front_too(pool: Pool) -> None:
    holder, reader = pool.add(), pool.add(max_step_tokens=8)
    prompt = pool.prompt(50)
    pool.run(holder, make_request("warm", prompt, 2, ignore_eos=True))
    request = make_request("split", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 5, 12), kind=PlanKind.SPLIT))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert (got.stats.tokens_loaded, got.stats.tokens_redone) == (48, 2)


@pytest.mark.parametrize("redone", [True, False])
def test_who_waits_for_the_load_of_another_request_costs_neither_of_them_a_redo(redone: bool) -> None:
    pool = Pool(FAKE)
    engine = FakeEngine(block_tokens=BLOCK_TOKENS)
    holder, reader = pool.add(), pool.add(engine)
    prompt = pool.prompt(80)
    pool.run(holder, make_request("warm", prompt, 1))
    engine.running.clear()
    busy = Collector()
    reader.submit(make_request("busy", pool.prompt(6), 2, ignore_eos=True), REDO, "d", busy)
    plan, sinks = load_plan(pool.slice(0, 0, 20)), [Collector() for _ in range(3)]
    requests = [make_request(f"r{number}", [*prompt, number], 9, ignore_eos=True) for number in range(3)]
    for request, sink in zip(requests, sinks, strict=True):
        reader.submit(request, REDO if redone and sink is not sinks[0] else plan, "d", sink)
    engine.running.set()
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.result() == reference(request)
        assert sink.stats is not None
        assert sink.stats.tokens_redone == 1
    assert busy.result()
    assert engine.computed_tokens == 6 + 1 + 3 * (1 + 8)
    assert holder.counters()["bytes_served"] == 20 * reader.segment.config.block_bytes
    pool.close()


def test_a_load_may_be_striped_over_two_holders(pool: Pool) -> None:
    first, second, reader = pool.add(), pool.add(), pool.add()
    prompt = pool.prompt(41)
    for core in (first, second):
        pool.run(core, make_request("warm", prompt, 2, ignore_eos=True))
    request = make_request("striped", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 0, 5, 1), pool.slice(1, 5, 10, 0)))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert got.stats.tokens_loaded == 40


@pytest.mark.parametrize("gone", ["closed", "another epoch", "never held"])
def test_what_a_holder_does_not_give_is_redone(pool: Pool, gone: str) -> None:
    holder, reader = pool.add(), pool.add()
    prompt = pool.prompt(42)
    if gone != "never held":
        pool.run(holder, make_request("warm", prompt, 2, ignore_eos=True))
    if gone == "closed":
        pool.transports[0].close()
    request = make_request("load", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 0, 10, epoch=2 if gone == "another epoch" else 1)))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert (got.stats.tokens_loaded, got.stats.tokens_redone) == (0, 42)
    assert got.stats.load_failures
    assert reader.counters()[f"load_failures.{got.stats.load_failures[0]}"] == 1


def test_a_corrupted_payload_is_never_used(pool: Pool) -> None:
    holder, reader = pool.add(), pool.add()
    prompt = pool.prompt(42)
    pool.run(holder, make_request("warm", prompt, 2, ignore_eos=True))
    chain = block_hashes(prompt, holder._parts.namespace_for(""))
    block = holder.segment.lookup(chain[3])
    assert block is not None
    holder._arena.memory[holder.segment.offset(block) + 5] ^= 0xFF
    request = make_request("load", prompt, 8, ignore_eos=True)
    got = pool.run(reader, request, load_plan(pool.slice(0, 0, 10)))
    assert got.tokens == pool.kind.plain(request)
    assert got.stats is not None
    assert "integrity" in got.stats.load_failures
    assert got.stats.tokens_loaded == 36


def test_preempted_requests_resume_with_the_same_tokens(pool: Pool) -> None:
    core = pool.add(num_blocks=16)
    requests = [make_request(f"p{i}", pool.prompt(13), 30, ignore_eos=True) for i in range(3)]
    sinks = [Collector() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        core.submit(request, REDO, "d", sink)
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.result() == pool.kind.plain(request)
    assert core.counters()["preemptions"] > 0
    assert sum(sink.stats.preemptions for sink in sinks if sink.stats) == core.counters()["preemptions"]


def test_a_batch_of_eight_with_a_shared_prefix_gives_eight_plain_outputs(pool: Pool) -> None:
    core = pool.add(max_step_tokens=32)
    shared = pool.prompt(24)
    requests = [make_request(f"b{i}", shared + pool.prompt(1 + i), 10, ignore_eos=True) for i in range(8)]
    sinks = [Collector() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        core.submit(request, REDO, "d", sink)
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.result() == pool.kind.plain(request)
    redone = sum(sink.stats.tokens_redone for sink in sinks if sink.stats)
    assert redone <= 24 + sum(range(1, 9)) + 8, "the shared prefix is computed once"


def test_an_impatient_worker_computes_what_has_not_come_yet(pool: Pool) -> None:
    holder, reader = pool.add(), pool.add(patient=False, max_step_tokens=8)
    prompt = pool.prompt(50)
    pool.run(holder, make_request("warm", prompt, 2, ignore_eos=True))
    pool.run(reader, make_request("learn", pool.prompt(30), 2, ignore_eos=True))
    for kind in (PlanKind.SPLIT, PlanKind.LOAD):
        request = make_request(f"hasty-{kind.value}", prompt, 8, ignore_eos=True)
        got = pool.run(reader, request, load_plan(pool.slice(0, 5 if kind is PlanKind.SPLIT else 0, 12), kind=kind))
        assert got.tokens == pool.kind.plain(request)
        assert got.stats is not None
        assert got.stats.tokens_cached + got.stats.tokens_loaded + got.stats.tokens_redone == 50
