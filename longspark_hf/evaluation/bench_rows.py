"""How single runs of `longspark bench` become one row per task, temperature and method, and how rows are shown.

Knows: what counts in a mean, which comparisons are fair. Does not know: how runs came about (bench).
"""

import statistics
from collections.abc import Callable
from typing import Any

from .answering import METHODS, UNASSISTED
from .tables import Column, columns_table, to_markdown_table


Run = dict[str, Any]


def make_rows(runs: list[Run], positions: dict[str, int]) -> list[dict[str, Any]]:
    """
    One row per task, temperature and method, from single runs.

    Args:
        runs (`list[dict]`): As [`Bench`] records them.
        positions (`dict[str, int]`): Draft positions of a round, by method.
    """
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault((run["task"], run["temperature"], run["method"]), []).append(run)
    rows = []
    order = {task: number for number, task in enumerate(dict.fromkeys(run["task"] for run in runs))}
    for task, temperature, method in sorted(groups, key=lambda key: (order[key[0]], key[1], METHODS.index(key[2]))):
        own, plain, zero = (groups.get((task, temperature, name), []) for name in (method, "plain", "zero_acceptance"))
        head = {"task": task, "method": method, "temperature": temperature}
        rows.append(head | _row(method, own, plain, zero, positions.get(method, 0)))
    return rows


def _row(method: str, own: list[Run], plain: list[Run], zero: list[Run], positions: int) -> dict[str, Any]:
    rounds = [sum(counts) for counts in zip(*(_padded(run["rounds"], own) for run in own))]
    num_rounds = sum(rounds)
    drafts, known = (
        method not in UNASSISTED and num_rounds > 0,
        method != "dflash",
    )  # random weights accept as it happens
    per_round = {
        part: 1e3 * sum(run[f"{part}_seconds"] for run in own) / num_rounds if drafts else None
        for part in ("draft", "verify")
    }
    tau = sum(size * count for size, count in enumerate(rounds, start=1)) / num_rounds if drafts and known else None
    accepted = [sum(rounds[place:]) / num_rounds for place in range(1, positions + 1)] if drafts and known else None
    # A method that cannot be accepted costs its own rounds; a drafter's worst rounds are those of zero acceptance.
    worst = own if method == "dflash" else zero if method in ("longspark", "zero_acceptance") else []
    hashes = {run["prompt"]: run["output"] for run in plain}
    greedy = own[0]["temperature"] == 0
    differences = [run["difference"] for run in own if greedy and run["difference"]]
    memory = [run["peak_memory_bytes"] for run in own if run["peak_memory_bytes"] is not None]
    states = [run["state_bytes"] for run in own if run["state_bytes"] is not None]
    return {
        "prompts": len({run["prompt"] for run in own}),
        "repeats": len({run["repeat"] for run in own}),
        "prompt_tokens": statistics.mean(run["prompt_tokens"] for run in own),
        "new_tokens": statistics.mean(run["new_tokens"] for run in own),
        "tokens_per_second": sum(run["new_tokens"] for run in own) / sum(run["seconds"] for run in own)
        if known
        else None,
        "tpot_ms": _tpot_ms(own) if known else None,
        "prefill_ms": 1e3 * statistics.median(run["prefill_seconds"] for run in own),
        **_speedups(own if known else [], plain, "speedup", lambda run: run["seconds"] / run["new_tokens"]),
        **_speedups(own if known else [], plain, "decode_speedup", _pace),
        "tau": tau,
        "rounds": num_rounds if drafts else None,
        "accepted_by_position": accepted,
        "peak_memory_bytes": max(memory, default=None),
        "state_bytes": max(states, default=None),
        "draft_ms_per_round": per_round["draft"],
        "verify_ms_per_round": per_round["verify"],
        "model_tpot_ms": (per_round["draft"] + per_round["verify"]) / tau if tau else None,
        "break_even_tau": _break_even(worst, plain),
        "identical": all(run["output"] == hashes.get(run["prompt"]) for run in own) if greedy and plain else None,
        "first_difference": min(differences, key=lambda d: (d["turn"], d["token"]), default=None),
    }


def _padded(rounds: list[int], runs: list[Run]) -> list[int]:
    return rounds + [0] * (max(len(run["rounds"]) for run in runs) - len(rounds))


def _pace(run: Run) -> float | None:
    """Seconds a token, prefill left out."""
    return (run["seconds"] - run["prefill_seconds"]) / run["decode_tokens"] if run["decode_tokens"] else None


def _tpot_ms(runs: list[Run]) -> float | None:
    tokens = sum(run["decode_tokens"] for run in runs)
    return 1e3 * sum(run["seconds"] - run["prefill_seconds"] for run in runs) / tokens if tokens else None


def _break_even(worst: list[Run], plain: list[Run]) -> float | None:
    """Tokens a round must commit to be worth it: seconds of a round that commits one, in plain seconds a token."""
    rounds, plain_ms = sum(sum(run["rounds"]) for run in worst), _tpot_ms(plain)
    if not rounds or not plain_ms:
        return None
    return 1e3 * sum(run["seconds"] - run["prefill_seconds"] for run in worst) / rounds / plain_ms


