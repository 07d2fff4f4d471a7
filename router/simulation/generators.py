"""Made traces with known sharing: multi-turn chat, document questions, agents, a hot system prompt.  (pure)

All draw from one seed and are equal for equal arguments. Blocks are those of Mooncake's format, 512 tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from kvpool.errors import ConfigError
from router.simulation.trace import MOONCAKE_BLOCK_TOKENS, Trace, TraceRequest

_BLOCK = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Shape:
    """What all generators share: how many requests, how fast they arrive on average, and the seed."""

    requests: int = 1000
    per_second: float = 4.0
    seed: int = 0


def multi_turn_chat(shape: Shape, *, turns: int = 6, system_blocks: int = 2, turn_blocks: int = 2) -> Trace:
    """Conversations of several turns over one system prompt; each turn repeats all turns before it."""
    rng, ids = Random(shape.seed), _ids(1_000_000)
    system = tuple(range(system_blocks))
    chats: list[tuple[tuple[int, ...], int]] = []
    made = []
    for arrival_ns in _arrivals(shape, rng):
        if not chats or rng.random() < 1.0 / turns:
            chats.append((system, 0))
        place = rng.randrange(len(chats))
        history, turn = chats[place]
        history = (*history, *_take(ids, rng.randint(1, 2 * turn_blocks - 1)))
        made.append(_request(arrival_ns, history, rng, output=(50, 400)))
        if turn + 1 == turns:
            chats.pop(place)
        else:
            chats[place] = (history, turn + 1)
    return Trace("multi-turn chat", _BLOCK, tuple(made))


def document_questions(shape: Shape, *, documents: int = 40, document_blocks: int = 24) -> Trace:
    """Questions about documents, of which few are popular (Zipf)."""
    rng, ids = Random(shape.seed), _ids(1_000_000)
    texts = [(0, *_take(ids, rng.randint(document_blocks // 2, document_blocks * 3 // 2))) for _ in range(documents)]
    weights = [1.0 / (rank + 1) for rank in range(documents)]
    made = []
    for arrival_ns in _arrivals(shape, rng):
        text = rng.choices(texts, weights)[0]
        made.append(_request(arrival_ns, (*text, *_take(ids, 1)), rng, output=(20, 200)))
    return Trace("document questions", _BLOCK, tuple(made))


def agents(shape: Shape, *, tools_blocks: int = 10, steps: int = 12) -> Trace:
    """Agents that call again and again with a context that grows by a block or two, over one long tool prompt."""
    return Trace(
        "agents",
        _BLOCK,
        multi_turn_chat(shape, turns=steps, system_blocks=tools_blocks, turn_blocks=1).requests,
    )


def hot_system_prompt(shape: Shape, *, system_blocks: int = 16, user_blocks: int = 2) -> Trace:
    """Everybody shares one long system prompt and nothing else."""
    rng, ids = Random(shape.seed), _ids(1_000_000)
    system = tuple(range(system_blocks))
    made = [
        _request(arrival_ns, (*system, *_take(ids, user_blocks)), rng, output=(50, 300))
        for arrival_ns in _arrivals(shape, rng)
    ]
    return Trace("hot system prompt", _BLOCK, tuple(made))


GENERATORS: dict[str, Callable[[Shape], Trace]] = {
    "chat": multi_turn_chat,
    "documents": document_questions,
    "agents": agents,
    "hot-prompt": hot_system_prompt,
}


def generate(name: str, shape: Shape) -> Trace:
    """A made trace by name.

    Raises:
        ConfigError: there is no such generator; the message names the nearest.
    """
    maker = GENERATORS.get(name)
    if maker is None:
        near = difflib.get_close_matches(name, GENERATORS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown generator {name!r}{hint} Known: {', '.join(sorted(GENERATORS))}", generator=name)
    return maker(shape)


def _arrivals(shape: Shape, rng: Random) -> Iterator[int]:
    """A Poisson process."""
    at = 0.0
    for _ in range(shape.requests):
        at += rng.expovariate(shape.per_second)
        yield round(at * 1e9)


def _request(arrival_ns: int, blocks: tuple[int, ...], rng: Random, output: tuple[int, int]) -> TraceRequest:
    """A prompt over these blocks, the last of which is partly filled."""
    tokens = (len(blocks) - 1) * _BLOCK + rng.randint(1, _BLOCK)
    return TraceRequest(arrival_ns, tokens, rng.randint(*output), blocks)


def _ids(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1


def _take(ids: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(ids) for _ in range(count))
