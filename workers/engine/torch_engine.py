"""The embedded engine: Hugging Face model code on PyTorch, CPU or CUDA, over dense views and block-major pages.

A step packs its slices into one forward ``[1, total tokens]`` with per-token positions and no transformers cache.
Attention (`workers.engine.attention`) writes K/V straight into the views; logits are computed only for the slices
that want a token. The engine does not schedule, allocate blocks, or know which positions of a view are filled.

Numerics: a step whose logits are not finite raises `NumericsError` that names the slots in its details
(``slots``, comma-separated). A step may be repeated: running the same slices again writes the same K/V, so the
caller ends the named requests and steps again with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvpool.errors import CapacityError, InvariantViolation, ModelError, NumericsError
from kvpool.layout import KVLayout
from kvpool.request import TokenLogprobs
from kvpool.types import BlockId
from workers.engine.architecture import parse_dtype, read_shape, refused
from workers.engine.attention import ATTENTION_NAME, STEP_ARGUMENT, SliceViews, Step, register_attention, slice_views
from workers.engine.base import SequenceSlice
from workers.engine.models import quiet_progress
from workers.engine.probe import check_model
from workers.engine.views import (
    ViewPool,
    ViewShape,
    allocate_pages,
    gather_pages,
    load_pages,
    map_pages,
    scatter_pages,
    store_pages,
)
from workers.sampling import sample

SPARE_VIEW_BYTES = 1 << 30
"""Closed views kept for reuse."""


class TorchEngine:
    """Implements `workers.engine.base.Engine`. One thread calls it.

    Args:
        path: a Hugging Face model directory (`workers.engine.models.resolve_model`).
        model_id: name and revision for the layout; the directory's name when None.
        dtype: dtype of weights and KV, see `workers.engine.architecture.DTYPES`.
        device: torch device, for example ``cpu`` or ``cuda:0``.
        block_tokens: tokens per block.
        torch_threads: intra-op threads of this *process*; None leaves them as they are.

    Raises:
        ModelError: the model cannot be read, its architecture is not served, or the device does not exist.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        model_id: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        block_tokens: int = 16,
        torch_threads: int | None = None,
    ) -> None:
        path = Path(path)
        if torch_threads is not None:
            torch.set_num_threads(torch_threads)
        self._dtype = parse_dtype(dtype)
        self._device = _parse_device(device)
        config = _read_config(path)
        self._shape = read_shape(config)
        self._layout = self._shape.layout(model=model_id or path.name, dtype=dtype, block_tokens=block_tokens)
        self._view_shape = ViewShape(
            layers=self._shape.layers,
            kv_heads=self._shape.kv_heads,
            head_dim=self._shape.head_dim,
            block_tokens=block_tokens,
        )
        self._model: Any = _load_model(path, config, self._shape.architecture, dtype=self._dtype).to(self._device)
        with torch.inference_mode():
            check_model(self._model, self._shape, self._view_shape)
        self._eos_token_ids = _eos_token_ids(path, config)
        self._pool = ViewPool(self._view_shape, dtype=self._dtype, device=self._device, spare_bytes=SPARE_VIEW_BYTES)
        self._views: dict[int, torch.Tensor] = {}
        self._next_slot = 0
        self._pages: torch.Tensor | None = None
        self._device_pages: torch.Tensor | None = None

    @property
    def layout(self) -> KVLayout:
        """Layout of the KV this engine computes."""
        return self._layout

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output the model allows."""
        return self._shape.max_context_tokens

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a generation, from generation config and config."""
        return self._eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return self._shape.vocab_size

    def attach_pages(self, memory: memoryview, num_blocks: int) -> None:
        """Use ``memory`` as pages until `shutdown`; the caller keeps owning it and closes it only after that.

        Raises:
            InvariantViolation: the memory is read-only or not ``num_blocks * layout.block_bytes`` bytes.
        """
        self._pages = map_pages(memory, self._view_shape, num_blocks, self._dtype)

    def attach_device_pages(self, num_blocks: int) -> None:
        """Allocate pages on the engine's device, kept until `shutdown`.

        Raises:
            CapacityError: no memory for them.
        """
        self._device_pages = allocate_pages(self._view_shape, num_blocks, dtype=self._dtype, device=self._device)

    def open(self, capacity_tokens: int) -> int:
        """Open a sequence; on the CPU its view costs memory only for tokens that are written.

        Raises:
            CapacityError: longer than the model allows, or no memory.
        """
        if not 1 <= capacity_tokens <= self.max_context_tokens:
            raise CapacityError(
                f"a sequence of {capacity_tokens} tokens does not fit the model's context of "
                f"{self.max_context_tokens} tokens; shorten the prompt or max_tokens"
            )
        slot = self._next_slot
        self._views[slot] = self._pool.take(capacity_tokens)
        self._next_slot += 1
        return slot

    def close(self, slot: int) -> None:
        """Drop a sequence's view; its memory serves later sequences."""
        self._pool.give_back(self._view(slot))
        del self._views[slot]

    @torch.inference_mode()
    def load_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        """Copy pages into the view: page ``block_ids[i]`` becomes block ``first_block + i`` of the sequence."""
        load_pages(self._view(slot), _checked(self._pages, block_ids), first_block, block_ids)

    @torch.inference_mode()
    def store_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        """Copy full blocks of the view into pages, the inverse of `load_blocks`."""
        store_pages(self._view(slot), _checked(self._pages, block_ids), first_block, block_ids)

    @torch.inference_mode()
    def load_device_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        """`load_blocks` from pages on the device. On an accelerator the copy is ordered with the steps by its stream,
        and nothing waits for it."""
        copy = load_pages if self._device.type == "cpu" else gather_pages
        copy(self._view(slot), _checked(self._device_pages, block_ids), first_block, block_ids)

    @torch.inference_mode()
    def store_device_blocks(self, slot: int, first_block: int, block_ids: Sequence[BlockId]) -> None:
        """`store_blocks` into pages on the device, the inverse of `load_device_blocks`."""
        copy = store_pages if self._device.type == "cpu" else scatter_pages
        copy(self._view(slot), _checked(self._device_pages, block_ids), first_block, block_ids)

    @torch.inference_mode()
    def step(self, batch: Sequence[SequenceSlice]) -> list[TokenLogprobs | None]:
        """Compute every slice, appending its KV to its view; one entry a slice, None where ``sampling`` is None.

        May be repeated with the same slices. Cost is one forward over the sum of the slices' tokens.

        Raises:
            NumericsError: logits of some slices are not finite; details name their slots.
            InvariantViolation: no slices, an unknown slot, a slot named twice, a slice beyond its view,
                or a token id outside the vocabulary.
        """
        self._check_batch(batch)
        slices, last_rows = self._cut(batch)
        tokens = [token for part in batch for token in part.tokens]
        positions = [position for part in batch for position in range(part.start, part.start + len(part.tokens))]
        logits = self._model(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            logits_to_keep=torch.tensor(last_rows, dtype=torch.long, device=self._device),
            **{STEP_ARGUMENT: Step(slices=slices, window_tokens=self._shape.window_tokens)},
        ).logits
        return _choose(batch, logits[0].float().cpu().numpy())

    def shutdown(self) -> None:
        """Free weights and views and let go of the pages. May be repeated."""
        self._model = None
        self._views.clear()
        self._pool.clear()
        self._pages = self._device_pages = None

    def _view(self, slot: int) -> torch.Tensor:
        view = self._views.get(slot)
        if view is None:
            raise InvariantViolation(f"slot {slot} is not open")
        return view

    def _check_batch(self, batch: Sequence[SequenceSlice]) -> None:
        if not batch or any(not part.tokens for part in batch):
            raise InvariantViolation("a step needs at least one slice, a slice at least one token")
        if len({part.slot for part in batch}) != len(batch):
            raise InvariantViolation("a slot appears twice in one step")
        for part in batch:
            stop, capacity = part.start + len(part.tokens), self._view(part.slot).shape[3]
            if part.start < 0 or stop > capacity:
                raise InvariantViolation(f"slice [{part.start}, {stop}) leaves its view of {capacity} tokens")
            if min(part.tokens) < 0 or max(part.tokens) >= self.vocab_size:
                raise InvariantViolation(f"slot {part.slot} has token ids outside [0, {self.vocab_size})")

    def _cut(self, batch: Sequence[SequenceSlice]) -> tuple[tuple[SliceViews, ...], list[int]]:
        """Views of every slice, and the packed rows whose logits are wanted."""
        slices: list[SliceViews] = []
        last_rows: list[int] = []
        row = 0
        for part in batch:
            stop = part.start + len(part.tokens)
            slices.append(
                slice_views(
                    self._views[part.slot],
                    row_begin=row,
                    start=part.start,
                    stop=stop,
                    window_tokens=self._shape.window_tokens,
                )
            )
            row += len(part.tokens)
            if part.sampling is not None:
                last_rows.append(row - 1)
        return tuple(slices), last_rows


