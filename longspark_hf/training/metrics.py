"""How many tokens a round would commit, from distributions alone and from `generate` itself.

Knows: acceptance by slot on a known continuation, the expected number of rounds along it.
Does not know: how a drafter is trained.
"""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from longspark_hf.loss_longspark import target_probabilities
from longspark_hf.modeling_longspark import LongSparkDrafter
from longspark_hf.target_longspark import BorrowedTarget

from .views import TargetRows, anchor_groups


def slot_targets(rows: TargetRows, group: list[int], block_size: int) -> dict[str, torch.Tensor]:
    """
    Tokens, labels and judging rows of the slots of a group of anchors; the one place that maps slots to positions.

    Args:
        rows ([`TargetRows`]): The sequence.
        group (`list[int]`): Anchor indices.
        block_size (`int`): Slots per anchor.

    Returns:
        `dict`: `anchor_ids`, `position_ids` of shape `(num_anchors,)`; `labels`, `judge_rows` and `label_rows` of shape
        `(num_anchors, block_size)`. Indices past the end are clamped; mask them by `label_rows`' unclamped values.
    """
    anchors = torch.tensor(group, device=rows.input_ids.device)
    judge_rows = anchors[:, None] + torch.arange(block_size, device=anchors.device)
    last = len(rows.input_ids) - 1
    return {
        "anchor_ids": rows.input_ids[anchors],
        "position_ids": anchors,
        "labels": rows.input_ids[(judge_rows + 1).clamp(max=last)],
        "judge_rows": judge_rows.clamp(max=last),
        "label_rows": judge_rows + 1,
    }


def label_mask(response_mask: torch.Tensor, label_rows: torch.LongTensor) -> torch.Tensor:
    """
    Which slots count: those that predict response tokens, up to the first that is none.

    Args:
        response_mask (`torch.Tensor` of shape `(length,)`): True for response tokens, end-of-sequence included.
        label_rows (`torch.LongTensor` of shape `(num_anchors, block_size)`): Position of each label, may be past the end.
    """
    inside = label_rows < len(response_mask)
    counts = inside & response_mask[label_rows.clamp(max=len(response_mask) - 1)]
    return counts.long().cumprod(dim=-1).bool()


def possible_anchors(response_mask: torch.Tensor) -> torch.LongTensor:
    """Response tokens that are followed by another one, as `generate` meets them."""
    return (response_mask[1:-1] & response_mask[2:]).nonzero()[:, 0] + 1


