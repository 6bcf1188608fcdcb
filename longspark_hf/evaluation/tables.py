"""Tables of text, from columns or as Markdown. Does not know: what stands in them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


# A header on two lines, and what makes the cell of a row.
Column = tuple[str, Callable[[dict[str, Any]], str]]


@dataclass
class Table:
    """Header cells and rows of text."""

    header: list[str]
    rows: list[list[str]]


def columns_table(columns: list[Column], rows: list[dict[str, Any]]) -> Table:
    """A table from columns, their headers on one line."""
    header = [name.replace("-\n", "-").replace("\n", " ").strip() for name, _ in columns]
    return Table(header, [[cell(row) for _, cell in columns] for row in rows])


def to_markdown_table(table: Table) -> str:
    """A table as Markdown, its first column to the left."""
    lines = ["| " + " | ".join(table.header) + " |", "|---|" + "--:|" * (len(table.header) - 1)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table.rows]
    return "\n".join(lines)
