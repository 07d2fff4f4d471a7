"""`router.kernel` as machine code. The only place that knows numba, and nobody who does not decide loads it.

The first process on a machine compiles (seconds), later ones load what it kept beside the source, or in the user's
cache directory (a fraction of a second). Whoever serves requests calls `kernels` before the first; signatures are
stated, so no call compiles later. Processes may compile at the same time: each writes a file of its own and renames it.
Where nothing can be kept every process compiles for itself; what was kept and is not as it was written is replaced, and
so is what was made of other sources: numba looks at the file of the compiled function only, not at what it inlines.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import pickle
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from router import kernel, kernel_stripes, prices

log = logging.getLogger(__name__)

SOURCES = (prices, kernel, kernel_stripes)
"""Modules whose functions become machine code."""

LOOPS: tuple[Callable[..., Any], ...] = (
    kernel.score_redo,
    kernel.best_load,
    kernel.first_holders,
    kernel_stripes.stripes_reach,
    kernel_stripes.best_stripes,
)

INLINED = tuple(
    function
    for module in SOURCES
    for _, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and function not in LOOPS
)
"""What the loops call."""

_NOT_KEPT = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    ImportError,
    TypeError,
    pickle.PickleError,
)
"""What reading or writing the cache may raise, damaged files included; if it was the function itself, the second
attempt says so."""

_TABLE, _LIST = "float64[:,::1]", "float64[::1]"
_REDO = f"({_TABLE}, {_TABLE}, {_TABLE}, {_LIST})"
_LOAD = f"({_TABLE}, {_TABLE}, {_TABLE}, {_LIST}, {_TABLE}, int64, float64, float64, int64)"
_FIRST = f"({_TABLE}, int64[::1], {_LIST}, float64)"
_REACH = f"({_TABLE}, {_TABLE}, {_TABLE}, {_LIST}, {_TABLE}, {_LIST}, float64, int64)"
_STRIPES = f"({_TABLE}, {_TABLE}, {_TABLE}, {_LIST}, {_TABLE}, {_TABLE}, {_TABLE}, {_TABLE}, {_LIST}, {_LIST}, float64)"


class Kernels(NamedTuple):
    """See the functions of these names in `router.kernel` and `router.kernel_stripes`."""

    score_redo: Callable[..., Any]
    best_load: Callable[..., Any]
    first_holders: Callable[..., Any]
    stripes_reach: Callable[..., Any]
    best_stripes: Callable[..., Any]


@cache
def kernels() -> Kernels:
    """The compiled loops. Slow only the first time in a process."""
    from numba import config
    from numba.extending import register_jitable

    if config.DISABLE_JIT:
        log.warning("NUMBA_DISABLE_JIT is set, so decisions run as plain Python, which is much slower; unset it")
        return Kernels(*LOOPS)
    for scalar in INLINED:
        register_jitable(scalar)
    signatures = (_REDO, _LOAD, _FIRST, _REACH, _STRIPES)
    return Kernels(*(compile_loop(loop, signature) for loop, signature in zip(LOOPS, signatures, strict=True)))


def compile_loop(function: Callable[..., Any], signature: str) -> Callable[..., Any]:
    """A function as machine code for these arguments, from what an earlier process kept where possible."""
    from numba import njit

    try:
        _remove_damaged(function)
        made = njit(signature, cache=True, error_model="numpy")(function)
        with contextlib.suppress(OSError):  # without a sum, or when another process replaces it now, the next compiles
            for path in _kept(function):
                _sum_of(path).write_bytes(_crc(path))
    except _NOT_KEPT as error:
        log.warning("compiling %s without a cache: %s: %s", function.__name__, type(error).__name__, error)
        return njit(signature, error_model="numpy")(function)  # type: ignore[no-any-return]
    return made  # type: ignore[no-any-return]


def _remove_damaged(function: Callable[..., Any]) -> None:
    """Remove what was kept of a function when a part of it is not what was written: numba has no checksums, and code
    with a hole in it ends the process, at every start."""
    kept = _kept(function)
    if all(_sum_of(path).is_file() and _sum_of(path).read_bytes() == _crc(path) for path in kept):
        return
    log.warning(
        "what was kept of %s is damaged, unfinished or of other sources, it is compiled anew", function.__name__
    )
    for path in kept:
        path.unlink(missing_ok=True)


def _kept(function: Callable[..., Any]) -> list[Path]:
    """The files that numba keeps of a function.

    Raises:
        RuntimeError: there is nowhere to keep them.
    """
    from numba import njit

    folder = Path(njit(cache=True)(function).stats.cache_path)
    return sorted(folder.glob(f"{Path(inspect.getfile(function)).stem}.{function.__qualname__}-*.nb[ic]"))


def _sum_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.crc")


def _crc(path: Path) -> bytes:
    """Of a file, and of the sources of all loops."""
    return b"%08x" % zlib.crc32(path.read_bytes(), _sources())


@cache
def _sources() -> int:
    made = 0
    for module in SOURCES:
        made = zlib.crc32(inspect.getsource(module).encode(), made)
    return made
