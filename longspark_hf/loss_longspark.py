"""The objective: how far the drafter's distributions are from the target's, over a block of slots.

Knows: cross entropy on the true tokens, total variation to the target, slot weights, chunks that bound memory.
Does not know: where slots, labels and target states come from (modeling_longspark, training).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .target_longspark import BorrowedTarget


# Chunks with more logits than this are computed again in the backward pass instead of kept.
KEPT_LOGITS = 2**22


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics, softmax and losses: float32, or float64 in a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def slot_weights(
    block_size: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Weight of each slot's loss, `exp(-j / 4)`: early tokens decide whether later ones are looked at."""
    return torch.exp(-torch.arange(block_size, device=device, dtype=dtype) / 4.0)


def weighted_loss(
    drafter: Any,
    hidden_states: torch.Tensor,
    previous_ids: torch.LongTensor,
    labels: torch.LongTensor,
    target_hidden_states: torch.Tensor,
    weights: torch.Tensor,
    target: BorrowedTarget,
    judge_rows: torch.LongTensor | None = None,
    probabilities: torch.Tensor | None = None,
    ce_weight: float = 0.1,
    rows_per_chunk: int = 256,
) -> torch.Tensor:
    r"""
    The paper's objective, summed over slots: `w * (0.1 * CE(x) + 0.9 * ||p - q||_1)` over the full vocabulary.

    Logits exist only for `rows_per_chunk` rows at a time and large ones are made again in the backward pass, so peak
    memory does not grow with the number of rows.

    Args:
        drafter ([`LongSparkDrafter`]): Corrects the base logits.
        hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): Slot states after the target's final norm.
        previous_ids (`torch.LongTensor` of shape `(...)`): True token before each label: Markov predecessor.
        labels (`torch.LongTensor` of shape `(...)`):
            True tokens. A label outside the draft vocabulary has no cross entropy, only a distance.
        target_hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): Target states of the judging rows.
        weights (`torch.Tensor` of shape `(...)`): Weight of each slot, zero for slots that do not count.
        target ([`BorrowedTarget`]): Lends the head.
        judge_rows (`torch.LongTensor` of shape `(...)`, *optional*):
            Row of `target_hidden_states` (flattened) that judges each slot; one row per slot in order by default.
        probabilities (`torch.Tensor` of shape `(..., draft_vocab_size or vocab_size)`, *optional*):
            The target's distributions at `target_hidden_states`, where they are known already.
        ce_weight (`float`, *optional*, defaults to 0.1): Lambda of the paper.
        rows_per_chunk (`int`, *optional*, defaults to 256): Rows whose logits exist at a time.

    Returns:
        `torch.Tensor` of shape `()`: the sum, in at least fp32. Divide by the sum of the weights.

    Source: format file, section 4.
    """
    judges = target_hidden_states.detach().flatten(0, -2)
    if judge_rows is None:
        judge_rows = torch.arange(labels.numel(), device=labels.device)
    device, token_ids = hidden_states.device, drafter.draft_token_ids
    rows = [t.flatten().to(device) for t in (previous_ids, labels, judge_rows, weights)]

    def chunk_loss(hidden, previous, label, judge, weight):
        logits = drafter.corrected_logits(target.logits(hidden, token_ids), previous)
        q = logits.softmax(dim=-1)
        p = probabilities
        if p is None:
            p, judge = target_probabilities(judges, judge, target, q.dtype, token_ids)
        distance = (p[judge] - q).abs().sum(dim=-1)
        if token_ids is not None:
            # q is zero outside the draft vocabulary: what p has there is distance, whatever the drafter does.
            distance = distance + (1 - p.sum(dim=-1))[judge]
            index = torch.searchsorted(token_ids, label).clamp(max=len(token_ids) - 1)
            label = torch.where(token_ids[index] == label, index, -100)
        loss = ce_weight * F.cross_entropy(logits, label, reduction="none") + (1 - ce_weight) * distance
        return (loss * weight.to(loss)).sum()

    total = hidden_states.new_zeros((), dtype=at_least_fp32(hidden_states.dtype))
    vocab_size = drafter.config.vocab_size if token_ids is None else len(token_ids)
    keep = min(rows_per_chunk, labels.numel()) * vocab_size <= KEPT_LOGITS
    for chunk in zip(*(t.split(rows_per_chunk) for t in (hidden_states.flatten(0, -2), *rows))):
        total = total + (chunk_loss(*chunk) if keep else checkpoint(chunk_loss, *chunk, use_reentrant=False))
    return total


@torch.no_grad()
def target_probabilities(
    target_hidden_states: torch.Tensor,
    judge_rows: torch.LongTensor,
    target: BorrowedTarget,
    dtype: torch.dtype,
    token_ids: torch.LongTensor | None = None,
) -> tuple[torch.Tensor, torch.LongTensor]:
    """
    The target's distributions at the distinct rows among `judge_rows`.

    Args:
        target_hidden_states (`torch.Tensor` of shape `(n, hidden_size)`): After the final norm.
        judge_rows (`torch.LongTensor` of any shape): Indices into them; neighbouring anchors share most.
        target ([`BorrowedTarget`]): Lends the head.
        dtype (`torch.dtype`): Of the result.
        token_ids (`torch.LongTensor`, *optional*): Return these columns; the softmax runs over all.

    Returns:
        `tuple(torch.Tensor, torch.LongTensor)`: probabilities `(num_distinct, vocab_size)`, and for each judge its row.
    """
    distinct, index = judge_rows.unique(return_inverse=True)
    logits = target.logits(target_hidden_states[distinct.to(target_hidden_states.device)])
    logits = logits.to(device=judge_rows.device, dtype=dtype)
    probabilities = logits.softmax(dim=-1) if token_ids is None else logits.softmax(dim=-1)[:, token_ids]
    return probabilities, index
