"""Two charts against context length as SVG: draft time, and memory. Drawn here because the page is dark or light, wide or narrow,
and a test can read every point.

Knows: points measured now and the committed sweep of longspark_hf. Does not know: how they were measured (measuring).
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limits import short_length
from measuring import Point

from longspark_hf.evaluation.demo import SHIPPED_DRAFTER


COMMITTED = SHIPPED_DRAFTER.parent / "results" / "sweep_smollm2.json"
COMMITTED_FOR = "SmolLM2-135M-Instruct"
LABELS = {
    "longspark": "LongSpark",
    "dflash": "growing cache (DFlash of the same shape)",
    "target": "target's K/V cache",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 270, 64, 22, 14, 44


@dataclass(frozen=True)
class Committed:
    """The committed sweep: rows of (method, context) and where they come from."""

    rows: dict[str, list[dict[str, Any]]]
    row_bytes: float
    date: str
    machine: str

    @classmethod
    def read(cls, path: str | Path = COMMITTED) -> "Committed | None":
        """From a result file of `longspark sweep`; `None` where there is none."""
        if not Path(path).is_file():
            return None
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in result["rows"]:
            rows.setdefault(row["method"], []).append(row)
        low, high = rows["longspark"][0], rows["longspark"][-1]
        row_bytes = (high["total_bytes"] - low["total_bytes"]) / (high["context"] - low["context"])
        source = result["provenance"]
        return cls(
            rows, row_bytes, source["date"], f"{source['device']}, {source['threads']} threads, {source['dtype']}"
        )


def has_committed(target: str, committed: Committed | None) -> bool:
    """Whether there is a committed sweep for a target, the growing cache included."""
    return committed is not None and target == COMMITTED_FOR


def charts_html(points: list[Point], target: str, committed: Committed | None) -> str:
    """
    Both charts with their legend.

    Args:
        points (`list[Point]`): All that this visitor measured.
        target (`str`): Only its points are shown.
        committed ([`Committed`], *optional*): Thin lines behind them, for the target it was measured on.
    """
    points = [point for point in points if point.target == target]
    committed = committed if has_committed(target, committed) else None
    draft = _chart(
        "Draft time a round, milliseconds", "draft_ms", points, committed, ["longspark", "dflash"], lambda ms: ms
    )
    state = _chart(
        "Memory, MiB", "state_bytes", points, committed, ["longspark", "dflash", "target"], lambda size: size / 2**20
    )
    names = "".join(f"<li class='ls-{name}'>{label}</li>" for name, label in LABELS.items())
    marks = "<li class='ls-mark'>● measured now, alone</li><li class='ls-mark'>◆ measured now, in a race</li>"
    thin = (
        f"<li class='ls-mark'>thin line: committed, {committed.date} ({committed.machine})</li>" if committed else ""
    )
    return f"<div class='ls-charts'>{draft}{state}</div><ul class='ls-keys'>{names}{marks}{thin}</ul>"


def _value(point: Point, key: str, method: str) -> float:
    return point.target_bytes if method == "target" else getattr(point, key)


def _chart(
    title: str,
    key: str,
    points: list[Point],
    committed: Committed | None,
    methods: list[str],
    scale: Callable[[float], float],
) -> str:
    thin: dict[str, list[tuple[int, float]]] = {}
    if committed is not None:
        for method in methods:
            rows = committed.rows["longspark" if method == "target" else method]
            thin[method] = [
                (row["context"], scale(committed.row_bytes * row["context"] if method == "target" else row[key]))
                for row in rows
            ]
    marks = []
    for method in methods:
        own = [point for point in points if method == "target" or point.method == method]
        seen = {(point.context, point.source): (method, point, scale(_value(point, key, method))) for point in own}
        marks += seen.values()  # a length measured again replaces what was measured before

    values = [value for line in thin.values() for _, value in line] + [value for _, _, value in marks]
    xs = [x for line in thin.values() for x, _ in line] + [point.context for _, point, _ in marks]
    low_x, high_x = min([*xs, 1024]), max([*xs, 8192])
    low, high = min(values, default=1.0), max(values, default=100.0)
    low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-9)

    def x_of(context: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(context / low_x) / max(math.log(high_x / low_x), 1e-9)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(value / low) / math.log(high / low)

    lines = "".join(
        f"<polyline class='ls-{method} ls-thin' points='{' '.join(f'{x_of(x):.1f},{y_of(y):.1f}' for x, y in line)}'/>"
        for method, line in thin.items()
    )
    dots = "".join(_mark(method, point, value, x_of(point.context), y_of(value)) for method, point, value in marks)
    axes = _axes(low_x, high_x, low, high, x_of, y_of)
    described = f"{title} against context length in tokens, both axes logarithmic; {len(marks)} points measured now."
    return (
        f"<figure><figcaption>{title}</figcaption><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{described}' "
        f"data-chart='{key}'>{axes}{lines}{_joined(marks, x_of, y_of)}{dots}</svg></figure>"
    )


def _joined(marks: list[tuple[str, Point, float]], x_of: Callable, y_of: Callable) -> str:
    """Lines through the points that were measured alone."""
    lines = ""
    for name in dict.fromkeys(method for method, _, _ in marks):
        own = sorted(
            (point.context, value) for method, point, value in marks if method == name and point.source == "alone"
        )
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in dict(own).items())
        lines += f"<polyline class='ls-{name} ls-now' points='{path}'/>" if len(own) > 1 else ""
    return lines


def _mark(method: str, point: Point, value: float, x: float, y: float) -> str:
    data = f"class='ls-{method} ls-dot' data-method='{method}' data-context='{point.context}' data-value='{value:.6g}' data-source='{point.source}'"
    told = f"<title>{LABELS[method]}, {point.context:,} tokens: {value:.3g} ({point.source})</title>"
    if point.source == "race":
        return f"<rect {data} x='{x - 4:.1f}' y='{y - 4:.1f}' width='8' height='8' transform='rotate(45 {x:.1f} {y:.1f})'>{told}</rect>"
    return f"<circle {data} cx='{x:.1f}' cy='{y:.1f}' r='4.5'>{told}</circle>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _axes(low_x: float, high_x: float, low: float, high: float, x_of: Callable, y_of: Callable) -> str:
    parts = []
    bottom, decade = HEIGHT - BOTTOM, low
    while decade <= high * 1.001:
        y = y_of(decade)
        parts.append(f"<line class='ls-grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{_number(decade)}</text>")
        decade *= 10
    ticks = [2**power for power in range(6, 21) if low_x <= 2**power <= high_x]
    for number, context in enumerate(reversed(ticks)):
        label, x = short_length(context), x_of(context)
        every_second = " class='ls-second'" if number % 2 else ""  # has no room on a phone
        parts.append(f"<line class='ls-grid' x1='{x:.1f}' x2='{x:.1f}' y1='{bottom}' y2='{bottom + 4}'/>")
        parts.append(f"<text{every_second} x='{x:.1f}' y='{bottom + 19}' text-anchor='middle'>{label}</text>")
    parts.append(f"<text x='{(LEFT + WIDTH) / 2}' y='{HEIGHT - 5}' text-anchor='middle'>context, tokens</text>")
    return "".join(parts)
