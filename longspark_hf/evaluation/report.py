"""README's figure and tables, made from committed result files: `python -m longspark_hf.evaluation.report`.

Knows: which result files there are, how their numbers are shown. Does not know: how they were measured.
"""

import json
from pathlib import Path
from typing import Any

import longspark_hf


ROOT = Path(longspark_hf.__file__).parent.parent
RESULTS = ROOT / "examples" / "results"
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


def cost_table(cost: dict[str, Any], memory: dict[str, Any], memory_default: dict[str, Any]) -> str:
    """Draft pass and state by context length, as Markdown."""
    lines = [
        "| context | draft pass | drafter state | KV of a growing drafter of that shape (computed) |",
        "|--:|--:|--:|--:|",
    ]
    for row in cost["rows"]:
        sizes = (f"{row[key] / 2**20:,.1f} MiB" for key in ("state_bytes", "growing_peer_state_bytes"))
        lines.append(f"| {row['context'] // 1024}K | {row['draft_ms']:.1f} ms | {' | '.join(sizes)} |")
    prefill, peak, kept = cost["prefill"], memory["peak_memory"], memory_default["peak_memory"]
    return "\n".join(
        [
            *lines,
            "",
            f"With a prompt of {prefill['prompt_tokens']:,} tokens, the time to the first token is {prefill['ratio']:.3f} × "
            f"that of plain `generate`, and peak memory in use {peak['ratio']:.3f} × ({kept['ratio']:.2f} × counting the freed blocks that "
            "glibc keeps by default; `MALLOC_MMAP_THRESHOLD_=1048576` returns them).",
            "",
            "Measured on " + measured_with(cost),
        ]
    )


def round_table(cost: dict[str, Any]) -> str:
    """Where a round's time goes, as Markdown."""
    contexts = cost["round_parts_ms"]
    names = {
        "plain_step": "a plain step of the target (1 token)",
        "verify": "verification (8 tokens)",
        "draft_pass": "draft pass, all of it",
        "draft_trunk": "- trunk: 5 layers over the block",
        "draft_head": "- the target's head on 7 slots",
        "draft_markov_chain": "- Markov chain, 7 steps",
        "state_update": "state update with 8 rows",
    }
    lines = [
        "| ms a round | " + " | ".join(f"at {int(c) // 1024}K" for c in contexts) + " |",
        "|---|" + "--:|" * len(contexts),
    ]
    for key, label in names.items():
        lines.append(f"| {label} | " + " | ".join(f"{parts[key]:.1f}" for parts in contexts.values()) + " |")
    return "\n".join(lines)


def sections() -> dict[str, str]:
    """README's generated sections by name."""
    cost = load("cost_smollm2")
    return {
        "cost": cost_table(cost, load("memory_smollm2"), load("memory_smollm2_default_malloc")),
        "round": round_table(cost),
    }


def fill(text: str) -> str:
    """README's text with every generated section made anew."""
    for name, content in sections().items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n{content}\n{end}{tail}"
    return text


def plot(path: Path) -> None:
    """Draft time and state against context length."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "longspark"  # the same file for the same numbers
    cost = load("cost_smollm2")
    contexts = [row["context"] / 1024 for row in cost["rows"]]
    figure, (time_axes, state_axes) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    time_axes.plot(contexts, [row["draft_ms"] for row in cost["rows"]], "o-", color="#d9480f", label="LongSpark")
    time_axes.set(
        title="Draft pass", ylabel="milliseconds", ylim=(0, 1.3 * max(row["draft_ms"] for row in cost["rows"]))
    )
    state_axes.plot(contexts, [row["state_bytes"] / 2**20 for row in cost["rows"]], "o-", color="#d9480f")
    peer = [row["growing_peer_state_bytes"] / 2**20 for row in cost["rows"]]
    state_axes.plot(contexts, peer, "s--", color="#868e96")
    state_axes.set(title="Drafter state", ylabel="MiB", yscale="log")
    state_axes.annotate(
        "LongSpark", (contexts[-1], cost["rows"][-1]["state_bytes"] / 2**20), (-60, 8), textcoords="offset points"
    )
    state_axes.annotate("growing KV cache (computed)", (contexts[-2], peer[-2]), (-160, 4), textcoords="offset points")
    for axes in (time_axes, state_axes):
        axes.set(
            xlabel="context, thousand tokens (K)",
            xscale="log",
            xticks=contexts,
            xticklabels=[f"{c:g}" for c in contexts],
        )
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(fill(readme.read_text(encoding="utf-8")), encoding="utf-8")
    plot(RESULTS / "cost_smollm2.svg")


if __name__ == "__main__":
    main()
