"""Keeps what a router learned in a file, so that a restarted router does not begin with guesses.

One file a router in the cluster's directory: a header line with format, moment and checksum, then JSON. Written to a
neighbour and renamed, at a bounded rate and only when something was learned; read once, at the start. A file that
is missing, old, cut, altered or of another format means priors, and is named in the status. Losing it costs accuracy
until the next reports, never a request. Decides nothing.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.wallclock import unix_ns

FORMAT = "kvpool-learned/1"
FILE_NAME = "router-learned"
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_AGE_NS = 3600 * 1_000_000_000
"""Links an hour ago say little about links now, and prefill speeds come with the members' calibration."""
SAVE_PERIOD_S = 2.0
SAVE_SHARE = 0.02
"""Of the time at most, however large the state is."""
STOP_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class UnusableFile(ValueError):
    """There is a file, and it cannot be used; the text says why."""


def write_learned(path: Path, learned: dict[str, Any], now_unix_ns: int) -> None:
    """Replace the file.

    Raises:
        OSError: it could not be written; the old one stays.
    """
    body = json.dumps(learned).encode()
    header = json.dumps({"format": FORMAT, "at_unix_ns": now_unix_ns, "crc32": zlib.crc32(body)}).encode()
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(header + b"\n" + body)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def read_learned(path: Path, now_unix_ns: int) -> tuple[dict[str, Any], int]:
    """What `write_learned` wrote, and its age in nanoseconds.

    Raises:
        FileNotFoundError: there is none.
        UnusableFile: old, cut, altered, or of another format.
        OSError: it cannot be read.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UnusableFile("it is larger than any router writes")
    first, _, body = path.read_bytes().partition(b"\n")
    try:
        header = json.loads(first)
        if header["format"] != FORMAT:
            raise UnusableFile(f"it has format {header['format']!r:.40}, not {FORMAT!r}")
        if header["crc32"] != zlib.crc32(body):
            raise UnusableFile("its checksum differs")
        age_ns = max(0, now_unix_ns - int(header["at_unix_ns"]))
        learned = json.loads(body)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, UnusableFile):
            raise
        raise UnusableFile("it is cut or altered") from error
    if age_ns > MAX_AGE_NS:
        raise UnusableFile(f"it is {age_ns / 60e9:.0f} minutes old")
    if not isinstance(learned, dict):
        raise UnusableFile("it is cut or altered")
    return learned, age_ns


class Keeper:
    """Restores at once, saves from a thread of its own until `stop`.

    Args:
        directory: of the cluster; None or one that does not exist here (the router runs on another node now) keeps
            nothing.
        learned: what to save, and a number that grows with it; called from the keeper's thread.
        restore: takes what was saved and its age; False when it cannot use it.
        file_name: of this router's file; no other router may write it.
    """

    def __init__(
        self,
        directory: Path | None,
        learned: Callable[[], tuple[int, dict[str, Any]]],
        restore: Callable[[dict[str, Any], int], bool],
        *,
        file_name: str = FILE_NAME,
    ) -> None:
        self._path = directory / file_name if directory is not None and directory.is_dir() else None
        self._learned = learned
        self._stopping = threading.Event()
        self._saved_number = 0
        self._saves = self._failures = 0
        self._started_from = "priors: the cluster's directory is not on this node"
        if self._path is None:
            return
        self._started_from = self._restore(self._path, restore)
        self._thread = threading.Thread(target=self._run, name="kvpool-keeper", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Where it began, and how saving goes."""
        return {"started_from": self._started_from, "saves": self._saves, "save_failures": self._failures}

    def stop(self) -> None:
        """Save a last time and end. May be repeated."""
        self._stopping.set()
        if self._path is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def _restore(self, path: Path, restore: Callable[[dict[str, Any], int], bool]) -> str:
        try:
            data, age_ns = read_learned(path, unix_ns())
        except FileNotFoundError:
            return "priors: nothing was saved yet"
        except (UnusableFile, OSError) as error:
            log.warning("%s is not used: %s", path, error)
            return f"priors: the saved file is not used, {error}"
        if not restore(data, age_ns):
            return "priors: the saved file is of another version or makes no sense"
        return f"saved state, {age_ns / 1e9:.0f} s old"

    def _run(self) -> None:
        pause_s = SAVE_PERIOD_S
        while not self._stopping.wait(pause_s):
            start_s = time.monotonic()
            self._save()
            pause_s = max(SAVE_PERIOD_S, (time.monotonic() - start_s) / SAVE_SHARE)
        self._save()

    def _save(self) -> None:
        assert self._path is not None
        number, data = self._learned()
        if number == self._saved_number:
            return
        try:
            write_learned(self._path, data, unix_ns())
        except OSError as error:
            self._failures += 1
            if self._failures == 1:
                log.warning("what the router learned could not be saved: %s", error)
            return
        self._saved_number = number
        self._saves += 1
