"""A fault run's progress: no long silence, and no chatter either."""

from __future__ import annotations

import asyncio

from kvpool.faults.heartbeat import QUIET_S, Heartbeat


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_after_a_while_of_silence_the_last_line_is_said_again_with_how_far_it_is() -> None:
    clock, said = _Clock(), list[str]()
    heartbeat = Heartbeat(said.append, clock)
    heartbeat.beat()
    assert said == []  # nothing has begun
    heartbeat("reference run")
    clock.now_s += QUIET_S - 0.1
    heartbeat.beat()
    assert said == ["reference run"]
    heartbeat.detail = "3 of 24 prompts"
    clock.now_s += 0.1
    heartbeat.beat()
    heartbeat.beat()
    assert said[1:] == ["reference run: 8 s so far, 3 of 24 prompts"]
    clock.now_s += QUIET_S
    heartbeat.beat()
    assert said[2:] == ["reference run: 16 s so far, 3 of 24 prompts"]


def test_a_new_line_forgets_how_far_the_last_one_was_and_ends_the_silence() -> None:
    clock, said = _Clock(), list[str]()
    heartbeat = Heartbeat(said.append, clock)
    heartbeat("reference run")
    heartbeat.detail = "3 of 24 prompts"
    clock.now_s += QUIET_S - 1
    heartbeat("strike")
    clock.now_s += 1
    heartbeat.beat()
    assert said == ["reference run", "strike"]
    clock.now_s += QUIET_S
    heartbeat.beat()
    assert said[-1] == "strike: 9 s so far"


def test_the_beat_ends_with_what_it_is_about() -> None:
    async def run() -> int:
        heartbeat = Heartbeat(lambda _: None, _Clock())
        async with heartbeat.beating():
            assert len(asyncio.all_tasks()) == 2
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
