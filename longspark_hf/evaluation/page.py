"""`longspark report`: result files as one page, HTML with the plots inside or Markdown with the plots beside it.

Knows: which parts a page has for each kind of result, how parts become HTML or Markdown.
Does not know: how anything was measured, how a plot is drawn (plots) or README's tables are made (report).
"""

import html
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import bench_rows, findings, plots
from .tables import Table, columns_table, to_markdown_table


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #212529; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: 3px 10px; border-bottom: 1px solid #dee2e6; text-align: right; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
.source { color: #868e96; font-size: 13px; }
"""


@dataclass
class Section:
    """A heading and its parts: text, lists of lines, tables, and figures by a name."""

    title: str
    parts: list[Any] = field(default_factory=list)
    source: str = ""


def read_results(paths: list[str | Path]) -> list[tuple[str, dict[str, Any]]]:
    """
    Result files by name.

    Args:
        paths (`list[str]`): As `longspark bench`, `longspark sweep` and the ablation script write them.

    Raises:
        `ValueError`: for a file that cannot be read, or is none of these.
    """
    if not paths:
        raise ValueError("No result files. Pass what `longspark bench` or `longspark sweep` wrote.")
    results = []
    for path in map(Path, paths):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"Cannot read the result file {path} ({str(error).partition(chr(10))[0]}).") from error
        kind = kind_of(result)
        if kind is None or not result["rows"]:
            raise ValueError(
                f"{path} holds no rows of `longspark bench`, `longspark sweep` or an ablation. Pass files that these wrote."
            )
        results.append((path.stem, result))
    return results


def kind_of(result: Any) -> str | None:
    """`bench`, `sweep` or `ablation`; `None` for anything else."""
    rows = result.get("rows") if isinstance(result, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return None
    needed = {
        "bench": {"task", "method", "temperature"},
        "sweep": {"method", "context", "draft_ms", "verify_ms", "state_bytes"},
        "ablation": {"variant"},
    }
    kind = result.get("kind", "ablation")
    return kind if kind in needed and all(needed[kind] <= set(row) for row in rows) else None


def sections(results: list[tuple[str, dict[str, Any]]]) -> list[Section]:
    """The sections of a page, one for every result."""
    makers = {"bench": _bench, "sweep": _sweep, "ablation": _ablation}
    found = []
    for name, result in results:
        section = makers[kind_of(result)](name, result)
        section.source = source_line(result)
        found.append(section)
    return found


def source_line(result: dict[str, Any]) -> str:
    """Where a result comes from, as far as it says so."""
    source = result.get("provenance", {})
    named = {"device": "", "dtype": "", "threads": " threads", "torch": "torch ", "transformers": "transformers "}
    parts = [
        f"{source[key]}{text}" if text.startswith(" ") else f"{text}{source[key]}"
        for key, text in named.items()
        if key in source
    ]
    parts += [f"revision {source['git_revision']}"] if source.get("git_revision") else []
    parts += [str(source["date"])] if "date" in source else []
    command = f" Command: {source['command']}" if isinstance(source.get("command"), str) else ""
    return f"Measured on {', '.join(parts)}.{command}" if parts else ""


class _Row(dict):
    """A row of a result, `None` for what it does not tell."""

    def __missing__(self, key: str) -> None:
        return None


def _bench(name: str, result: dict[str, Any]) -> Section:
    rows = [_Row({"repeats": 1, "prompts": 0, "prompt_tokens": 0, "new_tokens": 0} | row) for row in result["rows"]]
    section = Section(f"Bench: {name}")
    about = [str(result[key]) for key in ("target", "drafter") if result.get(key)]
    section.parts += [" with ".join(about)] if about else []
    if any(row["speedup"] for row in rows):
        section.parts.append(plots.speedup_by_task(rows))
    if any(row["accepted_by_position"] for row in rows if row["method"] == "longspark"):
        section.parts.append(plots.acceptance_by_position(rows))
    if any(row["draft_ms_per_round"] for row in rows):
        section.parts.append(plots.round_breakdown(rows))
    for title, group in bench_rows.groups(rows).items():
        section.parts += [title, columns_table(bench_rows.COLUMNS, group), bench_rows.remarks(group)]
    lines = [bench_rows.LEGEND, *(result.get("notes") or []), bench_rows.warning(rows)]
    section.parts.append([line for line in lines if line])
    return section


def _sweep(name: str, result: dict[str, Any]) -> Section:
    rows, parts = result["rows"], []
    full = all({"plain_ms", "plain_in_place_ms", "total_bytes"} <= set(row) for row in rows)
    parts += [findings.describe(result)] if {"settings", "passes"} <= set(result) else []
    parts += [plots.draft_and_state(rows)] + ([plots.round_cost(rows)] if full else [])
    result = {**result, "findings": findings.findings(rows)}
    parts.append(findings.finding_lines(result))
    columns = findings.COLUMNS if full else findings.BARE_COLUMNS
    parts += [columns_table(columns, rows), findings.LEGEND]
    if result.get("prefill"):
        seconds = [
            [row["method"], f"{row['context']:,}", f"{row['second_token_ms'] / 1e3:,.2f}"] for row in result["prefill"]
        ]
        parts.append("A real prompt: seconds to the second new token, with the drafter's own prefill in them.")
        parts.append(Table(["method", "prompt tokens", "s"], seconds))
    return Section(f"Context sweep: {name}", parts)


def _ablation(name: str, result: dict[str, Any]) -> Section:
    rows = result["rows"]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    section = Section(f"Ablation: {name}")
    settings = [
        f"{k.replace('_', ' ')}: {result[k]}"
        for k in ("target", "steps", "short_conversations", "long_conversations")
        if k in result
    ]
    section.parts += [settings] if settings else []
    section.parts += [
        plots.ablation_bars(rows, key) for key in keys if key.endswith("tau") and rows[0].get(key) is not None
    ]
    cells = [[_cell(row.get(key)) for key in keys] for row in rows]
    section.parts.append(Table([key.replace("_", " ") for key in keys], cells))
    return section


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def to_markdown(parts: list[Section], figure: Callable[[Any], str]) -> str:
    """A page as Markdown; `figure` turns a figure into a link."""
    blocks = ["# LongSpark: measured"]
    for section in parts:
        blocks.append(f"## {section.title}")
        for part in section.parts:
            if isinstance(part, str):
                blocks.append(part)
            elif isinstance(part, list):
                blocks += ["\n".join(f"- {line}" for line in part)] if part else []
            elif isinstance(part, Table):
                blocks.append(to_markdown_table(part))
            else:
                blocks.append(figure(part))
        blocks += [section.source] if section.source else []
    return "\n\n".join(blocks) + "\n"


def to_html(parts: list[Section]) -> str:
    """A page as HTML that needs no other file."""
    escape, blocks, figures = html.escape, [], 0
    for section in parts:
        blocks.append(f"<h2>{escape(section.title)}</h2>")
        for part in section.parts:
            if isinstance(part, str):
                blocks.append(f"<p>{escape(part)}</p>")
            elif isinstance(part, list):
                blocks.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in part) + "</ul>" if part else "")
            elif isinstance(part, Table):
                head = "".join(f"<th>{escape(cell)}</th>" for cell in part.header)
                body = "".join(
                    "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in part.rows
                )
                blocks.append(f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>")
            else:
                figures += 1
                blocks.append(f"<figure>{plots.inline_svg(part, f'figure{figures}')}</figure>")
        blocks += [f'<p class="source">{escape(section.source)}</p>'] if section.source else []
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>LongSpark: measured</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>LongSpark: measured</h1>\n"
        + "\n".join(blocks)
        + "\n</body></html>\n"
    )


def write_page(paths: list[str | Path], output: str | Path) -> list[Path]:
    """
    Turn result files into one page.

    Args:
        paths (`list[str]`): Result files.
        output (`str`):
            `.html` for one self-contained file; `.md` for Markdown, with the plots as SVG files in a folder beside it.

    Returns:
        `list[Path]`: what was written, the page first.

    Raises:
        `ValueError`: if a result cannot be read, or the page cannot be written.
    """
    output = Path(output)
    if output.suffix not in (".html", ".md"):
        raise ValueError(f"--output takes a name that ends with .html or .md, got {output}.")
    parts = sections(read_results(paths))
    written = [output]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == ".html":
            output.write_text(to_html(parts), encoding="utf-8")
            return written

        folder = output.with_name(f"{output.stem}_plots")

        def figure(part: Any) -> str:
            folder.mkdir(exist_ok=True)
            file = folder / f"{len(written)}.svg"
            file.write_text(plots.to_svg(part), encoding="utf-8")
            written.append(file)
            return f"![plot {len(written) - 1}]({folder.name}/{file.name})"

        output.write_text(to_markdown(parts, figure), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"Cannot write {error.filename or output}: {error.strerror}.") from error
    return written