def _speedups(
    own: list[Run], plain: list[Run], name: str, pace: Callable[[Run], float | None]
) -> dict[str, float | None]:
    """Median over prompts of plain over own seconds a token, and its lowest and highest value over repeats."""
    baseline = {(run["prompt"], run["repeat"]): pace(run) for run in plain}
    by_prompt: dict[int, list[float]] = {}
    by_repeat: dict[int, list[float]] = {}
    for run in own:
        mine, theirs = pace(run), baseline.get((run["prompt"], run["repeat"]))
        if mine and theirs:
            by_prompt.setdefault(run["prompt"], []).append(theirs / mine)
            by_repeat.setdefault(run["repeat"], []).append(theirs / mine)
    repeats = [statistics.median(ratios) for ratios in by_repeat.values()]
    return {
        name: statistics.median(map(statistics.median, by_prompt.values())) if by_prompt else None,
        f"{name}_low": min(repeats, default=None),
        f"{name}_high": max(repeats, default=None),
    }


def warning(rows: list[dict[str, Any]]) -> str | None:
    """One line when rounds of LongSpark commit too little to be worth their time."""
    short = [
        f"{row['task']} at T = {row['temperature']:g} ({row['tau']:.2f}, break-even {row['break_even_tau']:.2f})"
        for row in rows
        if row["method"] == "longspark" and row["tau"] and row["break_even_tau"] and row["tau"] < row["break_even_tau"]
    ]
    if not short:
        return None
    return f"Warning: τ stays below its break-even, so plain generate is faster: {'; '.join(short)}."


def _number(key: str, digits: int, scale: float = 1.0) -> Callable[[dict[str, Any]], str]:
    def shown(row: dict[str, Any]) -> str:
        if row[key] is None:
            return "-"
        value = row[key] / scale
        return f"{value:,.{digits if abs(value) < 100 else 0}f}"

    return shown


COLUMNS: list[Column] = [
    ("method", lambda row: row["method"]),
    ("\nspeedup", _number("speedup", 2)),
    ("\ntok/s", _number("tokens_per_second", 1)),
    ("prefill\nms", _number("prefill_ms", 0)),
    ("TPOT\nms", _number("tpot_ms", 1)),
    ("model\nms", _number("model_tpot_ms", 1)),
    ("\nτ", _number("tau", 2)),
    ("break-\neven τ", _number("break_even_tau", 2)),
    ("draft\nms", _number("draft_ms_per_round", 1)),
    ("verify\nms", _number("verify_ms_per_round", 1)),
    ("state\nMiB", _number("state_bytes", 1, 2**20)),
    ("peak\nGiB", _number("peak_memory_bytes", 2, 2**30)),
    ("as\nplain", lambda row: {None: "-", True: "yes", False: "NO"}[row["identical"]]),
]
LEGEND = (
    "speedup and tok/s count whole calls, prefill in them; TPOT leaves it out. model: (draft + verify) / τ. draft and verify "
    "are per round. break-even: τ from which on rounds of this cost pay. peak: memory, with all models loaded. as plain: the greedy "
    "output is plain generate's."
)


def groups(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by a title that says what they have in common."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(f"{row['task']}, T = {row['temperature']:g}", []).append(row)
    return {f"{title}: {_size(group[0])}": group for title, group in found.items()}


def _size(row: dict[str, Any]) -> str:
    prompts, repeats = (f"{row[name]} {name if row[name] > 1 else name[:-1]}" for name in ("prompts", "repeats"))
    return f"{prompts} of {row['prompt_tokens']:,.0f} tokens, {row['new_tokens']:,.0f} new tokens, {repeats}"


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Lines below the table of a group: spread, acceptance by position, where an output first leaves the plain one."""
    spreads = [
        f"{row['method']} {row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
        for row in rows
        if row["method"] != "plain" and row["repeats"] > 1 and row["speedup"] is not None
    ]
    lines = [f"speedup over repeats: {', '.join(spreads)}"] if spreads else []
    for row in rows:
        if row["accepted_by_position"] and row["method"] != "zero_acceptance":
            shares = " ".join(f"{share:.2f}" for share in row["accepted_by_position"])
            lines.append(f"{row['method']}, rounds that kept each draft position: {shares}")
        if difference := row["first_difference"]:
            lines.append(
                f"{row['method']} first leaves the plain output at token {difference['token'] + 1} of an answer, where the "
                f"target's first choice leads by {difference['top_two_margin']:.2g} in logits."
            )
    return lines


def markdown(result: dict[str, Any]) -> str:
    """A result as Markdown: a table for each task and temperature, and where it comes from."""
    source = result["provenance"]
    lines = [f"{result['target']} with {result['drafter']}", ""]
    for title, rows in groups(result["rows"]).items():
        lines += [f"**{title}**", "", to_markdown_table(columns_table(COLUMNS, rows))]
        lines += ["", *(f"- {remark}" for remark in remarks(rows)), ""]
    lines += [f"- {line}" for line in [LEGEND, *result["notes"], warning(result["rows"])] if line]
    lines += [
        "",
        f"Measured on {source['device']}, {source['dtype']}, {source['threads']} threads, torch {source['torch']}, "
        f"transformers {source['transformers']}, {source['date']}.",
    ]
    return "\n".join(lines)
