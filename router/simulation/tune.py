"""Search our policy's free parameters on the first part of a trace, and judge them on the rest.

Every setting is simulated on the same requests at every bandwidth and rate; its score is the mean over these cells of
the logarithm of its result against that of the defaults, so that every cell counts the same. The search (optuna's
TPE) starts from the defaults and never sees the held-out part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvpool.errors import ConfigError, RequestError
from router.parameters import params_to_dict, value_of, with_values
from router.planning import Params
from router.simulation.cluster import Faults
from router.simulation.presets import Preset
from router.simulation.report import SimReport
from router.simulation.sweep import TUNED, Sweep, run_sweep
from router.simulation.trace import Trace

MIN_PART = 20
"""Requests either part of the trace must hold."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One parameter that is searched, in ``[low, high]``."""

    path: str
    low: float
    high: float
    log: bool = False


KNOBS = (
    Knob("harm.base", 0.0, 2.0),
    Knob("harm.follow", 0.0, 32.0),
    Knob("harm.cap_ns", 1e8, 2e10, log=True),
    Knob("harm.beside", 0.0, 0.5),
    Knob("harm.keep", 0.0, 4.0),
    Knob("hold.backlog_ns", 1e9, 3e10, log=True),
    Knob("hold.age", 0.0, 10.0),
    Knob("costs.notice_ns", 2e7, 2e9, log=True),
)
"""What changes decisions in the simulator. Deadlines and stall bounds are left alone: they guard against what the
simulator has no measure of."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What to improve: ``value`` of a report, the less the better; ``sign`` −1 means the more the better."""

    title: str
    value: Callable[[SimReport], float]
    sign: int = 1


GOALS = {
    "mean": Goal("mean TTFT (ms)", lambda report: report.ttft_mean_ms),
    "p90": Goal("p90 TTFT (ms)", lambda report: report.ttft_p90_ms),
    "p99": Goal("p99 TTFT (ms)", lambda report: report.ttft_p99_ms),
    "goodput": Goal("goodput (requests/s)", lambda report: report.goodput_rps, sign=-1),
}


@dataclass(frozen=True, slots=True)
class Tuning:
    """What to search on.

    Attributes:
        goal: one of `GOALS`.
        trials: settings to try, the defaults included; at least 2.
        train_share: part of the requests, from the start, to search on.
    """

    trace: Trace
    preset: Preset
    nodes: int
    bandwidths_bytes_per_s: tuple[float, ...]
    rates: tuple[float, ...] = (1.0,)
    goal: str = "mean"
    trials: int = 20
    train_share: float = 0.5
    seed: int = 0
    faults: Faults = field(default_factory=Faults)


