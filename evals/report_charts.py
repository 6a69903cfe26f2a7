"""Charts as inline SVG: a scatter with intervals, and lines. Colours are the page's variables, so they follow light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dllm.evals.statistics import Interval

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 46


@dataclass(frozen=True)
class Point:
    """A run in a scatter: its number (which is also its colour) and both coordinates with their intervals."""

    number: int
    label: str
    x: Interval
    y: Interval


@dataclass(frozen=True)
class Curve:
    """A line: its number and its (x, y) points."""

    number: int
    label: str
    points: Sequence[tuple[float, float]]


def scatter(points: Sequence[Point], x_name: str, y_name: str) -> str:
    """One dot a run with 95 % intervals both ways; up and right is better."""
    if not points:
        raise ValueError("points must hold at least one point: got none")
    frame = _Frame(
        [v for p in points for v in (p.x.low, p.x.high, p.x.estimate)],
        [v for p in points for v in (p.y.low, p.y.high, p.y.estimate)],
    )
    parts = [frame.axes(x_name, y_name)]
    for p in points:
        x, y = frame.x(p.x.estimate), frame.y(p.y.estimate)
        title = html.escape(
            f"{p.number}. {p.label}\n{x_name} {text_of(p.x.estimate)} ({text_of(p.x.low)} to {text_of(p.x.high)})\n"
            f"{y_name} {text_of(p.y.estimate)} ({text_of(p.y.low)} to {text_of(p.y.high)})"
        )
        parts.append(
            f'<g class="dot c{(p.number - 1) % 6}" data-run="{p.number}"><title>{title}</title>'
            f'<path d="M{x:.1f} {frame.y(p.y.low):.1f}V{frame.y(p.y.high):.1f}M{frame.x(p.x.low):.1f} {y:.1f}H{frame.x(p.x.high):.1f}"/>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9"/><text x="{x:.1f}" y="{y + 4:.1f}">{p.number}</text></g>'
        )
    return _svg(parts, f"{y_name} against {x_name}")


def lines(curves: Sequence[Curve], x_name: str, y_name: str, top: float | None = None) -> str:
    """Lines over whole-numbered positions; `top`: upper end of the y axis."""
    if not curves or any(not curve.points for curve in curves):
        raise ValueError("curves must hold at least one curve, each with points")
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points] + [0.0] + ([] if top is None else [top])
    frame = _Frame(xs, ys, whole_x=True, top=top)
    parts = [frame.axes(x_name, y_name)]
    for curve in curves:
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in curve.points)
        dots = "".join(
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.5"><title>{html.escape(curve.label)}: '
            f"{x_name} {x:g}, {y_name} {y:.3f}</title></circle>"
            for x, y in curve.points
        )
        parts.append(
            f'<g class="line c{(curve.number - 1) % 6}" data-run="{curve.number}"><polyline points="{path}"/>{dots}</g>'
        )
    return _svg(parts, f"{y_name} against {x_name}")


def text_of(value: float) -> str:
    """A number in about three digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4)}f}"


class _Frame:
    """Scales of a chart: data -> picture."""

    def __init__(
        self, xs: Sequence[float], ys: Sequence[float], whole_x: bool = False, top: float | None = None
    ) -> None:
        self.x_low, self.x_high = _padded(xs, 0.0 if whole_x else 0.08)
        self.y_low, self.y_high = _padded(ys, 0.0 if top is not None else 0.08)
        self.x_ticks = _ticks(self.x_low, self.x_high, whole_x)
        self.y_ticks = _ticks(self.y_low, self.y_high, False)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_name: str, y_name: str) -> str:
        parts = []
        for value in self.y_ticks:
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        for value in self.x_ticks:
            x = self.x(value)
            parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
            )
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(
            f'<text class="name" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x_name)}</text>'
        )
        center = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text class="name" transform="translate(12 {center}) rotate(-90)" text-anchor="middle">{html.escape(y_name)}</text>'
        )
        return "".join(parts)


def _padded(values: Sequence[float], share: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high == low:
        room = abs(low) * 0.1 or 0.5
        return low - room, high + room
    return low - share * (high - low), high + share * (high - low)


def _ticks(low: float, high: float, whole: bool) -> list[float]:
    """Four to six round numbers inside of the range."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(step * m for m in (1, 2, 2.5, 5, 10) if (high - low) / (step * m) <= 5.5)
    if whole:
        step = max(1.0, float(round(step)))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _svg(parts: Sequence[str], name: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(name)}">{"".join(parts)}</svg>'
