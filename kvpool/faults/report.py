"""A verdict for readers: a row of numbers, plain data, and one self-contained HTML page with a timeline.  (pure)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from kvpool.faults import beside
from kvpool.faults.checker import Verdict
from kvpool.faults.measures import detection_ns, summary
from kvpool.faults.story import Fault, Request, Story

COLUMNS = (
    ("scenario", "scenario"),
    ("requests", "requests"),
    ("ok", "ok"),
    ("cancelled", "cancelled"),
    ("expired", "expired"),
    ("retried", "retried"),
    ("loaded", "loaded"),
    ("loads_redone", "loads redone"),
    ("ttft_p50_ms", "TTFT p50, ms"),
    ("max_stall_ms", "max stall, ms"),
    ("detect_ms_max", "detect, ms"),
    ("recover_ms_max", "recover, ms"),
    ("lost", "lost"),
    ("wrong", "wrong"),
    ("violations", "violations"),
)
"""Keys of a row, and what its column is called."""

SHORT_COLUMNS = (
    ("scenario", "scenario"),
    ("requests", "sent"),
    ("ok", "ok"),
    ("cancelled", "cancelled"),
    ("expired", "expired"),
    ("lost", "lost"),
    ("retried", "retried"),
    ("loads_redone", "loads redone"),
    ("max_stall_ms", "stall ms"),
    ("detect_ms_max", "detect ms"),
    ("recover_ms_max", "recover ms"),
    ("wrong", "wrong"),
    ("violations", "broken"),
)
"""The same for a terminal."""

LEGEND = "sent = ok + cancelled (by its client, as planned) + expired (deadline too short on purpose) + lost"
"""What the columns of requests are."""

WIDTH, LEFT, RIGHT = 1080, 60, 20
LANE, CHART, GAP, LABEL = 18, 220, 34, 260
PLAN_COLOURS = {"redo": "#8a8f98", "load": "#2a78d6", "split": "#1b9e77", "": "#c9ccd1"}
FAULT_COLOUR, BAD_COLOUR = "#d95f5f", "#b3261e"


def row(verdict: Verdict) -> dict[str, Any]:
    """The numbers of one run."""
    rules = [violation.rule.name for violation in verdict.violations]
    took = [item.took_ns for item in verdict.recoveries if item.took_ns is not None]
    return {
        "scenario": title(verdict.story),
        **summary(verdict.story),
        "recover_ms_max": max(took) / 1e6 if took else None,
        "lost": rules.count("NONE_LOST"),
        "wrong": rules.count("OUTPUTS_EQUAL"),
        "violations": len(rules),
    }


def verdict_line(verdict: Verdict) -> str:
    """Whether the run kept its promises, and which it broke."""
    broken = list(dict.fromkeys(violation.rule.value for violation in verdict.violations))
    if not broken:
        return "every rule holds"
    return f"{len(broken)} {'rule' if len(broken) == 1 else 'rules'} broken: {'; '.join(broken)}"


def title(story: Story) -> str:
    """What was run, short: a scenario's name, or how many were mixed."""
    name = str(story.run.get("scenario", "?"))
    count = name.count("+") + 1
    return name if count == 1 else f"mix of {count}"


def cells(numbers: dict[str, Any], columns: tuple[tuple[str, str], ...] = COLUMNS) -> list[str]:
    """A row as text, in the order of its columns."""
    return [_shown(numbers.get(key)) for key, _ in columns]


def as_data(verdict: Verdict, history: str) -> dict[str, Any]:
    """A verdict as JSON-able data."""
    story = verdict.story
    return {
        "scenario": story.run.get("scenario"),
        "seed": story.run.get("seed"),
        "mechanisms": story.run.get("mechanisms"),
        "history": history,
        "holds": verdict.holds,
        "numbers": row(verdict),
        "faults": [
            {
                "name": fault.name,
                "target": fault.target,
                "line": fault.line,
                "healed_after_ms": None if fault.heal_ns is None else (fault.heal_ns - fault.at_ns) / 1e6,
                "detected_after_ms": _ms(detection_ns(story, fault)),
            }
            for fault in story.faults.values()
        ],
        "recoveries": [{"faults": item.names, "took_ms": _ms(item.took_ns)} for item in verdict.recoveries],
        "fallbacks": verdict.fallbacks,
        "violations": [
            {"rule": item.rule.value, "message": item.message, "lines": item.lines} for item in verdict.violations
        ],
    }


