"""What a profile says, as tables and in words.

Knows: how parts of a round are named and laid out. Does not know: how they were measured (profile).
"""

from typing import Any

from .page import source_line
from .tables import Column, columns_table, to_markdown_table


LABELS = {
    "trunk": "draft trunk",
    "head": "target's head on the draft",
    "markov": "Markov chain",
    "draft": "draft pass, compiled",
    "verify": "verification",
    "acceptance": "acceptance",
    "upkeep": "cache upkeep",
    "rest": "Python and the rest",
    "round": "round",
    "decode": "a plain one-token pass",
    "decode_in_place": "the same, cache in place",
}
LEGEND = (
    "Medians over rounds. The floor is the larger of bytes moved over memory bandwidth and operations over the speed of a large "
    "matrix product, both measured in the same process; weights that stay in a processor's cache can beat it. The plain passes run "
    "after every round, over the same prompt in a cache as plain `generate` keeps it and in one that appends in place; break-even: the "
    "tokens a round must commit to be worth it. Paces count all rounds: the committed tokens at the pace of the plain passes beside "
    "them, over what the rounds took."
)


def part_rows(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a context's table: its parts, the whole round, and the plain pass it is compared with."""
    lines = [{"part": part, **numbers} for part, numbers in row["parts"].items()]
    lines.append({"part": "round", "ms": row["round_ms"], "percent": 100.0})
    for plain in ("decode", "decode_in_place"):
        milliseconds = row[f"{plain}_ms"]
        lines.append({"part": plain, "ms": milliseconds, "percent": 100 * milliseconds / row["round_ms"]})
    return lines


COLUMNS: list[Column] = [
    ("\npart", lambda line: LABELS[line["part"]]),
    ("\nms", lambda line: f"{line['ms']:.2f}"),
    ("% of the\nround", lambda line: f"{line['percent']:.1f}"),
    ("floor\nms", lambda line: f"{line['floor_ms']:.2f}" if "floor_ms" in line else "-"),
    ("ms over\nfloor", lambda line: f"{line['ms'] / line['floor_ms']:.2f}" if "floor_ms" in line else "-"),
]


def title(row: dict[str, Any]) -> str:
    """Of a context's table."""
    prompts = f"{row['prompts']} prompts" if row["prompts"] > 1 else "A prompt"
    return f"{prompts} of {row['prompt_tokens']:,} tokens, {row['rounds']} rounds that verify {row['verified_tokens']}"


def remarks(row: dict[str, Any]) -> list[str]:
    """What a context's numbers say together."""
    at = f"At {row['context']:,} tokens"
    return [
        f"{at} a round takes {row['round_over_passes']:.2f} × its verification and draft pass; verifying "
        f"{row['verified_tokens']} tokens takes {row['verify_over_decode']:.2f} × a plain one-token pass; break-even τ "
        f"{row['break_even_tau']:.2f}, {row['round_ms'] / row['decode_in_place_ms']:.2f} where plain passes have the same cache.",
        *(f"{at}, {_pace(mode, pace)}" for mode, pace in row["pace"].items()),
    ]


def _pace(mode: str, pace: dict[str, Any]) -> str:
    by_prompt = pace["speedup_in_place_by_prompt"]
    span = f" ({min(by_prompt):.2f} to {max(by_prompt):.2f} by prompt)" if len(by_prompt) > 1 else ""
    return (
        f"{mode}: τ {pace['tau']:.2f} with {pace['drafted']:.1f} tokens drafted a round; {pace['speedup']:.2f} × the pace of plain "
        f"passes, {pace['speedup_in_place']:.2f} × where those have the same cache{span}."
    )


def describe(result: dict[str, Any]) -> str:
    """What was measured, and the ceilings."""
    ceilings, temperature = result["ceilings"], result["temperature"]
    return (
        f"{result['target']} with {result['drafter']}, {f'T = {temperature:g}' if temperature else 'greedy'}; "
        f"{ceilings['bytes_per_second'] / 1e9:,.1f} GB/s read, {ceilings['operations_per_second'] / 1e9:,.1f} GFLOP/s."
    )


def markdown(result: dict[str, Any]) -> str:
    """The round budget as Markdown: one table with the contexts side by side."""
    columns: list[Column] = [("part of a round", lambda part: LABELS[part])]
    names = list(dict.fromkeys(part for row in result["rows"] for part in row["parts"]))
    for row in result["rows"]:
        lines = {line["part"]: line for line in part_rows(row)}
        for header, cell in COLUMNS[1:4]:
            name = header.replace("\n", " ").strip()
            name = f"{name} at {row['context']:,}" if name == "ms" else name
            columns.append((name, lambda part, lines=lines, cell=cell: cell(lines[part]) if part in lines else "-"))
    table = to_markdown_table(columns_table(columns, [*names, "round", "decode", "decode_in_place"]))
    lines = [*(line for row in result["rows"] for line in remarks(row)), LEGEND]
    return "\n\n".join([table, "\n".join(f"- {line}" for line in lines), describe(result), source_line(result)])
