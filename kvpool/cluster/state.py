"""Clusters started by ``kvpool up``, remembered in one small file each so that other commands find them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from kvpool.errors import ConfigError, KVPoolError, RequestError, UnavailableError
from kvpool.jsontext import parse_json

DEFAULT_NAME = "default"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Where a running cluster is.

    Attributes:
        name: its name on this machine.
        address: Ray address (``host:port``) that clients connect to.
        metadata: addresses of the metadata servers.
        pid: the supervisor process.
        pid_created_s: when that process was created, so that a reused pid is not taken for it.
        cluster_dir: directory of its temporary files and logs.
        ray_token: what Ray asks drivers for, empty when the user set up authentication.
    """

    name: str
    address: str
    metadata: tuple[str, ...]
    pid: int
    pid_created_s: float
    cluster_dir: str
    ray_token: str = ""

    @property
    def alive(self) -> bool:
        """The supervisor still runs."""
        return process_alive(self.pid, self.pid_created_s)


def process_alive(pid: int, created_s: float) -> bool:
    """The very process that had ``pid`` at ``created_s`` still runs."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - created_s) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(words: str, name: str, address: str | None = None) -> str:
    """The ``kvpool`` command that does ``words`` to cluster ``name``, as hints print it."""
    where = "" if address is None else f" --address {address}"
    return f"kvpool {words}{where}" + ("" if name == DEFAULT_NAME else f" --name {name}")


def state_path(name: str) -> Path:
    """The file of cluster ``name``.

    Raises:
        RequestError: the name has characters a file name should not have.
    """
    if not name or not all(char.isalnum() or char in "-_" for char in name):
        raise RequestError(f"cluster name {name!r}: use letters, digits, '-' and '_'", field="name")
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "kvpool" / f"{name}.json"


def write_state(state: ClusterState) -> None:
    """Write the state of a cluster atomically, readable by its owner only.

    Raises:
        ConfigError: it cannot be written there.
    """
    _write(state_path(state.name), json.dumps(asdict(state)))


def require_writable(name: str) -> None:
    """Check that `write_state` will be able to, before anything expensive is started.

    Raises:
        ConfigError: it cannot be written there.
    """
    probe = state_path(name).with_suffix(f".{os.getpid()}.probe")
    _write(probe, json.dumps({}))
    probe.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}, by which commands find the cluster: {error.strerror}; make room there, or set "
            "XDG_STATE_HOME to a directory of yours"
        ) from error


def read_state(name: str = DEFAULT_NAME) -> ClusterState | None:
    """State of a running cluster, None when there is none. A file left by a dead supervisor is removed."""
    path = state_path(name)
    try:
        state = _parsed(parse_json(path.read_bytes()))
        alive = state.alive
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, psutil.Error) as error:
        raise UnavailableError(f"cannot read {path}: {error}; remove it if no cluster runs") from error
    if alive:
        return state
    path.unlink(missing_ok=True)
    return None


def _parsed(data: Any) -> ClusterState:
    state = ClusterState(**{**data, "metadata": tuple(data["metadata"])})
    texts = (state.name, state.address, state.cluster_dir, state.ray_token, *state.metadata)
    numbers = isinstance(state.pid, int) and isinstance(state.pid_created_s, int | float)
    if not numbers or not all(isinstance(text, str) for text in texts):
        raise ValueError("a value has another type than its name says")
    return state


def remove_state(name: str) -> None:
    """Forget a cluster. May be repeated."""
    state_path(name).unlink(missing_ok=True)


def claim(name: str) -> socket.socket:
    """Be the one process that starts or runs cluster ``name`` here, for as long as the result stays open.

    It is a name in the kernel, not a file, so nothing is left of it however the process ends.

    Raises:
        RequestError: another process has it.
    """
    digest = hashlib.blake2b(str(state_path(name).resolve()).encode(), digest_size=16).hexdigest()
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claimed.bind(f"\0kvpool-{os.getuid()}-{digest}")
    except OSError as error:
        claimed.close()
        raise RequestError(
            f"cluster {name!r} is starting, running or ending already; wait for it, end it with "
            f"'{command('down', name)}', or start another one with --name",
            field="name",
        ) from error
    return claimed


def all_states() -> list[ClusterState]:
    """Every running cluster that ``kvpool up`` started here. A file that cannot be read is none of them."""
    found = []
    for path in state_path(DEFAULT_NAME).parent.glob("*.json"):
        try:
            found.append(read_state(path.stem))
        except KVPoolError as error:
            log.warning("%s", error)
    return [state for state in found if state is not None]