@torch.no_grad()
def acceptance(
    drafter: LongSparkDrafter, target: BorrowedTarget, rows: TargetRows, response_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    r"""
    Acceptance of every slot at every anchor of a sequence, given that all earlier slots held the true tokens.

    Returns:
        `dict` with anchors in rows and slots in columns: `sampled`, the probability `sum(min(p, q))` that a draft token
        is accepted at T = 1; `on_path`, the same given that the true token comes out, `min(1, q(x) / p(x))`; `greedy`,
        1 where the drafter's most likely token is the target's; `mask`, where a slot counts; `anchors`, their indices.
    """
    anchors = possible_anchors(response_mask)
    parts: dict[str, list[torch.Tensor]] = {"sampled": [], "on_path": [], "greedy": [], "mask": []}
    for group, views in anchor_groups(drafter, rows, anchors.tolist()):
        slots = slot_targets(rows, group, drafter.config.block_size)
        hidden = drafter(slots["anchor_ids"], slots["position_ids"], views, target).hidden_states
        previous = torch.cat([slots["anchor_ids"][:, None], slots["labels"][:, :-1]], dim=1)
        ids = drafter.draft_token_ids
        logits = drafter.corrected_logits(target.logits(hidden, ids), previous)
        q = logits.softmax(dim=-1)
        all_p, index = target_probabilities(rows.hidden_states, slots["judge_rows"], target, q.dtype)
        p = all_p if ids is None else all_p[:, ids]
        label = slots["labels"]
        column, proposable = label, torch.ones_like(label, dtype=torch.bool)
        if ids is not None:
            column = torch.searchsorted(ids, label).clamp(max=len(ids) - 1)
            proposable = ids[column] == label
        p_label = all_p[index].gather(-1, label[..., None])[..., 0]
        q_label = q.gather(-1, column[..., None])[..., 0] * proposable
        best = q.argmax(dim=-1) if ids is None else ids[q.argmax(dim=-1)]
        parts["sampled"].append(torch.minimum(p[index], q).sum(dim=-1))
        parts["on_path"].append((q_label / p_label.clamp(min=torch.finfo(p_label.dtype).tiny)).clamp(max=1))
        parts["greedy"].append((best == all_p.argmax(dim=-1)[index]).to(q.dtype))
        parts["mask"].append(label_mask(response_mask, slots["label_rows"]))
    return {name: torch.cat(part) for name, part in parts.items()} | {"anchors": anchors}


def expected_rounds(accept: torch.Tensor, mask: torch.Tensor) -> tuple[int, float]:
    r"""
    Tokens and expected rounds of decoding along one response, started at its first token.

    Args:
        accept (`torch.Tensor` of shape `(num_anchors, block_size)`):
            Probability that a slot is accepted once all before it were. Row `i` is the anchor at response token `i`.
        mask (`torch.Tensor`, same shape): Where a slot counts.

    Returns:
        `tuple(int, float)`: tokens after the first, and rounds: `f(i) = 1 + sum_a P_i(a) f(i + a + 1)`.
    """
    reached = (accept * mask).cumprod(dim=-1).double().cpu()  # probability that at least j + 1 drafts are accepted
    exactly = torch.cat([torch.ones(len(reached), 1, dtype=torch.double), reached], dim=1)
    exactly[:, :-1] -= reached
    num_tokens, block = len(exactly), exactly.shape[1]
    rounds = torch.zeros(num_tokens + block, dtype=torch.double)  # nothing is left to do at and after the last token
    for i in range(num_tokens - 1, -1, -1):
        rounds[i] = 1 + (exactly[i] * rounds[i + 1 : i + 1 + block]).sum()
    return num_tokens, rounds[0].item()


@torch.no_grad()
def simulate(drafter: LongSparkDrafter, target: BorrowedTarget, sequences: Iterable[tuple]) -> torch.Tensor:
    r"""
    Sums over sequences from which [`summarize`] makes the metrics; sums of several processes add up.

    Args:
        drafter ([`LongSparkDrafter`]), target ([`BorrowedTarget`]): As for its forward.
        sequences (`Iterable`): `(rows, response_mask, temperature)` each.

    Returns:
        `torch.Tensor` of shape `(4 + 3 * block_size,)`, float64.
    """
    block = drafter.config.block_size
    sums = torch.zeros(4 + 3 * block, dtype=torch.double)
    for rows, response_mask, temperature in sequences:
        result = acceptance(drafter, target, rows, response_mask)
        # Several responses in one conversation are decoded one after the other.
        breaks = (result["anchors"].diff() > 1).nonzero()[:, 0].add(1).tolist()
        edges = [0, *breaks, len(result["anchors"])]
        for start, end in zip(edges[:-1], edges[1:]):
            part = slice(start, end)
            if temperature == 0:
                tokens, rounds = expected_rounds(result["greedy"][part], result["mask"][part])
                sums[0:2] += torch.tensor([tokens, rounds])
            else:
                tokens, rounds = expected_rounds(result["on_path"][part], result["mask"][part])
                sums[2:4] += torch.tensor([tokens, rounds])
        full = result["mask"].all(dim=-1)  # anchors whose whole block lies in the response
        for offset, name in ((4, "sampled"), (4 + block, "greedy")):
            sums[offset : offset + block] += result[name][full].cumprod(dim=-1).sum(dim=0).double().cpu()
        sums[4 + 2 * block :] += full.sum().item()
    return sums


def summarize(sums: torch.Tensor, block_size: int, prefix: str = "eval") -> dict[str, float]:
    """
    Metrics from the sums of [`simulate`].

    Returns:
        `dict`: `simulated_tau_greedy` over responses made at T = 0, where it is what `generate` does; `simulated_tau` over
        the others, exact where they were made at T = 1; `accepted_J`, the share of blocks whose first J tokens are
        accepted at T = 1; `greedy_accepted_J` at T = 0.
    """
    metrics = {}
    for name, (tokens, rounds) in (("simulated_tau_greedy", sums[0:2]), ("simulated_tau", sums[2:4])):
        if rounds > 0:
            metrics[f"{prefix}_{name}"] = (tokens / rounds).item()
    sampled, greedy, count = sums[4:].view(3, block_size)
    for slot in range(block_size):
        metrics[f"{prefix}_accepted_{slot + 1}"] = (sampled[slot] / count[slot].clamp(min=1)).item()
        metrics[f"{prefix}_greedy_accepted_{slot + 1}"] = (greedy[slot] / count[slot].clamp(min=1)).item()
    return metrics


@torch.no_grad()
def generated_tau(
    target: PreTrainedModel,
    drafter: LongSparkDrafter,
    prompts: Iterable[torch.LongTensor],
    max_new_tokens: int = 128,
    **generate_kwargs: Any,
) -> float:
    """
    Mean tokens committed per round by `generate` over prompts, the real τ.

    Args:
        target (`PreTrainedModel`), drafter ([`LongSparkDrafter`]): The pair.
        prompts (`Iterable[torch.LongTensor]`): Prompt ids of shape `(1, length)` each.
        max_new_tokens (`int`, *optional*, defaults to 128): Per prompt.
        generate_kwargs (`Any`): For `generate`, such as `do_sample`.
    """
    tokens = rounds = 0
    for prompt in prompts:
        prompt = prompt.to(target.device)
        target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=drafter,
            max_new_tokens=max_new_tokens,
            **generate_kwargs,
        )
        tokens, rounds = tokens + drafter.stats.tokens, rounds + drafter.stats.rounds
    return tokens / rounds if rounds else 0.0
