"""The load of a fault run: shared-prefix chats at a set rate, with deadlines, cancellations and streaming clients.

What is sent is decided by a seed alone (`plan_chats`, `schedule`; pure). Outputs are known beforehand from a reference
run through one worker without loads and without faults. Rounds repeat the chats under a tenant of their own, so that
nothing of an earlier round is cached and prefixes are shared, loaded and redone all the time; the tenant changes which
blocks may be shared, never what the model says.

The driver (`drive`) is an open loop: it sends at the planned times, whatever has become of earlier requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvpool.client import AsyncKVPoolClient
from kvpool.errors import KVPoolError
from kvpool.faults.history import HistoryWriter, Kind

MAX_OUTSTANDING = 512
HANG_GRACE_S = 8.0
S = 1_000_000_000
FLOOD_TIMEOUT_NS = 120 * S
FIRST_TOKEN_ID = 100
LAST_TOKEN_ID = 40_000


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """What is sent.

    Attributes:
        seed: of prompts, order, gaps and styles.
        tenants: beginning of every tenant's name; unlike that of any run before, or its blocks are still cached.
        rate_rps: requests per second, on average.
        systems: system prompts that chats share.
        system_tokens: length of each.
        chats, turns: how many chats, and questions in each.
        question_tokens: length of a question, drawn from [n/2, n].
        answer_tokens: length of every answer.
        timeout_ns: budget of an ordinary request.
        tight_timeout_ns: budget of a request that may expire.
        stream_share, cancel_share, tight_share: of all requests; the rest are plain calls.
    """

    seed: int = 0
    tenants: str = "run"
    rate_rps: float = 4.0
    systems: int = 3
    system_tokens: int = 512
    chats: int = 8
    turns: int = 3
    question_tokens: int = 48
    answer_tokens: int = 24
    timeout_ns: int = 30 * S
    tight_timeout_ns: int = 2 * S
    stream_share: float = 0.5
    cancel_share: float = 0.08
    tight_share: float = 0.05


class Style(Enum):
    """How a client asks."""

    WHOLE = "whole"
    STREAM = "stream"
    CANCEL = "cancel"  # streams, and gives up after some tokens


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """One chat: its system prompt, and what the user says turn by turn, as token ids."""

    name: str
    system: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of the schedule.

    Attributes:
        id: its name.
        at_ns: when it is sent, from the start of the workload.
        prompt: label of the prompt (`label`); None for one that has no reference.
        tenant: of its round.
        style: how the client asks.
        cancel_after: tokens after which a cancelling client gives up.
        timeout_ns: its budget.
        may_expire: the budget is tight on purpose.
    """

    id: str
    at_ns: int
    prompt: str | None
    tenant: str
    style: Style
    cancel_after: int
    timeout_ns: int
    may_expire: bool


def label(chat: str, turn: int) -> str:
    """Name of a prompt."""
    return f"{chat}.{turn}"


