"""Numbers of incarnations when wall clocks jump."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool import wallclock
from kvpool.errors import StaleError
from kvpool.metadata.membership import DirectoryLimits
from kvpool.metadata.state import DirectoryState
from tests.contract.metadata_support import member
from workers.epochs import epoch_after

HOUR_NS = 3_600 * 10**9


def _refusal(newest: int, own: int) -> StaleError:
    state = DirectoryState(1, DirectoryLimits(), 0)
    state.join(member("w", newest), 0)
    with pytest.raises(StaleError) as caught:
        state.join(member("w", own), 0)
    return caught.value


def test_a_start_after_the_clock_was_set_back_takes_the_next_number_and_is_accepted() -> None:
    now_ns = 10**18
    refusal = _refusal(now_ns + HOUR_NS, now_ns)
    assert epoch_after(refusal, now_ns) == now_ns + HOUR_NS + 1


def test_a_real_successor_is_not_pushed_aside() -> None:
    now_ns = 10**18
    assert epoch_after(_refusal(now_ns - 5, now_ns - HOUR_NS), now_ns) is None
    assert epoch_after(StaleError("gone", reason="not_a_member"), now_ns) is None
    assert epoch_after(_refusal(2**64 - 1, now_ns), now_ns) is None


def test_the_wall_clock_of_a_cluster_moves_for_its_own_processes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_ns = wallclock.unix_ns()
    wallclock.set_offset(tmp_path, -HOUR_NS)
    assert wallclock.unix_ns() >= real_ns
    monkeypatch.setenv(wallclock.CLUSTER_DIR_VARIABLE, str(tmp_path))
    assert wallclock.unix_ns() < real_ns
    wallclock.set_offset(tmp_path, 0)
    assert wallclock.unix_ns() >= real_ns
    (tmp_path / "clock-offset-ns").write_text("soon")
    assert wallclock.unix_ns() >= real_ns