def _checked(pages: torch.Tensor | None, block_ids: Sequence[BlockId]) -> torch.Tensor:
    """The pages, if these are some of them."""
    if pages is None:
        raise InvariantViolation("no pages are attached")
    if block_ids and (min(block_ids) < 0 or max(block_ids) >= pages.shape[0]):
        raise InvariantViolation(f"block ids must be in [0, {pages.shape[0]}), got {list(block_ids)}")
    return pages


def _choose(batch: Sequence[SequenceSlice], logits: Any) -> list[TokenLogprobs | None]:
    """One token for every slice that wants one; ``logits`` has one row for each of those."""
    chosen: list[TokenLogprobs | None] = []
    broken: list[int] = []
    rows = iter(logits)
    for part in batch:
        if part.sampling is None:
            chosen.append(None)
            continue
        try:
            chosen.append(sample(next(rows), part.sampling, part.start + len(part.tokens)))
        except NumericsError:
            chosen.append(None)
            broken.append(part.slot)
    if broken:
        raise NumericsError(
            "the model produced logits that are not finite; end these requests, or serve the model in float32",
            slots=",".join(map(str, broken)),
        )
    return chosen


def _parse_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"the device {name!r} is not usable here ({error}); choose cpu or cuda", device=name
        ) from error
    return device


def _read_config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"cannot read the model in {path}: {error}. Give a Hugging Face model directory", model=str(path)
        ) from error


def _load_model(path: Path, config: Any, architecture: str, *, dtype: torch.dtype) -> Any:
    register_attention()
    try:
        with quiet_progress():
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
            )
    except KeyError as error:  # how transformers says that a class knows only its own attention code
        raise refused(architecture, f"its code has no attention interface ({error})") from error
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"cannot load {architecture} from {path}: {error}. Fetch or save the model again", model=str(path)
        ) from error
    if missing := sorted(info["missing_keys"]):  # transformers fills them with random numbers and only warns
        raise ModelError(
            f"{path} lacks {len(missing)} weights of {architecture}, {missing[0]} first. Fetch or save the model again",
            model=str(path),
        )
    return model.eval()


def _eos_token_ids(path: Path, config: Any) -> frozenset[int]:
    """End tokens of the generation config, which knows the chat end token, else of the config."""
    named: Any = None
    if (path / "generation_config.json").is_file():
        named = GenerationConfig.from_pretrained(path).eos_token_id
    if named is None:
        named = config.get_text_config(decoder=True).eos_token_id
    if named is None:
        return frozenset()
    return frozenset(named if isinstance(named, list) else [named])
