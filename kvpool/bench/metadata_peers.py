"""Peers of benchmarks, each in a Python of its own: Dynamo's radix tree and Mooncake's master for the metadata,
Mooncake's store and NIXL for transfers.

A peer is used when its package is importable here, or when a variable names a Python that has it:
``KVPOOL_DYNAMO_PYTHON`` (package ``ai-dynamo-runtime``), ``KVPOOL_MOONCAKE_PYTHON`` (package
``mooncake-transfer-engine-non-cuda``, which needs Debian's ``libibverbs1`` and ``libnuma1``), ``KVPOOL_NIXL_PYTHON``
(package ``nixl``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from kvpool.errors import UnavailableError

_SCRIPT = Path(__file__).with_name("metadata_peer_script.py")
_STOP_TIMEOUT_S = 30.0


class PeerScript:
    """A running peer. Use as a context manager.

    Args:
        name: of a package that the script drives.
        arguments: for the script.
        script: what to run; it speaks like `metadata_peer_script`.

    Raises:
        UnavailableError: it is not installed or did not start; the message says so.
    """

    def __init__(self, name: str, *arguments: int | str, script: Path = _SCRIPT) -> None:
        python = peer_python(name)
        command = [python, str(script), name, *map(str, arguments)]
        self._name = name
        self._script = script
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            self._answer()
        except UnavailableError:
            self.close()
            raise

    def __enter__(self) -> PeerScript:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, command: str) -> float:
        """Run a command once; returns what it measured."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return float(self._answer()["value"])

    def close(self) -> None:
        """End it. May be repeated."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UnavailableError(f"{self._name} is installed but failed; run {self._script.name} by hand to see why")
        answer: dict[str, float] = json.loads(line)
        return answer


def peer_python(name: str) -> str:
    """The Python that has a peer's package.

    Raises:
        UnavailableError: none does; the message says what to set.
    """
    variable = f"KVPOOL_{name.upper()}_PYTHON"
    python = os.environ.get(variable)
    if python:
        return python
    if importlib.util.find_spec(name) is not None:
        return sys.executable
    raise UnavailableError(f"not installed; set {variable} to a Python that has it")