def html(runs: Sequence[tuple[Verdict, str]], comparison: beside.Comparison | None = None) -> str:
    """One page over several runs; nothing is fetched from elsewhere.

    Args:
        runs: verdicts, each with the path of its history.
        comparison: another store under the same faults.
    """
    rows = [(row(verdict), verdict.holds) for verdict, _ in runs]
    sections = "".join(_section(verdict, history) for verdict, history in runs)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>kvpool fault runs</title><style>{_STYLE}</style>"
        f"<h1>kvpool fault runs</h1>{_table(COLUMNS, rows)}"
        f"{_comparison(comparison, [numbers for numbers, _ in rows])}{sections}</html>"
    )


def _table(columns: tuple[tuple[str, str], ...], rows: Sequence[tuple[dict[str, Any], bool]]) -> str:
    """Rows with whether each is as it should be."""
    head = "".join(f"<th>{escape(title)}</th>" for _, title in columns)
    lines = []
    for numbers, holds in rows:
        mark = "" if holds else ' class="bad"'
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(numbers, columns)) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _comparison(comparison: beside.Comparison | None, ours: Sequence[dict[str, Any]]) -> str:
    if comparison is None:
        return ""
    rows = [(numbers, True) for numbers in comparison.rows(ours)]
    table = _table(beside.COLUMNS, rows) if rows else ""
    return table + "".join(f"<p>{escape(line)}</p>" for line in comparison.remarks())


