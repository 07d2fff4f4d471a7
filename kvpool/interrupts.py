"""A second Ctrl-C ends the process within seconds, whatever it is in the middle of, and nothing it started stays.

The first one unwinds as Python does it. The second one may not be able to: it raises KeyboardInterrupt wherever the
main thread is, and when that is between asyncio's taking a callback and running it, the callback is lost, its task is
never woken, and `asyncio.run` waits for it without a limit (two of a hundred times when the loop is busy). So signals
are counted on a thread of their own, which the interpreter's C handler wakes; it leaves the main thread `GRACE_S` to
unwind, then does what is registered here and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator

GRACE_S = 3.0
"""After the second signal; a third one ends it."""
PATIENCE_S = 1.0
"""Whoever has not ended so long after the first signal is told what a second one does."""
LAST_S = 8.0
"""After the second signal the process ends even if what is registered does not."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
_COUNTED = (signal.SIGINT, signal.SIGTERM)

_last_steps: dict[object, Callable[[], object]] = {}


def at_hard_end(step: Callable[[], object]) -> Callable[[], None]:
    """Have something done before the process is ended hard, on another thread than the main one. It must be bounded and
    may find that it has been done.

    Returns:
        Forget it; may be repeated.
    """
    token = object()
    _last_steps[token] = step

    def forget() -> None:
        _last_steps.pop(token, None)

    return forget


@contextlib.contextmanager
def second_interrupt_ends() -> Iterator[None]:
    """Inside, a second SIGINT or SIGTERM ends the process, even if this is left meanwhile.

    Does nothing off the main thread, inside itself, and where somebody else has Python's wake-up descriptor, such as an
    event loop with signal handlers of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    other = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if other != -1:
        signal.set_wakeup_fd(other)
        os.close(read)
        os.close(write)
        yield
        return
    watch = threading.Thread(target=_watch, args=(read,), name="kvpool-interrupts", daemon=True)
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        os.close(write)  # the thread reads what is there, then the end


def _watch(read: int) -> None:
    """Count signals until nobody can send any more, or the second."""
    seen, told = 0, False
    with open(read, "rb", buffering=0) as pipe:
        while True:
            waits = seen == 1 and not told
            if waits and not select.select([pipe], [], [], PATIENCE_S)[0]:
                _say("ending, which can take some seconds; Ctrl-C again ends at once")
                told = True
                continue
            numbers = pipe.read(64)
            if not numbers:
                return
            seen += sum(number in _COUNTED for number in numbers)
            if seen >= 2:
                faulthandler.dump_traceback_later(LAST_S, exit=True)
                _wait_for_a_third(pipe.fileno())
                _end()


def _wait_for_a_third(pipe: int) -> None:
    """A descriptor that ended has no third; then the time is waited for."""
    if select.select([pipe], [], [], GRACE_S)[0] and not os.read(pipe, 64):
        threading.Event().wait(GRACE_S)


def _end() -> None:
    _say("ending at once")
    for step in tuple(_last_steps.values()):
        try:
            step()
        except Exception as error:  # noqa: BLE001 (the others are to be done all the same)
            _say(f"could not clean up: {type(error).__name__}: {error}")
    os._exit(EXIT_INTERRUPTED)


def _say(line: str) -> None:
    """Past all buffers and locks, which the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"· {line}\n".encode())
