"""Pictures of results, in one style.

Knows: how speedups, costs by context, acceptance and rounds are drawn. Does not know: where the numbers come from, or how
a page is put together (page).
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .methods import METHODS


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One colour for a method in every picture; ours is the warm one.
COLORS = {
    "longspark": "#d9480f",
    "window": "#f4a261",
    "dflash": "#495057",
    "dflash_sliding": "#748ffc",
    "longspark_auto": "#f59f00",
    "prompt_lookup": "#2b8a3e",
    "plain_in_place": "#868e96",
    "zero_acceptance": "#adb5bd",
    "plain": "#868e96",
    "growing": "#868e96",
}
LABELS = METHODS | {
    "longspark": "LongSpark",
    "window": "LongSpark without summary",
    "longspark_auto": "LongSpark, length chosen as it goes",
    "prompt_lookup": "prompt lookup",
    "plain_in_place": "plain, cache in place",
    "zero_acceptance": "LongSpark, nothing accepted",
    "growing": "growing KV cache (computed)",
}
STYLE = {
    "svg.hashsalt": "longspark",  # the same file for the same numbers
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


@contextmanager
def _figure(panels: int, width: float = 4.5) -> Iterator[tuple["Figure", list["Axes"]]]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('Plots need matplotlib. Run: pip install "longspark-hf[bench]"') from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width * panels, 3.2), layout="constrained")
        yield figure, list(figure.subplots(1, panels, squeeze=False)[0])


def to_svg(figure: "Figure") -> str:
    """A figure as SVG, without the date, so that the same numbers make the same text."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def inline_svg(figure: "Figure", prefix: str) -> str:
    """A figure as an SVG element for HTML; ids get a prefix, as several figures share one page."""
    svg = to_svg(figure)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    return re.sub(r'(href="|url\()#([^")]+)', rf"\1#{prefix}-\2", svg)


def _context_axis(axes: "Axes", contexts: list[int]) -> None:
    axes.set(xlabel="context, tokens", xscale="log", xticks=contexts, xticklabels=[short_length(c) for c in contexts])
    axes.minorticks_off()
    axes.grid(axis="x", visible=False)


def short_length(num_tokens: int) -> str:
    """8192 as 8K."""
    return f"{num_tokens // 1024}K" if num_tokens % 1024 == 0 else f"{num_tokens:,}"


def draft_and_state(rows: list[dict[str, Any]]) -> "Figure":
    """
    Draft time and drafter state against context, both axes logarithmic.

    Args:
        rows (`list[dict]`): Of a sweep: `method`, `context`, `draft_ms` and `state_bytes`; `draft_ms` may be missing.
    """
    contexts = sorted({row["context"] for row in rows})
    with _figure(2) as (figure, panels):
        from matplotlib.ticker import LogLocator, NullLocator

        for axes, key, scale in zip(panels, ("draft_ms", "state_bytes"), (1.0, 2**20)):
            values = []
            for method in dict.fromkeys(row["method"] for row in rows):
                own = [row for row in rows if row["method"] == method and row.get(key) is not None]
                if own:
                    style = "s--" if method.startswith(("dflash", "growing")) else "o-"
                    heights = [row[key] / scale for row in own]
                    lengths = [row["context"] for row in own]
                    axes.plot(lengths, heights, style, color=COLORS.get(method), label=LABELS.get(method, method))
                    values += heights
            _context_axis(axes, contexts)
            axes.set(yscale="log", ylim=(min(values) / 2, max(values) * 5))  # a flat line is to look flat
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            axes.yaxis.set_minor_locator(NullLocator())
            axes.legend(fontsize=8, loc="upper left")
        panels[0].set(title="Draft pass", ylabel="milliseconds")
        panels[1].set(title="Drafter state", ylabel="MiB")
    return figure


