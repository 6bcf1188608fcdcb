"""What a sweep says, as columns and in words, beside what the paper says.

Knows: the paper's Figure 1, the ratios it claims, break-even. Does not know: how rows were measured.
"""

import math
from collections.abc import Callable
from typing import Any

from .methods import METHODS
from .tables import Column


# Figure 1 of the paper, measured there with Qwen3-8B: milliseconds and MiB by context.
PAPER = {
    "longspark": {"draft_ms": {32768: 3.5, 131072: 3.5}, "state_mib": {32768: 6.3, 131072: 6.3}},
    "dspark": {"draft_ms": {32768: 6.3, 131072: 13.8}, "state_mib": {32768: 640.0, 131072: 2560.0}},
}


def findings(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """
    What the paper claims, from the rows of a sweep: how much faster and smaller than the growing peer, and how flat.

    Args:
        rows (`list[dict]`): `method`, `context`, `draft_ms`, `state_bytes`.

    Returns:
        `dict`: `draft_faster` and `state_smaller` by context, and `flat`, draft time at the longest over the shortest
        context, by method.
    """
    cells = {(row["method"], row["context"]): row for row in rows}
    contexts = sorted({context for _, context in cells})
    pairs = {
        str(c): (cells["longspark", c], cells["dflash", c])
        for c in contexts
        if ("longspark", c) in cells and ("dflash", c) in cells
    }
    return {
        "draft_faster": {c: peer["draft_ms"] / ours["draft_ms"] for c, (ours, peer) in pairs.items()},
        "state_smaller": {c: peer["state_bytes"] / ours["state_bytes"] for c, (ours, peer) in pairs.items()},
        "flat": {
            name: cells[name, contexts[-1]]["draft_ms"] / cells[name, contexts[0]]["draft_ms"]
            for name in dict.fromkeys(row["method"] for row in rows)
        },
    }


def break_even(row: dict[str, Any], plain: str = "plain_ms") -> float:
    """Tokens a round must commit for the method to be as fast as plain decoding, by steps in one cache or the other."""
    return (row["draft_ms"] + row["verify_ms"]) / row[plain] if row[plain] else math.nan


def _number(key: str, digits: int, scale: float = 1.0) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key] / scale:,.{digits}f}"


COLUMNS: list[Column] = [
    ("method", lambda row: METHODS.get(row["method"], row["method"])),
    ("context\ntokens", _number("context", 0)),
    ("draft\nms", _number("draft_ms", 1)),
    ("verify\nms", _number("verify_ms", 0)),
    ("plain\nms", _number("plain_ms", 0)),
    ("in\nplace", _number("plain_in_place_ms", 0)),
    ("break-\neven τ", lambda row: f"{break_even(row):.2f}"),
    ("τ, in\nplace", lambda row: f"{break_even(row, 'plain_in_place_ms'):.2f}"),
    ("state\nMiB", _number("state_bytes", 1, 2**20)),
    ("total\nMiB", _number("total_bytes", 0, 2**20)),
]
# For results that hold no plain steps and no totals.
BARE_COLUMNS = [
    column for column in COLUMNS if column[0].startswith(("method", "context", "draft", "verify", "state"))
]
LEGEND = (
    "draft: committed rows taken in and a block drafted. verify: the target's pass over it, LongSpark's with the cache and attention "
    "that it gives the target, all others as in transformers. plain: a step of the target alone in the stock cache; in place: in one that "
    "appends in place. break-even: (draft + verify) over the one and the other, the tokens a round must commit to be worth it. total: "
    "weights of both models, K/V cache of the target and drafter state, counted from tensors."
)


def describe(result: dict[str, Any]) -> str:
    """One line that says what was measured."""
    used = result["settings"]
    layers = f"all {used['layers']} layers"
    if used["layers"] < used["layers_of_the_shape"]:
        layers = f"ONLY {used['layers']} of its {used['layers_of_the_shape']} layers, so verification costs less than it would"
    vocabulary = "the whole vocabulary" if used["draft_vocab_size"] is None else f"{used['draft_vocab_size']:,} tokens"
    return (
        f"Target: shape of {used['shape']}, {layers}, random weights, {used['dtype']}, on {used['device']} with "
        f"{used['threads']} threads; synthetic K/V rows; medians of {result['passes']} interleaved passes. LongSpark: "
        f"{used['drafter']}, {used['draft_layers']} layers, {used['block_size']} drafts from {vocabulary}. DFlash (built into "
        f"transformers): as many layers of that shape, block {used['dflash_block_size']}, the whole vocabulary; sliding "
        f"window {used['dflash_sliding_window']:,}."
    )


def finding_lines(result: dict[str, Any]) -> list[str]:
    """A sweep's findings in words, then the paper's, each on a line."""
    found, lines = result["findings"], []
    for context, ratio in found["draft_faster"].items():
        lines.append(
            f"At {int(context):,} tokens the draft of the growing peer (dflash) takes {ratio:.1f} times as long as LongSpark's, "
            f"and its state is {found['state_smaller'][context]:,.1f} times as large."
        )
    contexts = [row["context"] for row in result["rows"]]
    flat = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found["flat"].items())
    lines.append(f"Draft time at {max(contexts):,} over {min(contexts):,} tokens: {flat}.")
    ours, peer = PAPER["longspark"], PAPER["dspark"]
    lines.append(
        f"Paper, Figure 1 (Qwen3-8B, other hardware): LongSpark drafts in {ours['draft_ms'][32768]} ms at any length, DSpark "
        f"in {peer['draft_ms'][32768]} ms at 32K and {peer['draft_ms'][131072]} at 128K; state {ours['state_mib'][32768]} MiB "
        f"against {peer['state_mib'][32768]:.0f} and {peer['state_mib'][131072]:.0f} MiB, 406 times as large."
    )
    return lines