def plan_chats(config: WorkloadConfig) -> tuple[ChatPlan, ...]:
    """The chats of a seed."""
    rng = random.Random(f"chats-{config.seed}")

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count))

    systems = [words(config.system_tokens) for _ in range(config.systems)]
    return tuple(
        ChatPlan(
            name=f"chat-{number}",
            system=systems[number % config.systems],
            questions=tuple(
                words(rng.randint((config.question_tokens + 1) // 2, config.question_tokens))
                for _ in range(config.turns)
            ),
        )
        for number in range(config.chats)
    )


def schedule(config: WorkloadConfig) -> Iterator[Planned]:
    """Requests without an end, in order of time. A chat's turns keep their order within a round."""
    rng = random.Random(f"schedule-{config.seed}")
    at_s, number, round_number = 0.0, 0, 0
    while True:
        order = [chat for chat in range(config.chats) for _ in range(config.turns)]
        rng.shuffle(order)
        turns: dict[int, Iterator[int]] = {chat: iter(range(config.turns)) for chat in range(config.chats)}
        for chat in order:
            at_s += min(rng.expovariate(config.rate_rps), 3.0 / config.rate_rps)
            style = rng.choices(
                (Style.STREAM, Style.CANCEL, Style.WHOLE),
                (config.stream_share, config.cancel_share, 1.0 - config.stream_share - config.cancel_share),
            )[0]
            tight = rng.random() < config.tight_share
            yield Planned(
                id=f"q-{number:05d}",
                at_ns=int(at_s * S),
                prompt=label(f"chat-{chat}", next(turns[chat])),
                tenant=f"{config.tenants}-{round_number}",
                style=style,
                cancel_after=rng.randint(1, max(1, config.answer_tokens - 2)),
                timeout_ns=config.tight_timeout_ns if tight else config.timeout_ns,
                may_expire=tight,
            )
            number += 1
        round_number += 1


@dataclass(frozen=True, slots=True)
class Driver:
    """Sends planned requests and writes down what happens to them.

    Attributes:
        client: over a connection that writes down attempts and chunks (`kvpool.faults.probe.RecordingConnection`).
        history: where to.
        prompts: token ids by label.
        answer_tokens: length of every answer.
    """

    client: AsyncKVPoolClient
    history: HistoryWriter
    prompts: Mapping[str, tuple[int, ...]]
    answer_tokens: int

    async def drive(self, plan: Iterator[Planned], stop: asyncio.Event) -> None:
        """Send until told to stop, then wait for the last answer."""
        running: set[asyncio.Task[None]] = set()
        start_ns = time.monotonic_ns()
        for item in plan:
            await _sleep_until(start_ns + item.at_ns, stop)
            if stop.is_set():
                break
            while len(running) >= MAX_OUTSTANDING:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            assert item.prompt is not None
            task = asyncio.create_task(self.send(item, self.prompts[item.prompt]))
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.gather(*running)

    async def flood(self, requests: int, tokens: int, rng: random.Random) -> None:
        """Unique prompts at once, which have no reference; waits for their answers."""
        name = f"flood-{rng.getrandbits(32):08x}"
        async with asyncio.TaskGroup() as group:
            for number in range(requests):
                prompt = tuple(rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(tokens))
                item = Planned(f"{name}-{number}", 0, None, name, Style.WHOLE, 0, FLOOD_TIMEOUT_NS, may_expire=False)
                group.create_task(self.send(item, prompt))

    async def send(self, item: Planned, prompt: tuple[int, ...]) -> None:
        """One request, from its invocation to its ending, whatever it is."""
        self.history.add(
            Kind.INVOKE,
            id=item.id,
            prompt=item.prompt,
            style=item.style.value,
            timeout_ns=item.timeout_ns,
            may_expire=item.may_expire,
            max_tokens=self.answer_tokens,
        )
        options: dict[str, Any] = {
            "max_tokens": self.answer_tokens,
            "ignore_eos": True,
            "tenant": item.tenant,
            "timeout_s": item.timeout_ns / S,
            "request_id": item.id,
        }
        try:
            async with asyncio.timeout(item.timeout_ns / S + HANG_GRACE_S):
                await self._ask(item, prompt, options)
        except KVPoolError as error:
            self.history.add(Kind.ERROR, id=item.id, code=error.code, message=str(error)[:500])
        except TimeoutError:
            self.history.add(Kind.ERROR, id=item.id, code="hung", message="no ending long after the deadline")
        except Exception as error:  # noqa: BLE001 (whatever reaches a user is written down, and the checker judges it)
            self.history.add(Kind.ERROR, id=item.id, code=f"foreign.{type(error).__name__}", message=str(error)[:500])

    async def _ask(self, item: Planned, prompt: tuple[int, ...], options: dict[str, Any]) -> None:
        if item.style is Style.WHOLE:
            result = await self.client.generate(prompt, **options)
            self._respond(item, result.tokens, result)
            return
        tokens: list[int] = []
        cancelled = False
        async for chunk in self.client.stream(prompt, **options):
            tokens += chunk.tokens
            if item.style is Style.CANCEL and not cancelled and len(tokens) >= item.cancel_after:
                cancelled = True
                self.history.add(Kind.CANCEL, id=item.id)
                await self.client.cancel(item.id)
            if chunk.result is not None:
                self._respond(item, tuple(tokens), chunk.result)

    def _respond(self, item: Planned, tokens: tuple[int, ...], result: Any) -> None:
        stats = result.stats
        self.history.add(
            Kind.RESPONSE,
            id=item.id,
            tokens=tokens,
            finish=result.finish.value,
            stats={
                "worker": stats.worker_id,
                "plan": stats.plan,
                "tokens_cached": stats.tokens_cached,
                "tokens_loaded": stats.tokens_loaded,
                "tokens_redone": stats.tokens_redone,
                "load_failures": stats.load_failures,
                "attempts": stats.attempts,
                "ttft_ns": stats.ttft_ns,
            },
        )


async def _sleep_until(at_ns: int, stop: asyncio.Event) -> None:
    """Sleep, or less when told to stop."""
    seconds = (at_ns - time.monotonic_ns()) / S
    if seconds <= 0:
        await asyncio.sleep(0)
        return
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