def round_cost(rows: list[dict[str, Any]]) -> "Figure":
    """What a round of a sweep costs against context: draft on top of verification, in plain steps of the target."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    contexts = sorted({row["context"] for row in rows})
    with _figure(1, 9) as (figure, (axes,)):
        width = 0.8 / len(methods)
        for place, method in enumerate(methods):
            own = {row["context"]: row for row in rows if row["method"] == method}
            at = [contexts.index(context) + (place - (len(methods) - 1) / 2) * width for context in own]
            verify = [row["verify_ms"] / row["plain_ms"] for row in own.values()]
            draft = [row["draft_ms"] / row["plain_ms"] for row in own.values()]
            axes.bar(at, verify, 0.9 * width, color=COLORS.get(method), alpha=0.35)
            axes.bar(at, draft, 0.9 * width, verify, color=COLORS.get(method), label=LABELS.get(method, method))
        axes.set_xticks(range(len(contexts)), [short_length(context) for context in contexts])
        axes.set(
            title="A round: verification (light) and draft (full)", xlabel="context, tokens", ylabel="plain steps"
        )
        axes.grid(axis="x", visible=False)
        figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    return figure


def _cases(rows: list[dict[str, Any]], key: str) -> tuple[list[str], list[str], dict[tuple[str, str], dict[str, Any]]]:
    """Cases (task and temperature) and methods that have a value, and the rows by both."""
    several = len({row["temperature"] for row in rows}) > 1
    cells = {}
    for row in rows:
        if row.get(key) is not None:
            case = f"{row['task']}, T = {row['temperature']:g}" if several else row["task"]
            cells[case, row["method"]] = row
    return list(dict.fromkeys(c for c, _ in cells)), list(dict.fromkeys(m for _, m in cells)), cells


def speedup_by_task(rows: list[dict[str, Any]]) -> "Figure":
    """
    Speedup over plain `generate` by task and method, with its spread over repeats.

    Args:
        rows (`list[dict]`): Of a bench: `task`, `temperature`, `method`, `speedup`, `speedup_low`, `speedup_high`.
    """
    rows = [row for row in rows if row["method"] not in ("plain", "zero_acceptance")]
    cases, methods, cells = _cases(rows, "speedup")
    with _figure(1, max(4.5, 1.0 + 1.2 * len(cases))) as (figure, (axes,)):
        width = 0.8 / max(len(methods), 1)
        for place, method in enumerate(methods):
            own = [(at, cells[case, method]) for at, case in enumerate(cases) if (case, method) in cells]
            heights = [row["speedup"] for _, row in own]
            spread = [
                [max(row["speedup"] - (row.get("speedup_low") or row["speedup"]), 0) for _, row in own],
                [max((row.get("speedup_high") or row["speedup"]) - row["speedup"], 0) for _, row in own],
            ]
            at = [x + (place - (len(methods) - 1) / 2) * width for x, _ in own]
            bars = axes.bar(at, heights, 0.9 * width, color=COLORS.get(method), label=LABELS.get(method, method))
            axes.errorbar(at, heights, spread, fmt="none", ecolor="black", elinewidth=0.8)
            axes.bar_label(bars, fmt="%.2f", fontsize=7, color="white", label_type="center")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(cases)), cases, rotation=20 if len(cases) > 3 else 0)
        axes.set(title="Speedup over plain generate (line: as fast)", ylabel="times")
        axes.grid(axis="x", visible=False)
        if methods:
            figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    return figure


def acceptance_by_position(rows: list[dict[str, Any]], method: str = "longspark") -> "Figure":
    """
    Share of rounds that kept the draft token at each position, a line for each task.

    Args:
        rows (`list[dict]`): Of a bench, with `accepted_by_position`.
        method (`str`, *optional*, defaults to `"longspark"`): Which rows to draw.
    """
    cases, _, cells = _cases([row for row in rows if row["method"] == method], "accepted_by_position")
    with _figure(1, 6) as (figure, (axes,)):
        for case in cases:
            shares = cells[case, method]["accepted_by_position"]
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=case)
        axes.set(
            title=f"Acceptance, {LABELS.get(method, method)}", xlabel="position in the draft", ylabel="share of rounds"
        )
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8)
    return figure


def round_breakdown(rows: list[dict[str, Any]]) -> "Figure":
    """
    Draft and verification of a round by task and method, as horizontal bars.

    Args:
        rows (`list[dict]`): Of a bench, with `draft_ms_per_round` and `verify_ms_per_round`.
    """
    cases, methods, cells = _cases(rows, "draft_ms_per_round")
    names = [(case, method) for case in cases for method in methods if (case, method) in cells][::-1]
    with _figure(1, 7) as (figure, (axes,)):
        figure.set_size_inches(7, 1.2 + 0.28 * len(names))
        labels = [f"{case}: {LABELS.get(method, method)}" for case, method in names]
        colors = [COLORS.get(method) for _, method in names]
        draft = [cells[name]["draft_ms_per_round"] for name in names]
        verify = [cells[name]["verify_ms_per_round"] or 0 for name in names]
        axes.barh(labels, verify, color=colors, alpha=0.35)
        axes.barh(labels, draft, left=verify, color=colors)
        axes.set(title="A round: verification (light) and draft (full)", xlabel="milliseconds")
        axes.grid(axis="y", visible=False)
    return figure


def ablation_bars(rows: list[dict[str, Any]], key: str) -> "Figure":
    """
    What each variant of an ablation reaches; the line is the first, the full one.

    Args:
        rows (`list[dict]`): `variant` and `key`.
        key (`str`): What to draw, `short_simulated_tau` for instance.
    """
    rows = [row for row in rows if row.get(key) is not None]
    with _figure(1, 7) as (figure, (axes,)):
        figure.set_size_inches(7, 1.2 + 0.26 * len(rows))
        names, values = [row["variant"] for row in rows][::-1], [row[key] for row in rows][::-1]
        bars = axes.barh(names, values, color=COLORS["longspark"])
        axes.bar_label(bars, fmt="%.3f", fontsize=7, padding=2)
        axes.axvline(rows[0][key], color="black", linewidth=0.8)
        axes.set(title=key.replace("_", " "), xlim=(1, 1.08 * max(values)))
        axes.grid(axis="y", visible=False)
    return figure
