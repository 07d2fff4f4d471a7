"""The only calls into NIXL: agents, registered memory, READs; with our errors instead of NIXL's.

An agent belongs to one thread. It has no progress thread of its own: NIXL's polls all the time, a third of a core on an
idle worker. Reads move while their state is asked for, and what serves them needs no progress at all.

`Agent.destroy` is the fence. Releasing a handle, removing the peer or deregistering memory is none: bytes were seen to
land after each of them. UCX's TCP transports are left out of every context, because a one-sided READ over TCP can abort
the *owner's* process when its reader dies; measured in 7 of 10 runs. Over CMA and RDMA the owner takes no part.

NIXL brings a UCX of its own. Beside ucxx's in one process it works; a process that ends while agents exist may crash
in UCX's destructors, so every agent is destroyed before.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.errors import (
    ConfigError,
    IncompatibleError,
    KVPoolError,
    PeerGoneError,
    TransferCancelledError,
    TransferError,
)

WITHOUT_TCP = "TLS=^tcp"
_DRAM = "DRAM"

MAPPING: Mapping[str, type[KVPoolError]] = {
    "nixlBackendError": TransferError,
    "nixlCancelledError": TransferCancelledError,
    "nixlInvalidParamError": TransferError,
    "nixlMismatchError": TransferError,
    "nixlNoTelemetryError": TransferError,
    "nixlNotAllowedError": TransferError,
    "nixlNotFoundError": IncompatibleError,  # no transport that both ends have
    "nixlNotPostedError": TransferError,
    "nixlNotSupportedError": IncompatibleError,
    "nixlRemoteDisconnectError": PeerGoneError,
    "nixlRepostActiveError": TransferError,
    "nixlUnknownError": TransferError,
}
"""Every exception of NIXL; a test lists NIXL's and fails on an unmapped one."""


def installed() -> bool:
    """Whether NIXL can be imported."""
    return importlib.util.find_spec("nixl") is not None


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to read: where they lie in the owner's process, and where they go in the reader's segment."""

    address: int
    offset: int
    size_bytes: int


class Agent:
    """One NIXL agent over one registered segment.

    Args:
        name: unique among the agents that meet.
        segment: flat, writable; must outlive the agent.

    Raises:
        ConfigError: NIXL is not installed.
        KVPoolError: it cannot be initialised.
    """

    def __init__(self, name: str, segment: memoryview) -> None:
        self._api = _load()
        self._foreign = _foreign(self._api)
        self._memory = np.frombuffer(segment, dtype=np.uint8)
        self.base = int(self._memory.ctypes.data)
        self._remote: Any = None
        self._agent: Any = None
        try:
            config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = self._api.nixl_agent(name, config)
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": "none", "engine_config": WITHOUT_TCP})
            self._registered = self._agent.register_memory([(self.base, len(segment), 0, "")], _DRAM)
        except self._foreign as error:
            raise self._ours(error, "creating a NIXL agent", "self") from error

    def metadata(self) -> bytes:
        """What another agent needs to read from this one."""
        try:
            return bytes(self._agent.get_agent_metadata())
        except self._foreign as error:
            raise self._ours(error, "describing the segment", "self") from error

    def connect(self, metadata: bytes, peer: str) -> None:
        """Get ready to read from one other agent.

        Raises:
            IncompatibleError: the two share no transport but TCP, or the metadata is not NIXL's.
        """
        try:
            self._remote = self._agent.add_remote_agent(metadata)
        except self._foreign as error:
            raise IncompatibleError(
                f"NIXL cannot reach {peer} without TCP, over which a READ may kill its owner; use the ucx transport",
                peer=peer,
                nixl=type(error).__name__,
            ) from error

    def read(self, pieces: Sequence[Piece], peer: str) -> Transfer:
        """Start a READ from the connected agent. Over CMA it is over when this returns.

        Raises:
            KVPoolError: the peer is gone, or a piece lies outside what it registered.
        """
        here = np.array([(self.base + piece.offset, piece.size_bytes, 0) for piece in pieces], dtype=np.uint64)
        there = np.array([(piece.address, piece.size_bytes, 0) for piece in pieces], dtype=np.uint64)
        try:
            local = self._agent.get_xfer_descs(here, _DRAM)
            remote = self._agent.get_xfer_descs(there, _DRAM)
            handle = self._agent.initialize_xfer("READ", local, remote, self._remote)
            state = self._agent.transfer(handle)
        except self._foreign as error:
            raise self._ours(error, "reading", peer) from error
        return Transfer(self, handle, state, peer)

    def destroy(self) -> None:
        """Nothing lands any more when this returns; takes up to some seconds. May be repeated.

        Raises:
            TransferError: NIXL did not say that it is so.
        """
        agent, self._agent = self._agent, None
        if agent is None:
            return
        try:
            del self._registered
            del agent
        except self._foreign as error:
            raise self._ours(error, "destroying an agent", "self") from error

    def _ours(self, error: BaseException, doing: str, peer: str) -> KVPoolError:
        ours = MAPPING.get(type(error).__name__, TransferError)
        mapped = ours(f"{doing} failed: {error}", peer=peer, nixl=type(error).__name__)
        mapped.__cause__ = error.with_traceback(None)  # its frames would keep the agent alive, and it is the fence
        return mapped


class Transfer:
    """A READ that was started."""

    def __init__(self, agent: Agent, handle: Any, state: str, peer: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state
        self._peer = peer

    def done(self) -> bool:
        """Move it on; True when every byte is in place.

        Raises:
            TransferError: it failed. Bytes may land until the agent is destroyed.
        """
        agent = self._agent
        try:
            if self._state == "PROC":
                self._state = agent._agent.check_xfer_state(self._handle)
        except agent._foreign as error:
            raise agent._ours(error, "reading", self._peer) from error
        if self._state not in ("PROC", "DONE"):
            raise TransferError(f"a READ ended as {self._state}", peer=self._peer)
        return bool(self._state == "DONE")

    def release(self) -> None:
        """Forget a READ that is done."""
        try:
            self._agent._agent.release_xfer_handle(self._handle)
        except self._agent._foreign as error:
            raise self._agent._ours(error, "releasing a READ", self._peer) from error


def _load() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # a lost peer is a typed error here; read when NIXL is loaded
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError("the nixl transport needs NIXL: pip install 'kvpool[nixl]'", field="transport") from error


def _foreign(api: Any) -> tuple[type[BaseException], ...]:
    """What calls into NIXL may raise: its own classes, and C++ exceptions as RuntimeError or ValueError."""
    own = (getattr(api.nixlBind, name, None) for name in MAPPING)
    return (*(cls for cls in own if cls is not None), RuntimeError, ValueError, KeyError)
