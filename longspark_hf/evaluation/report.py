"""README's figure and tables, made from committed result files: `python -m longspark_hf.evaluation.report`.

Knows: which result files there are, how their numbers are shown. Does not know: how they were measured.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import longspark_hf

from . import findings, page, plots, profile_rows
from .tables import Column, columns_table, to_markdown_table


ROOT = Path(longspark_hf.__file__).parent.parent
RESULTS = ROOT / "examples" / "results"
SWEEP = "sweep_smollm2"
PROFILE = "profile_smollm2"
BATCHES = ("batches_smollm2", "batches_smollm2_long")
BENCHES = ("bench_smollm2", "bench_smollm2_long")
BEGIN, END = "<!-- begin: {name} (made by longspark_hf.evaluation.report) -->", "<!-- end: {name} -->"


def load(name: str) -> dict[str, Any]:
    """A committed result file by its stem."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def measured_with(result: dict[str, Any]) -> str:
    """One line that says where a result comes from."""
    source = result["provenance"]
    return (
        f"{result['target']}, {source['dtype']}, {source['device']} with {source['threads']} threads, torch "
        f"{source['torch']}, transformers {source['transformers']}, {source['date']}."
    )


def prefill_lines(cost: dict[str, Any], memory: dict[str, Any], memory_default: dict[str, Any]) -> str:
    """What a drafter adds to the prefill of a long prompt, as Markdown."""
    prefill, peak, kept = cost["prefill"], memory["peak_memory"], memory_default["peak_memory"]
    return "\n".join(
        [
            f"With a prompt of {prefill['prompt_tokens']:,} tokens, the time to the first token is {prefill['ratio']:.3f} × "
            f"that of plain `generate`, and peak memory in use {peak['ratio']:.3f} × ({kept['ratio']:.2f} × counting the freed blocks that "
            "glibc keeps by default; `MALLOC_MMAP_THRESHOLD_=1048576` returns them).",
            "",
            f"Time measured on {measured_with(cost)}",
            "",
            f"Memory measured on {measured_with(memory)}",
        ]
    )


VERIFY_COLUMNS: list[Column] = [
    ("rows", lambda row: f"{row['context'] // 1024}K"),
    ("tokens", lambda row: str(row["tokens"])),
    ("stock, ms", lambda row: f"{row['stock_ms']:.0f}"),
    ("cache in place, ms", lambda row: f"{row['in_place_ms']:.0f}"),
    ("and grouped attention, ms", lambda row: f"{row['grouped_ms']:.0f}"),
    ("and products, ms", lambda row: f"{row['ours_ms']:.0f}"),
    ("over one token: stock", lambda row: f"{row['stock_ms'] / row['stock_decode_ms']:.2f}"),
    ("ours", lambda row: f"{row['ours_ms'] / row['in_place_decode_ms']:.2f}"),
]


def verify_table(cost: dict[str, Any]) -> str:
    """The target's passes over few tokens, with what transformers does and with what we do, as Markdown."""
    decode = {row["context"]: row for row in cost["verify"] if row["tokens"] == 1}
    rows = [
        row | {f"{kind}_decode_ms": decode[row["context"]][f"{kind}_ms"] for kind in ("stock", "in_place")}
        for row in cost["verify"]
    ]
    return f"{to_markdown_table(columns_table(VERIFY_COLUMNS, rows))}\n\nMeasured on {measured_with(cost)}"


def sweep_table(sweep: dict[str, Any]) -> str:
    """The context sweep and what it says, as Markdown."""
    table = to_markdown_table(columns_table(findings.COLUMNS, sweep["rows"]))
    lines = [*findings.finding_lines(sweep), findings.LEGEND]
    return "\n".join(
        [table, "", *(f"- {line}" for line in lines), "", findings.describe(sweep), "", page.source_line(sweep)]
    )


