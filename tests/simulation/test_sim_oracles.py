"""The simulator's parts against closed forms and published figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvpool.errors import InvariantViolation, RequestError
from router.estimators import PrefillCurve
from router.simulation.cache import NodeCache
from router.simulation.engine import Engine, Sequence
from router.simulation.events import EventLoop
from router.simulation.network import Flow, Network
from router.simulation.presets import PRESETS, Preset
from router.simulation.trace import Trace, from_mooncake, load_trace

TRACES = Path(__file__).parents[2] / "examples" / "traces"
S = 1_000_000_000
MS = 1_000_000


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return load_trace(TRACES / "mooncake_conversation.jsonl.xz")


@pytest.fixture(scope="module")
def synthetic() -> Trace:
    return load_trace(TRACES / "mooncake_synthetic.jsonl.xz")


def hit_shares(trace: Trace, capacity: int | None) -> tuple[float, float]:
    """Percent of blocks and of tokens found by one cache that inserts at arrival."""
    cache = NodeCache(capacity)
    blocks = tokens = all_blocks = 0
    for item in trace.requests:
        found = cache.prefix(item.blocks)
        blocks += found
        tokens += min(found * trace.block_tokens, item.prompt_tokens)
        all_blocks += len(item.blocks)
        cache.insert(item.blocks)
    return 100 * blocks / all_blocks, 100 * tokens / trace.prompt_tokens


def test_an_infinite_cache_hits_as_often_as_published(conversation: Trace, synthetic: Trace) -> None:
    assert (len(conversation), len(synthetic)) == (12_031, 3_993)
    assert hit_shares(conversation, None) == pytest.approx((36.6, 37.4), abs=0.1)
    assert hit_shares(synthetic, None) == pytest.approx((64.0, 65.1), abs=0.1)


@pytest.mark.parametrize(("capacity", "first", "second"), [(10_000, 21.2, 42.4), (50_000, 35.5, 64.0)])
def test_a_leaf_first_lru_cache_hits_as_often_as_published(
    conversation: Trace, synthetic: Trace, capacity: int, first: float, second: float
) -> None:
    assert hit_shares(conversation, capacity)[0] == pytest.approx(first, abs=0.1)
    assert hit_shares(synthetic, capacity)[0] == pytest.approx(second, abs=0.1)


def test_an_evicted_chain_loses_its_tail_first() -> None:
    cache = NodeCache(4)
    cache.insert((1, 2, 3))
    assert cache.insert((7, 8)).gone == [3]
    assert cache.prefix((1, 2, 3)) == 2


def test_blocks_in_use_stay_even_over_the_capacity() -> None:
    cache = NodeCache(2)
    cache.insert((1, 2), pin=True)
    cache.insert((1, 5))
    cache.insert((8, 9, 10), pin=True)
    assert cache.prefix((1, 2)) == 2
    assert 5 not in cache
    assert cache.unpin((8, 9, 10)).gone == [10, 9, 8]
    assert cache.unpin((1, 2)).gone == []
    assert len(cache) == 2


def test_one_link_shared_by_n_loads_finishes_them_all_at_n_times_the_time_of_one() -> None:
    loop = EventLoop()
    network = Network(loop, 5, 1e9, alpha_ns=0)
    ends: list[int] = []
    for target in range(1, 5):
        network.start(0, target, 1e9, lambda _: ends.append(loop.now_ns))
    loop.run()
    assert ends == pytest.approx([4 * S] * 4, rel=1e-6)
    assert network.bytes_moved == pytest.approx(4e9)


def test_a_short_load_that_joins_takes_its_share_and_gives_it_back() -> None:
    loop = EventLoop()
    network = Network(loop, 3, 1e9, alpha_ns=0)
    ends: dict[str, int] = {}

    def note(name: str) -> Callable[[Flow], None]:
        return lambda _: ends.__setitem__(name, loop.now_ns)

    network.start(0, 1, 2e9, note("long"))
    loop.at(1 * S, lambda: network.start(0, 2, 0.5e9, note("short")) and None)
    loop.run()
    assert ends["short"] == pytest.approx(2 * S, rel=1e-6)  # half the rate
    assert ends["long"] == pytest.approx(2.5 * S, rel=1e-6)


def test_latency_comes_before_the_first_byte_and_a_cancelled_load_keeps_what_came() -> None:
    loop = EventLoop()
    network = Network(loop, 2, 1e9, alpha_ns=5 * MS)
    flow = network.start(0, 1, 1e9, lambda _: pytest.fail("it was cancelled"))
    loop.run(until_ns=5 * MS)
    loop.at(105 * MS, network.cancel, flow)
    loop.run()
    assert flow.moved == pytest.approx(1e8, rel=1e-6)


def flat_preset(service_ns: float) -> Preset:
    """One token of prompt takes ``service_ns``; one request a step."""
    return replace(
        PRESETS["llama-70b"],
        curve=PrefillCurve(0.0, service_ns, 0.0),
        chunk_tokens=1,
        step_ns=0.0,
        sequence_ns=0.0,
        context_ns=0.0,
    )


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_engine_with_equal_jobs_waits_like_an_m_d_1_queue(load: float) -> None:
    loop, rng, waits = EventLoop(), Random(7), []
    service = 10 * MS

    def prefilled(sequence: Sequence) -> None:
        assert sequence.first_token_ns is not None
        waits.append(sequence.first_token_ns - sequence.arrival_ns - service)

    engine = Engine(loop, flat_preset(service), prefilled, lambda _: None)
    at = 0.0
    for i in range(60_000):
        at += rng.expovariate(load / service)
        loop.at(int(at), lambda n=i, t=int(at): engine.submit(Sequence(f"q{n}", t, 1, 1)))
    loop.run()
    expected = load * service / (2 * (1 - load))
    assert sum(waits) / len(waits) == pytest.approx(expected, rel=0.05)


def test_a_prefill_costs_its_chunks_and_every_pair_once() -> None:
    preset = PRESETS["llama-70b"]
    loop, done = EventLoop(), []
    engine = Engine(loop, preset, done.append, lambda _: None)
    engine.submit(Sequence("q0", 0, 5000, 1))
    loop.run()
    (sequence,) = done
    chunks = 3
    expected = preset.curve.time_ns(5000, 0) + (chunks - 1) * preset.curve.t0_ns
    assert sequence.first_token_ns == pytest.approx(expected, rel=1e-6)
    assert sequence.computed == 5000


def test_decoding_ends_after_its_steps_and_yields_to_a_new_prompt() -> None:
    preset = replace(PRESETS["llama-70b"], sequence_ns=0.0, context_ns=0.0)
    loop = EventLoop()
    ends: dict[str, int] = {}
    first: dict[str, int] = {}
    engine = Engine(
        loop,
        preset,
        lambda item: first.__setitem__(item.name, loop.now_ns),
        lambda item: ends.__setitem__(item.name, loop.now_ns),
    )
    engine.submit(Sequence("a", 0, 100, 101))
    arrival = 300 * MS
    loop.at(arrival, lambda: engine.submit(Sequence("b", arrival, 100, 1)))
    loop.run()
    prompt_ns = preset.curve.time_ns(100, 0)
    assert first["b"] - arrival <= preset.step_ns + prompt_ns + 2
    assert ends["a"] == pytest.approx(prompt_ns + 99 * preset.step_ns + prompt_ns, rel=1e-3)


def test_the_loop_keeps_the_order_of_equal_moments_and_refuses_the_past() -> None:
    loop, seen = EventLoop(), []
    for name in "abc":
        loop.at(5, seen.append, name)
    loop.run()
    assert seen == ["a", "b", "c"]
    with pytest.raises(InvariantViolation):
        loop.at(4, seen.append, "d")


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"timestamp": 0, "input_length": 600, "output_length": 1}',
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": -1, "input_length": 6, "output_length": 1, "hash_ids": [1]}',
    ],
)
def test_a_malformed_line_is_named(line: str) -> None:
    good = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}'
    with pytest.raises(RequestError, match="line 2"):
        from_mooncake("t", [good, line])


def test_a_csv_trace_gets_synthetic_prefixes_and_the_same_ones_for_a_seed(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = [f"2024-05-10 00:00:{i:02d}.1234567,{600 + 100 * i},{5 + i}" for i in range(20)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    trace = load_trace(path, seed=3)
    assert len(trace) == 20
    assert trace.duration_ns == 19 * S
    assert all(len(item.blocks) == -(-item.prompt_tokens // 512) for item in trace.requests)
    assert len({item.blocks[0] for item in trace.requests}) < 20
    assert load_trace(path, seed=3) == trace
    assert load_trace(path, seed=4) != trace


def test_a_missing_trace_and_missing_columns_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read"):
        load_trace(tmp_path / "none.jsonl")
    path = tmp_path / "odd.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(RequestError, match="none of the columns"):
        load_trace(path)
