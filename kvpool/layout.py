"""KV groups by attention kind: how many bytes a prefix is, and what must move.  (pure)

A model is described by groups of layers that share one attention kind and one block table. Formulas and the table
of kinds: ``docs/science.md`` is not needed to read this file; sources are in the docstrings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from kvpool.errors import RequestError


class AttentionKind(Enum):
    """What a layer keeps of the past."""

    FULL = "full"  # MHA / GQA / MQA
    LATENT = "latent"  # MLA
    SLIDING = "sliding"  # SWA
    SPARSE = "sparse"  # DSA, NSA, MoBA: whole prefix kept, read in part
    LINEAR = "linear"  # state-space, linear attention: a fixed state


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one attention kind.

    Attributes:
        kind: attention kind.
        layers: number of layers.
        entry_bytes: bytes of one entry of one layer.
        entry_tokens: tokens per entry (above 1 for compressed entries).
        window: tokens of the window, None when everything is kept.
        sinks: first tokens that are kept besides the window.
        fixed_bytes: bytes of all layers that do not grow with tokens (states).
        selector_bytes: bytes per entry and layer of index keys that choose what is read.
        top_k: entries read per step, None for all.
    """

    kind: AttentionKind
    layers: int
    entry_bytes: int
    entry_tokens: int = 1
    window: int | None = None
    sinks: int = 0
    fixed_bytes: int = 0
    selector_bytes: int = 0
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of a model's KV in blocks.

    Attributes:
        model: name and revision.
        dtype: element type of the KV.
        block_tokens: tokens per block, a multiple of every group's ``entry_tokens``.
        groups: at least one.
    """

    model: str
    dtype: str
    block_tokens: int
    groups: tuple[KVGroup, ...]

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise RequestError(f"block_tokens must be at least 1, got {self.block_tokens}", field="block_tokens")
        if not self.groups:
            raise RequestError("a layout needs at least one KV group", field="groups")

    @property
    def block_bytes(self) -> int:
        """Bytes of one full block over all groups."""
        return sum(
            group.layers * (group.entry_bytes + group.selector_bytes) * self.block_tokens // group.entry_tokens
            for group in self.groups
        )

    def fingerprint(self) -> str:
        """Digest of everything that decides whether two workers can exchange blocks, 16 hex digits."""
        return blake2b(repr(self).encode(), digest_size=8).hexdigest()
