"""Two Ctrl-Cs end a process that cannot unwind, and nothing that it started stays; one is Python's own affair."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

from kvpool.interrupts import EXIT_INTERRUPTED
from tests.multiprocess.cluster_kit import processes_of

ENDS_S = 60.0

BEGIN = """
import asyncio, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background may ignore it
from kvpool.interrupts import at_hard_end, second_interrupt_ends
here = Path(sys.argv[1])
"""

NEVER_ENDS = """
async def stubborn():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue  # as a task whose wake-up was lost

async def main():
    task = asyncio.create_task(stubborn())
    print("ready", flush=True)
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(3600)  # for the last answers, so that the second one comes into a running loop
"""

CLUSTER = """
import os, subprocess
from kvpool.cluster.guardian import spawn_guardian
from kvpool.cluster.launcher import Cluster, _Launched
from kvpool.config import ClusterConfig
from kvpool.wallclock import CLUSTER_DIR_VARIABLE
cluster_dir = here / "cluster"
cluster_dir.mkdir()
subprocess.Popen(["sleep", "3600"], env={**os.environ, CLUSTER_DIR_VARIABLE: str(cluster_dir)}, start_new_session=True)
cluster = Cluster(ClusterConfig(), "c", _Launched(cluster_dir, spawn_guardian(cluster_dir)))
"""


def _start(code: str, *arguments: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(ENDS_S, child.kill)  # reading its output has no limit of its own
    watchdog.daemon = True
    watchdog.start()
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def _interrupt_twice(child: subprocess.Popen[str]) -> str:
    """What it says on standard error until it ends."""
    assert child.stderr is not None
    child.send_signal(signal.SIGINT)
    child.stderr.readline()  # that it is ending: the first one has arrived
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=ENDS_S)
    return said


def test_a_second_interrupt_ends_a_loop_whose_tasks_cannot_be_cancelled_and_all_that_was_started(
    tmp_path: Path,
) -> None:
    code = f"""{BEGIN}{CLUSTER}{NEVER_ENDS}
at_hard_end(lambda: 1 / 0)
at_hard_end((here / "done").touch)
at_hard_end((here / "forgotten").touch)()
with second_interrupt_ends():
    with second_interrupt_ends():  # once is enough
        asyncio.run(main())
"""
    child = _start(code, str(tmp_path))
    assert len(processes_of(str(tmp_path / "cluster"))) == 1
    said = _interrupt_twice(child)
    assert child.returncode == EXIT_INTERRUPTED
    assert "ending at once" in said
    assert "ZeroDivisionError" in said
    assert processes_of(str(tmp_path / "cluster")) == []
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_a_process_that_unwinds_by_itself_is_left_to_do_so(tmp_path: Path) -> None:
    code = f"""{BEGIN}
at_hard_end((here / "hard").touch)
async def main():
    print("ready", flush=True)
    await asyncio.sleep(3600)
try:
    with second_interrupt_ends():
        asyncio.run(main())
finally:
    (here / "own").touch()
"""
    child = _start(code, str(tmp_path))
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=ENDS_S)
    assert child.returncode != EXIT_INTERRUPTED
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_who_has_the_wake_up_descriptor_keeps_it_and_signals_that_came_before_do_not_count(tmp_path: Path) -> None:
    code = f"""{BEGIN}
import os, signal
signal.signal(signal.SIGINT, lambda *_: None)
with second_interrupt_ends():
    os.kill(os.getpid(), signal.SIGINT)
with second_interrupt_ends():
    os.kill(os.getpid(), signal.SIGINT)

async def main():

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    with second_interrupt_ends():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
asyncio.run(main())
print("ready", flush=True)
"""
    child = _start(code, str(tmp_path))
    child.communicate(timeout=ENDS_S)
    assert child.returncode == 0
