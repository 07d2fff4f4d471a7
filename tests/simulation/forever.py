"""Runs simulation seeds until stopped or until one fails; ``./scripts/simulate_forever`` is the way to call it.

Every seed is a run of the whole pool (`tests.simulation.pool_world`) and one of the metadata protocol alone
(`tests.simulation.metadata_world`), each reproducible from its number. Exit code 1 and how to replay it when one
fails, 0 when stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence

from tests.simulation.metadata_processes import Faults
from tests.simulation.metadata_world import World
from tests.simulation.pool_world import PoolWorld, Swarm

PROGRESS_S = 10.0
METADATA_FAULTS = (Faults(), Faults(drop=0, duplicate=0, slow=0), Faults(drop=0.2, duplicate=0.2, slow=0.3))


class Failed(AssertionError):
    """A seed showed something wrong; the text says what and how to see it again."""


def run_seed(seed: int, *, verbose: bool = False) -> Counter[str]:
    """One seed of both worlds; returns what happened.

    Raises:
        Failed: something is wrong.
    """
    pool: PoolWorld | None = None
    try:
        pool = PoolWorld(seed, verbose=verbose)
        pool.run()
        World(seed, METADATA_FAULTS[seed % len(METADATA_FAULTS)]).run()
    except Exception as error:
        at_ms = 0.0 if pool is None else pool.now_ns / 1e6
        raise Failed(
            f"seed {seed}, after {at_ms:.3f} ms: {type(error).__name__}: {error}\n"
            f"swarm: {', '.join(sorted(Swarm.draw(seed).kinds))}\n"
            f"replay: ./scripts/simulate_forever --seed {seed} --verbose"
        ) from error
    return Counter(pool.totals())


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="simulate_forever", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--first", type=int, default=int(time.time()), help="begin here (default: the time)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--verbose", action="store_true", help="print every fault, decision and ending")
    options = parser.parse_args(arguments)
    try:
        if options.seed is not None:
            print(dict(run_seed(options.seed, verbose=options.verbose)))
            return 0
        return _run_on(options.first, options.seconds, verbose=options.verbose)
    except Failed as failure:
        traceback.print_exception(failure.__cause__)
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _run_on(first: int, seconds: float, *, verbose: bool) -> int:
    started_s = shown_s = time.monotonic()
    totals: Counter[str] = Counter()
    seed = first
    while time.monotonic() - started_s < seconds:
        totals += run_seed(seed, verbose=verbose)
        seed += 1
        if time.monotonic() - shown_s > PROGRESS_S:
            shown_s = time.monotonic()
            print(f"{seed - first} seeds from {first} in {shown_s - started_s:.0f} s: {_line(totals)}", flush=True)
    print(f"{seed - first} seeds from {first}, nothing wrong: {_line(totals)}")
    return 0


def _line(totals: Counter[str]) -> str:
    return ", ".join(f"{name} {times}" for name, times in sorted(totals.items()))


if __name__ == "__main__":
    sys.exit(main())