def _ratio(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: "-" if row[key] is None else f"{row[key]:.2f}"


BENCH_COLUMNS: list[Column] = [
    ("prompts", lambda row: row["task"]),
    ("their tokens", lambda row: f"{row['prompt_tokens']:,.0f}"),
    ("new tokens", lambda row: f"{row['new_tokens']:,.0f}"),
    ("T", lambda row: f"{row['temperature']:g}"),
    ("τ", _ratio("tau")),
    ("break-even τ", _ratio("break_even_tau")),
    ("speedup", _ratio("decode_speedup")),
    ('with "auto"', _ratio("auto_speedup")),
    ("of the cache alone", _ratio("cache_speedup")),
    ("of prompt lookup", _ratio("lookup_speedup")),
    ("of the whole call", _ratio("speedup")),
    ("greedy output as plain", lambda row: {True: "yes", False: "no", None: "-"}[row["identical"]]),
]


def bench_table(benches: list[dict[str, Any]]) -> str:
    """What LongSpark, its cache alone and prompt lookup gained over plain `generate`'s decoding, by task and temperature."""
    rows, sources = [], []
    for bench in benches:
        speedups = {(r["method"], r["task"], r["temperature"]): r["decode_speedup"] for r in bench["rows"]}
        others = {"lookup": "prompt_lookup", "auto": "longspark_auto", "cache": "plain_in_place"}
        for row in bench["rows"]:
            if row["method"] == "longspark":
                case = (row["task"], row["temperature"])
                rows.append(row | {f"{key}_speedup": speedups.get((name, *case)) for key, name in others.items()})
        sources.append(("" if bench["complete"] else "Stopped before its last runs. ") + page.source_line(bench))
    return "\n\n".join([to_markdown_table(columns_table(BENCH_COLUMNS, rows)), *sources])


BATCH_COLUMNS: list[Column] = [
    ("sequences", lambda row: str(row["batch_size"])),
    ("new tokens each", lambda row: str(row["max_new_tokens"])),
    ("plain tokens/s", lambda row: f"{row['plain']['tokens_per_second']:.1f}"),
    ("plain, our cache", lambda row: f"{row['plain_in_place']['speedup']:.2f}"),
    ("our loop, no drafts", lambda row: f"{row['no_drafts']['speedup']:.2f}"),
    ("τ", lambda row: f"{row['longspark']['tau']:.2f}"),
    ("speedup", lambda row: f"{row['longspark']['speedup']:.2f}"),
    ('with "auto"', lambda row: f"{row['longspark_auto']['speedup']:.2f}"),
    ("all accepted", lambda row: f"{row['oracle']['speedup']:.2f}"),
    ('none accepted, "auto"', lambda row: f"{row['zero_acceptance_auto']['speedup']:.2f}"),
    ("output as plain", lambda row: "yes" if all(row[name]["identical"] for name in row["methods"]) else "no"),
]


def batches_table(results: list[dict[str, Any]]) -> str:
    """What the drafter brought at each batch size, beside its bounds, as Markdown."""
    rows = []
    for result in results:
        for size in dict.fromkeys(row["batch_size"] for row in result["rows"]):
            of_size = {row["method"]: row for row in result["rows"] if row["batch_size"] == size}
            rows.append(
                of_size | {"methods": list(of_size), "batch_size": size, "max_new_tokens": result["max_new_tokens"]}
            )
    sampled = [
        f"T = {row['temperature']:g} with {row['proposal']} proposals {row['tau']:.2f}"
        for result in results
        for row in result["proposals"]
    ]
    lines = [f"τ when sampling: {', '.join(sampled)}."] if sampled else []
    return "\n\n".join(
        [to_markdown_table(columns_table(BATCH_COLUMNS, rows)), *lines, *map(page.source_line, results)]
    )


def sections() -> dict[str, str]:
    """README's generated sections by name."""
    cost = load("cost_smollm2")
    found = {
        "verify": verify_table(load("verify_smollm2")),
        "prefill": prefill_lines(cost, load("memory_smollm2"), load("memory_smollm2_default_malloc")),
    }
    if (RESULTS / f"{SWEEP}.json").is_file():
        found["sweep"] = sweep_table(load(SWEEP))
    benches = [load(name) for name in BENCHES if (RESULTS / f"{name}.json").is_file()]
    if benches:
        found["bench"] = bench_table(benches)
    batches = [load(name) for name in BATCHES if (RESULTS / f"{name}.json").is_file()]
    if batches:
        found["batches"] = batches_table(batches)
    if (RESULTS / f"{PROFILE}.json").is_file():
        found["profile"] = profile_rows.markdown(load(PROFILE))
    return found


def fill(text: str) -> str:
    """README's text with every generated section made anew."""
    for name, content in sections().items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        if begin not in text:  # README need not show all there is
            continue
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n{content}\n{end}{tail}"
    return text


def plot(path: Path) -> None:
    """Draft time and state against context length."""
    rows = []
    if (RESULTS / f"{SWEEP}.json").is_file():
        rows = load(SWEEP)["rows"]
    else:
        for row in load("cost_smollm2")["rows"]:
            rows.append({"method": "longspark", **row})
            rows.append(
                {"method": "growing", "context": row["context"], "state_bytes": row["growing_peer_state_bytes"]}
            )
    path.write_text(plots.to_svg(plots.draft_and_state(rows)), encoding="utf-8")


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(fill(readme.read_text(encoding="utf-8")), encoding="utf-8")
    plot(RESULTS / "cost_smollm2.svg")


if __name__ == "__main__":
    main()
