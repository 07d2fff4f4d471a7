"""The house's fences, read from the imports: who may use which library, and which package may import which."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvpool", "router", "workers")

ALLOWED = {
    "grpc": ("kvpool/metadata/",),
    "ucxx": ("kvpool/transport/",),
    "prometheus_client": ("kvpool/metrics.py", "kvpool/metadata/", "router/metrics.py"),
    "nixl": ("kvpool/transport/", "kvpool/bench/transfer_peer_script.py"),
    "lz4": ("kvpool/transport/compression.py",),
    "zstandard": ("kvpool/transport/compression.py",),
    "torch": ("workers/engine/", "workers/bridge.py", "kvpool/bench/"),
    "transformers": ("workers/engine/", "workers/bridge.py", "kvpool/bench/"),
    "vllm": ("workers/engine/",),
    "numba": ("router/compiled.py",),
    "ray": ("router/actor.py", "router/gateway.py", "workers/actor.py", "kvpool/cluster/", "kvpool/bench/"),
}
"""Where each fenced library may be imported."""

PURE = (
    "kvpool/types.py",
    "kvpool/errors.py",
    "kvpool/hashing.py",
    "kvpool/layout.py",
    "kvpool/plan.py",
    "kvpool/options.py",
    "kvpool/request.py",
    "kvpool/reports.py",
    "kvpool/text.py",
    "kvpool/metadata/index.py",
    "kvpool/metadata/pins.py",
    "kvpool/metadata/pins_wire.py",
    "kvpool/metadata/state.py",
    "kvpool/metadata/worker_totals.py",
    "kvpool/metadata/events.py",
    "kvpool/metadata/masks.py",
    "kvpool/metadata/membership.py",
    "kvpool/metadata/outbox.py",
    "kvpool/metadata/view.py",
    "kvpool/transfer/machine.py",
    "kvpool/transport/fair.py",
    "kvpool/transport/wire.py",
    "kvpool/transport/compression.py",
    "kvpool/transport/staging.py",
    "kvpool/transport/switch.py",
    "kvpool/transport/ucx/address.py",
    "kvpool/store/answers.py",
    "kvpool/store/blockfile.py",
    "kvpool/store/pool.py",
    "kvpool/store/selection.py",
    "kvpool/store/worth.py",
    "kvpool/faults/story.py",
    "kvpool/faults/measures.py",
    "kvpool/faults/checker.py",
    "kvpool/faults/report.py",
    "kvpool/faults/beside.py",
    "kvpool/store/ranges.py",
    "kvpool/cluster/merge.py",
    "kvpool/cluster/summary.py",
    "router/signals.py",
    "router/estimators.py",
    "router/cost.py",
    "router/decide.py",
    "router/ledger.py",
    "router/fit.py",
    "router/peers.py",
    "router/striping.py",
    "router/together.py",
    "router/disks.py",
    "router/fills.py",
    "router/status.py",
    "router/sizes.py",
    "router/tally.py",
    "router/admission.py",
    "router/decoding.py",
    "workers/limits.py",
    "router/scores.py",
    "router/kernel.py",
    "router/planning.py",
    "router/learned.py",
    "router/record.py",
    "workers/scheduler.py",
    "workers/block_table.py",
    "workers/gate.py",
    "workers/load_book.py",
    "workers/queue_load.py",
    "workers/sequence.py",
    "workers/step.py",
    "workers/stopping.py",
)
IMPURE_MODULES = {"time", "random", "os", "socket", "threading", "asyncio", "subprocess", "pathlib", "logging"}


def _sources() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "metadata/v1" not in path.as_posix():
                yield path


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("library", sorted(ALLOWED))
def test_fenced_libraries_stay_inside_their_fence(library: str) -> None:
    strays = [
        _relative(path)
        for path in _sources()
        if any(name.split(".")[0] == library for name in _imports(path))
        and not _relative(path).startswith(ALLOWED[library])
    ]
    assert strays == []


def test_router_and_workers_never_import_each_other() -> None:
    strays = [
        _relative(path)
        for path in _sources()
        for mine, other in (("router/", "workers"), ("workers/", "router"))
        if _relative(path).startswith(mine) and any(name.split(".")[0] == other for name in _imports(path))
    ]
    assert strays == []


def test_the_pool_imports_router_and_workers_only_where_everything_is_put_together() -> None:
    strays = [
        _relative(path)
        for path in _sources()
        if _relative(path).startswith("kvpool/")
        and not _relative(path).startswith(("kvpool/cluster/", "kvpool/cli/", "kvpool/bench/"))
        and any(name.split(".")[0] in ("router", "workers") for name in _imports(path))
    ]
    assert strays == []


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_know_no_clock_randomness_or_io(name: str) -> None:
    assert {module.split(".")[0] for module in _imports(ROOT / name)} & IMPURE_MODULES == set()