_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem;color:#1c1e21;background:#fff;max-width:1120px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:0 0 1.5rem}
th,td{padding:.25rem .6rem;border-bottom:1px solid #e3e5e8;text-align:right}
th:first-child,td:first-child{text-align:left}
tr.bad td{color:#b3261e;font-weight:600}h2{margin:2rem 0 .3rem}p,li{max-width:80ch}
svg text{font:11px system-ui,sans-serif;fill:#5b6068}
.bad{color:#b3261e}
"""


def _section(verdict: Verdict, history: str) -> str:
    story = verdict.story
    names = str(story.run.get("scenario", "?")).replace("+", ", ")
    mechanisms = "; ".join(story.run.get("mechanisms", ()))
    violations = "".join(f"<li class=bad>{escape(str(item))}</li>" for item in verdict.violations)
    fallbacks = ", ".join(f"{name} {count}" for name, count in verdict.fallbacks.items()) or "none"
    return (
        f"<h2>{escape(title(story))}</h2>"
        f"<p>{escape(names)}. Seed {escape(str(story.run.get('seed')))}. Made with {escape(mechanisms)}. "
        f"History: <code>{escape(history)}</code></p>"
        f"{_timeline(story)}<p>Fallbacks: {escape(fallbacks)}.</p>"
        + (f"<ul>{violations}</ul>" if violations else "<p>No violation.</p>")
    )


# ── the timeline ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Places times and milliseconds on the picture: fault lanes on top, the chart below them."""

    start_ns: int
    end_ns: int
    most_ms: float
    lanes: int

    @property
    def top(self) -> int:
        return LANE * max(1, self.lanes) + GAP

    @property
    def bottom(self) -> int:
        return self.top + CHART

    @property
    def height(self) -> int:
        return self.bottom + GAP

    def x(self, at_ns: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (at_ns - self.start_ns) / (self.end_ns - self.start_ns)

    def y(self, ms: float) -> float:
        return self.bottom - CHART * ms / self.most_ms


def _timeline(story: Story) -> str:
    """Faults as bars in lanes, and every request's time to first token over its arrival, coloured by plan."""
    requests = [request for request in story.requests.values() if request.ttft_ns is not None]
    if story.start_ns is None or not requests:
        return "<p>Nothing was sent.</p>"
    end_ns = max(story.rest_ns or story.last_ns, story.start_ns + 1)
    most_ms = max([10.0, *map(_ttft_ms, requests)]) * 1.05
    canvas = _Canvas(story.start_ns, end_ns, most_ms, len(story.faults))
    faults = sorted(story.faults.values(), key=lambda fault: fault.at_ns)
    parts = [f'<svg viewBox="0 0 {WIDTH} {canvas.height}" width="100%" role="img" aria-label="timeline">']
    parts += [_bar(canvas, lane, fault) for lane, fault in enumerate(faults)]
    parts += _axes(canvas)
    parts += [_dot(canvas, request) for request in requests]
    parts.append(_legend(canvas.height))
    return "".join(parts) + "</svg>"


def _bar(canvas: _Canvas, lane: int, fault: Fault) -> str:
    left, right = canvas.x(fault.at_ns), canvas.x(fault.heal_ns or canvas.end_ns)
    y = LANE * lane + 4
    fits = right + LABEL < WIDTH
    place = f'x="{right + 4:.1f}"' if fits else f'x="{left - 4:.1f}" text-anchor="end"'
    return (
        f'<rect x="{left:.1f}" y="{y}" width="{max(2.0, right - left):.1f}" height="{LANE - 6}" '
        f'fill="{FAULT_COLOUR}"/><rect x="{left:.1f}" y="{y}" width="{max(1.0, right - left):.1f}" '
        f'height="{canvas.bottom - y}" fill="{FAULT_COLOUR}" opacity=".08"/>'
        f'<text {place} y="{y + 10}">{escape(fault.name)}: {escape(fault.target)}</text>'
    )


def _dot(canvas: _Canvas, request: Request) -> str:
    plan = request.attempts[-1].plan if request.attempts else ""
    bad = request.end is None or request.end.code is not None
    colour = BAD_COLOUR if bad else PLAN_COLOURS.get(plan, PLAN_COLOURS[""])
    ms = _ttft_ms(request)
    hint = f"{request.id} {plan} {ms:.0f} ms, {len(request.attempts)} attempts"
    return (
        f'<circle cx="{canvas.x(request.at_ns):.1f}" cy="{canvas.y(ms):.1f}" r="3" fill="{colour}">'
        f"<title>{escape(hint)}</title></circle>"
    )


def _axes(canvas: _Canvas) -> list[str]:
    right = WIDTH - RIGHT
    parts = [f'<line x1="{LEFT}" y1="{canvas.bottom}" x2="{right}" y2="{canvas.bottom}" stroke="#c9ccd1"/>']
    for step in range(5):
        ms = canvas.most_ms * step / 4
        y = canvas.y(ms)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{ms:.0f} ms</text>')
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#eef0f2"/>')
    for step in range(7):
        at_ns = canvas.start_ns + (canvas.end_ns - canvas.start_ns) * step // 6
        seconds = (at_ns - canvas.start_ns) / 1e9
        parts.append(
            f'<text x="{canvas.x(at_ns):.1f}" y="{canvas.bottom + 15}" text-anchor="middle">{seconds:.0f} s</text>'
        )
    return parts


def _legend(height: int) -> str:
    items = [("redo", PLAN_COLOURS["redo"]), ("load", PLAN_COLOURS["load"]), ("split", PLAN_COLOURS["split"])]
    items.append(("ended with an error", BAD_COLOUR))
    return "".join(
        f'<circle cx="{LEFT + 110 * at}" cy="{height - 7}" r="4" fill="{colour}"/>'
        f'<text x="{LEFT + 110 * at + 8}" y="{height - 3}">{escape(name)}</text>'
        for at, (name, colour) in enumerate(items)
    )


def _ttft_ms(request: Request) -> float:
    assert request.ttft_ns is not None
    return request.ttft_ns / 1e6


def _ms(value_ns: int | None) -> float | None:
    return None if value_ns is None else value_ns / 1e6


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if isinstance(value, float) else str(value)
