"""Charts as inline SVG text: lines, stacked bars, strips of dots. No script, no font or host from outside.  (pure)

Every axis has a label with its unit. Lines differ in colour and dash, so that they stay apart in a grey print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 600
_LEFT, _TOP, _BOTTOM = 62, 14, 46
_LEGEND = 128
_ROW = 24
_CHAR = 6.6
_INK, _GRID = "#333", "#e3e3e3"


@dataclass(frozen=True, slots=True)
class Style:
    """How one series looks."""

    colour: str
    dash: str = ""
    width: float = 1.8


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: label with unit, range, and whether it is logarithmic."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Position of a value, 0 at the low end and 1 at the high one; values outside are moved to the ends."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            share = (math.log(max(value, self.low)) - low) / max(1e-12, high - low)
        else:
            share = (value - self.low) / max(1e-12, self.high - self.low)
        return min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        """Round values inside the range, about five."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Line:
    """A named polyline."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: Style


@dataclass(frozen=True, slots=True)
class Rule:
    """A vertical line with a name, such as a limit."""

    at: float
    name: str


def number(value: float) -> str:
    """Three significant digits without an exponent."""
    if value == 0.0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def line_chart(
    title: str,
    x: Axis,
    y: Axis,
    lines: Sequence[Line],
    *,
    rule: Rule | None = None,
    markers: bool = False,
    height: int = 320,
) -> str:
    """Lines over two axes, with a legend on the right; the first line is drawn on top."""
    height = max(height, _TOP + _BOTTOM + 18 * len(lines))
    box = _Box(WIDTH - _LEFT - _LEGEND, height - _TOP - _BOTTOM, x, y)
    parts = [*_x_axis(box), *_y_axis(box)]
    if rule is not None and x.low < rule.at < x.high:
        at = box.x_of(rule.at)
        parts.append(f'<path d="M{at:.1f} {_TOP}V{_TOP + box.height}" stroke="{_INK}" stroke-dasharray="2 3"/>')
        parts.append(_text(at + 4, _TOP + box.height - 8, rule.name, size=11))
    for place, line in reversed(list(enumerate(lines))):  # the first on top
        parts.extend(_line(box, line, markers=markers))
        parts.extend(_legend_entry(WIDTH - _LEGEND + 16, _TOP + 10 + 18 * place, line))
    return _svg(title, height, parts)


def stacked_bars(
    title: str,
    rows: Sequence[tuple[str, Sequence[float]]],
    parts_of: Sequence[tuple[str, str]],
    axis: Axis,
    total: Callable[[Sequence[float]], str],
) -> str:
    """One horizontal bar a row, cut into parts.

    Args:
        title: what the chart shows, for screen readers.
        rows: name and value of every part.
        parts_of: name and colour of the parts.
        axis: of the values.
        total: text behind a bar.
    """
    height = _TOP + 22 + _ROW * len(rows) + _BOTTOM
    left = _left_of([name for name, _ in rows])
    box = _Box(WIDTH - left - 110, _ROW * len(rows), axis, None, left=left, top=_TOP + 22)
    drawn = [*_x_axis(box)]
    at_x = float(left)
    for name, colour in parts_of:
        drawn.append(
            f'<rect x="{at_x:.1f}" y="{_TOP - 4}" width="12" height="12" fill="{colour}" stroke="{_INK}" '
            f'stroke-width=".5"/>'
        )
        drawn.append(_text(at_x + 17, _TOP + 6, name))
        at_x += 17 + _CHAR * len(name) + 22
    for row, (name, values) in enumerate(rows):
        y = box.top + _ROW * row
        drawn.append(_text(left - 8, y + _ROW / 2 + 4, name, anchor="end"))
        edge = 0.0
        for value, (part, colour) in zip(values, parts_of, strict=True):
            start, edge = edge, edge + value
            wide = box.x_of(edge) - box.x_of(start)
            if wide > 0.05:
                drawn.append(
                    f'<rect x="{box.x_of(start):.1f}" y="{y + 4}" width="{wide:.1f}" height="{_ROW - 8}" '
                    f'fill="{colour}" stroke="{_INK}" stroke-width=".5"><title>{escape(f"{name}: {part} {value:.3g}")}'
                    "</title></rect>"
                )
        drawn.append(_text(box.x_of(edge) + 6, y + _ROW / 2 + 4, total(values)))
    return _svg(title, height, drawn)


def strip_chart(
    title: str, rows: Sequence[tuple[str, Sequence[float], Style]], axis: Axis, rule: Rule | None = None
) -> str:
    """One row of dots a series; the greatest value is written behind it."""
    height = _TOP + 16 + _ROW * len(rows) + _BOTTOM
    left = _left_of([name for name, _, _ in rows])
    box = _Box(WIDTH - left - 70, _ROW * len(rows), axis, None, left=left, top=_TOP + 16)
    drawn = [*_x_axis(box)]
    if rule is not None:
        at = box.x_of(rule.at)
        drawn.append(f'<path d="M{at:.1f} {box.top}V{box.top + box.height}" stroke="{_INK}" stroke-dasharray="2 3"/>')
        drawn.append(_text(at, box.top - 6, rule.name, anchor="middle", size=11))
    for row, (name, values, style) in enumerate(rows):
        y = box.top + _ROW * row + _ROW / 2
        drawn.append(_text(left - 8, y + 4, name, anchor="end"))
        for value in values:
            drawn.append(
                f'<circle cx="{box.x_of(value):.1f}" cy="{y}" r="3.6" fill="{style.colour}" fill-opacity=".45" '
                f'stroke="{style.colour}" stroke-width=".8"/>'
            )
        most = max(values, default=0.0)
        drawn.append(_text(box.x_of(most) + 9, y + 4, f"{most:.2f}", size=11))
    return _svg(title, height, drawn)


class _Box:
    """The plotting area."""

    def __init__(
        self, width: float, height: float, x: Axis, y: Axis | None, left: int = _LEFT, top: int = _TOP
    ) -> None:
        self.width, self.height, self.left, self.top = width, height, left, top
        self.x, self.y = x, y

    def x_of(self, value: float) -> float:
        """Horizontal position."""
        return self.left + self.width * self.x.place(value)

    def y_of(self, value: float) -> float:
        """Vertical position."""
        assert self.y is not None
        return self.top + self.height * (1.0 - self.y.place(value))


def _x_axis(box: _Box) -> list[str]:
    bottom = box.top + box.height
    drawn = [f'<path d="M{box.left} {bottom:.1f}h{box.width:.1f}" stroke="{_INK}"/>']
    for tick in box.x.ticks():
        at = box.x_of(tick)
        drawn.append(f'<path d="M{at:.1f} {box.top}V{bottom:.1f}" stroke="{_GRID}"/>')
        drawn.append(_text(at, bottom + 17, number(tick), anchor="middle", size=11))
    drawn.append(_text(box.left + box.width / 2, bottom + 37, box.x.label, anchor="middle"))
    return drawn


def _y_axis(box: _Box) -> list[str]:
    assert box.y is not None
    drawn = [f'<path d="M{box.left} {box.top}v{box.height}" stroke="{_INK}"/>']
    for tick in box.y.ticks():
        at = box.y_of(tick)
        drawn.append(f'<path d="M{box.left} {at:.1f}h{box.width}" stroke="{_GRID}"/>')
        drawn.append(_text(box.left - 7, at + 4, number(tick), anchor="end", size=11))
    middle = box.top + box.height / 2
    drawn.append(
        f'<text x="14" y="{middle:.1f}" transform="rotate(-90 14 {middle:.1f})" text-anchor="middle">'
        f"{escape(box.y.label)}</text>"
    )
    return drawn


def _line(box: _Box, line: Line, *, markers: bool) -> list[str]:
    places = [(box.x_of(x), box.y_of(y)) for x, y in line.points]
    if not places:
        return []
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    drawn = [
        f'<path d="{path}" fill="none" stroke="{line.style.colour}" stroke-width="{line.style.width}" '
        f'stroke-dasharray="{line.style.dash}" stroke-linejoin="round"><title>{escape(line.name)}</title></path>'
    ]
    if markers:
        drawn.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.style.colour}"/>' for x, y in places)
    return drawn


def _legend_entry(x: float, y: float, line: Line) -> list[str]:
    style = line.style
    return [
        f'<path d="M{x} {y}h26" stroke="{style.colour}" stroke-width="{style.width + 0.4}" '
        f'stroke-dasharray="{style.dash}"/>',
        _text(x + 32, y + 4, line.name),
    ]


def _left_of(names: Sequence[str]) -> int:
    """Room for the longest name."""
    return round(20 + _CHAR * max((len(name) for name in names), default=0))


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg" font-size="12" '
        f'font-family="system-ui, sans-serif" fill="{_INK}"><title>{escape(title)}</title>' + "".join(parts) + "</svg>"
    )


def _linear_ticks(low: float, high: float) -> list[float]:
    span = high - low
    if span <= 0.0:
        return [low]
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(decades) <= 4 else (1,)
    return [
        factor * 10.0**power
        for power in decades
        for factor in factors
        if low * 0.999 <= factor * 10.0**power <= high * 1.001
    ]