@dataclass(frozen=True, slots=True)
class Cell:
    """The goal's value in one cell of one part of the trace. ``gain`` above 0 is an improvement."""

    part: str
    bandwidth_gbytes_per_s: float
    rate: float
    default: float
    tuned: float
    gain: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best setting found.

    Attributes:
        train_gain, held_out_gain: geometric mean over cells of the improvement; 0.1 is 10 % better.
    """

    params: Params
    goal: str
    trials: int
    train_gain: float
    held_out_gain: float
    cells: tuple[Cell, ...]

    def values(self) -> list[tuple[str, float, float]]:
        """Searched parameters: path, default, best."""
        return [(knob.path, value_of(Params(), knob.path), value_of(self.params, knob.path)) for knob in KNOBS]

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            **params_to_dict(self.params),
            "goal": self.goal,
            "trials": self.trials,
            "train_gain": self.train_gain,
            "held_out_gain": self.held_out_gain,
            "cells": [
                {
                    "part": cell.part,
                    "bandwidth_gbytes_per_s": cell.bandwidth_gbytes_per_s,
                    "rate": cell.rate,
                    "default": cell.default,
                    "tuned": cell.tuned,
                    "gain": cell.gain,
                }
                for cell in self.cells
            ],
        }


def tune_params(tuning: Tuning, report: Callable[[str], None] = lambda line: None) -> Tuned:
    """Search, then judge. The same arguments give the same result.

    Args:
        tuning: what to search on.
        report: gets a line after every trial.

    Raises:
        RequestError: a number is out of range, or the trace is too short; optuna is not installed.
        ConfigError: unknown goal.
    """
    train, held_out = _parts(tuning)
    optuna = _optuna()
    default = _values(tuning, train, Params())
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=tuning.seed, n_startup_trials=6))
    study.enqueue_trial({knob.path: value_of(Params(), knob.path) for knob in KNOBS})
    best, best_score = Params(), 0.0
    for number in range(tuning.trials):
        trial = study.ask()
        params = _suggested(trial)
        score = _score(default, default if params == Params() else _values(tuning, train, params), tuning)
        study.tell(trial, score)
        if score < best_score:
            best, best_score = params, score
        report(f"trial {number + 1}/{tuning.trials}: {_gain(score):+.2%} (best {_gain(best_score):+.2%})")
    report("judging the best setting on the held-out part")
    rest = _values(tuning, held_out, Params())
    rest_best = rest if best == Params() else _values(tuning, held_out, best)
    train_best = default if best == Params() else _values(tuning, train, best)
    return Tuned(
        params=best,
        goal=tuning.goal,
        trials=tuning.trials,
        train_gain=_gain(best_score),
        held_out_gain=_gain(_score(rest, rest_best, tuning)),
        cells=(*_cells("searched", default, train_best, tuning), *_cells("held out", rest, rest_best, tuning)),
    )


Values = dict[tuple[float, float], float]
"""The goal by bandwidth (GB/s) and rate; lower is better, inf when requests stayed unanswered."""


def _parts(tuning: Tuning) -> tuple[Trace, Trace]:
    if tuning.goal not in GOALS:
        raise ConfigError(f"unknown goal {tuning.goal!r}; known: {', '.join(GOALS)}", goal=tuning.goal)
    if tuning.trials < 2:
        raise RequestError(f"a search needs at least 2 trials, got {tuning.trials}", field="trials")
    if not 0.0 < tuning.train_share < 1.0:
        raise RequestError(f"the share to search on must be between 0 and 1, got {tuning.train_share}", field="train")
    total = len(tuning.trace)
    cut = round(tuning.train_share * total)
    if min(cut, total - cut) < MIN_PART:
        raise RequestError(
            f"{total} requests split at {cut} leave fewer than {MIN_PART} on one side; use a longer trace",
            field="trace",
        )
    return tuning.trace.part(0, cut), tuning.trace.part(cut, total)


def _values(tuning: Tuning, trace: Trace, params: Params) -> Values:
    sweep = Sweep(
        trace=trace,
        preset=tuning.preset,
        nodes=tuning.nodes,
        bandwidths_bytes_per_s=tuning.bandwidths_bytes_per_s,
        policies=(TUNED,),
        rates=tuning.rates,
        seed=tuning.seed,
        faults=tuning.faults,
        params=params,
    )
    goal = GOALS[tuning.goal]
    return {run.cell: math.inf if run.report.unfinished else goal.value(run.report) for run in run_sweep(sweep)}


def _score(default: Values, tried: Values, tuning: Tuning) -> float:
    """Mean logarithm of tried against default, the less the better; large and finite when requests were lost."""
    sign = GOALS[tuning.goal].sign
    logs = [_log_ratio(tried[cell], default[cell], sign) for cell in default]
    return sum(logs) / len(logs)


def _log_ratio(tried: float, default: float, sign: int) -> float:
    if tried == default:
        return 0.0
    if math.isinf(tried):
        return 10.0
    if math.isinf(default):
        return -10.0
    return sign * math.log(max(tried, 1e-9) / max(default, 1e-9))


def _gain(score: float) -> float:
    return math.exp(-score) - 1.0


def _cells(part: str, default: Values, tuned: Values, tuning: Tuning) -> Iterator[Cell]:
    for cell, value in default.items():
        gain = _gain(_log_ratio(tuned[cell], value, GOALS[tuning.goal].sign))
        yield Cell(part, cell[0], cell[1], value, tuned[cell], gain)


def _suggested(trial: Any) -> Params:
    values = {knob.path: trial.suggest_float(knob.path, knob.low, knob.high, log=knob.log) for knob in KNOBS}
    return with_values(Params(), values)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise RequestError(
            "tuning needs optuna, which is not installed: pip install 'kvpool[tune]'", package="optuna"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
