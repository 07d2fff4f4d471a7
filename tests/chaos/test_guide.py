"""What docs/fault-injection.md promises: a new scenario in 20 lines, and a row for every one there is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import kvpool
from kvpool.faults import scenarios
from kvpool.faults.scenarios import SCENARIOS, Scenario

GUIDE = (Path(kvpool.__file__).parents[1] / "docs" / "fault-injection.md").read_text()


def _example() -> str:
    found = re.search(r"```python\n(.*?)```", GUIDE[GUIDE.index("## A new scenario") :], re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_example_of_a_new_scenario_has_at_most_20_lines_and_is_one() -> None:
    lines = [line for line in _example().splitlines() if line.strip()]
    assert len(lines) <= 20
    place: dict[str, Any] = {**vars(scenarios), "asyncio": asyncio}
    exec(compile(_example(), "guide", "exec"), place)
    made = place["PAUSE_TWO_READERS"]
    assert isinstance(made, Scenario)
    assert asyncio.iscoroutinefunction(made.strike)


def test_every_scenario_has_its_row() -> None:
    table = GUIDE[GUIDE.index("## The scenarios") : GUIDE.index("**Signals are real")]
    assert set(re.findall(r"`([a-z0-9-]+)`", table)) >= set(SCENARIOS)
