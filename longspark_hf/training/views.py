"""What a drafter sees at many anchors of one sequence, from a single pass of the target.

Knows: which rows an anchor may see, the streamed prefix scan of the summary, windows as masks over shared rows.
Does not know: what the drafter computes from the views (modeling_longspark) or the loss.

An anchor with index `s` sees rows `0..s-1`; its boundary is row `s-1`; slot `j` at position `s+j` predicts token
`s+1+j` and is judged by the target's distribution at row `s+j` (format file, section 4).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from longspark_hf.cache_longspark import fold_rows
from longspark_hf.compat import cache_argument
from longspark_hf.configuration_longspark import LongSparkConfig
from longspark_hf.modeling_longspark import LongSparkDrafter
from longspark_hf.target_longspark import BorrowedTarget


@dataclass
class TargetRows:
    r"""
    One sequence as the target processed it.

    Args:
        input_ids (`torch.LongTensor` of shape `(length,)`): The tokens.
        keys, values (`list[torch.Tensor]` of shape `(num_key_value_heads, length, head_dim)`):
            Of each selected target layer, as it writes them to its cache.
        boundaries (`torch.Tensor` of shape `(length, num_hidden_layers, hidden_size)`):
            Hidden states of the selected target layers; the last target layer's after the final norm.
        hidden_states (`torch.Tensor` of shape `(length, hidden_size)`): After the final norm.
        probabilities (`torch.Tensor` of shape `(length, draft_vocab_size or vocab_size)`, *optional*):
            Distributions at every row, kept where several steps share them.
    """

    input_ids: torch.LongTensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    boundaries: torch.Tensor
    hidden_states: torch.Tensor
    probabilities: torch.Tensor | None = None


class _SelectedRows(DynamicCache):
    """Keeps the rows of some layers and stores nothing else: training needs no cache to continue from."""

    def __init__(self, layer_ids: list[int]):
        super().__init__()
        self.rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._layer_ids = frozenset(layer_ids)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any):
        if layer_idx in self._layer_ids:
            self.rows[layer_idx] = (key_states, value_states)
        return key_states, value_states


@torch.no_grad()
def run_target(
    target: PreTrainedModel,
    borrowed: BorrowedTarget,
    config: LongSparkConfig,
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor,
    device: torch.device,
) -> list[TargetRows]:
    r"""
    One pass of the frozen target's decoder, without its head.

    Args:
        target (`PreTrainedModel`), borrowed ([`BorrowedTarget`]): The target and its modules.
        config ([`LongSparkConfig`]): Of the drafter.
        input_ids, attention_mask (`torch.Tensor` of shape `(batch_size, length)`): Padded on the right.
        device (`torch.device`): Where the drafter wants the rows.

    Returns:
        `list[TargetRows]`: one per sequence, without padding.
    """
    cache, hidden, handles = _SelectedRows(config.target_layer_ids), {}, []
    for layer_id in config.target_layer_ids:
        # The last layer's boundary is the state after the final norm, all others are raw (format file, trap 3).
        is_last = layer_id == len(borrowed.layers) - 1
        module = borrowed.final_norm if is_last else borrowed.layers[layer_id]

        def keep(_module: Any, _args: Any, output: Any, layer_id: int = layer_id) -> None:
            hidden[layer_id] = output[0] if isinstance(output, tuple) else output

        handles.append(module.register_forward_hook(keep))
    lengths = attention_mask.sum(dim=1).tolist()
    place = next(target.parameters()).device
    padded = None if min(lengths) == input_ids.shape[1] else attention_mask.to(place)
    decoder = target.get_decoder()
    kept = {"use_cache": True, cache_argument(decoder): cache}
    try:
        output = decoder(input_ids=input_ids.to(place), attention_mask=padded, **kept)
        normed = output.last_hidden_state.to(device)
    finally:
        for handle in handles:
            handle.remove()
    silent = [layer_id for layer_id in config.target_layer_ids if layer_id not in cache.rows]
    if silent:
        raise ValueError(
            f"Target layers {silent} write no key/value rows, so no drafter can read them. Choose `target_layer_ids` "
            "among the target's attention layers that keep a cache of their own."
        )
    boundaries = torch.stack([hidden[layer_id].to(device) for layer_id in config.target_layer_ids], dim=2)
    rows = [cache.rows[layer_id] for layer_id in config.target_layer_ids]
    return [
        TargetRows(
            input_ids[b, :length].to(device),
            [keys[b, :, :length].to(device) for keys, _ in rows],
            [values[b, :, :length].to(device) for _, values in rows],
            boundaries[b, :length],
            normed[b, :length],
        )
        for b, length in enumerate(lengths)
    ]


class AnchorLayerViews:
    """The views of one target layer at a group of anchors; stands where a [`LongSparkCacheLayer`] does, read only."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, summary_values: torch.Tensor):
        self.keys, self.values, self.summary_values = keys, values, summary_values
        self._mask = mask

    def window_mask(self) -> torch.Tensor:
        """True for the rows in the anchor's window, `(num_anchors, num_rows)`."""
        return self._mask


@dataclass
class AnchorViews:
    """The views at a group of anchors; stands where a [`LongSparkCache`] does, with anchors in the place of the batch."""

    boundary: torch.Tensor
    layers: list[AnchorLayerViews]


# Summary values and log-sum-exp of the rows before a group of anchors, per layer.
Carry = list[tuple[torch.Tensor, torch.Tensor]]


def prefix_scan(config: LongSparkConfig, queries: torch.Tensor, rows: TargetRows, ends: list[int]) -> list[Carry]:
    r"""
    Summaries of several prefixes of a sequence, in one scan: each is carried on to the next.

    Args:
        config ([`LongSparkConfig`]): Of the drafter.
        queries (`torch.Tensor` of shape `(num_hidden_layers, num_attention_heads, num_summary_queries, head_dim)`):
            The summary queries; the result is differentiable in them. What that keeps grows with the length alone.
        rows ([`TargetRows`]): The sequence.
        ends (`list[int]`): Lengths of the prefixes, in increasing order.
    """
    dtype, device = torch.promote_types(rows.keys[0].dtype, torch.float32), rows.hidden_states.device
    shape = (1, config.num_attention_heads, config.num_summary_queries)
    carry = [
        (
            torch.zeros((*shape, config.head_dim), dtype=dtype, device=device),
            torch.full(shape, -torch.inf, dtype=dtype, device=device),
        )
        for _ in rows.keys
    ]
    carries = []
    for start, end in zip([0, *ends], ends):
        carry = [
            fold_rows(layer_queries, keys[None, :, start:end], values[None, :, start:end], *before)
            for layer_queries, keys, values, before in zip(queries, rows.keys, rows.values, carry, strict=True)
        ]
        carries.append(carry)
    return carries


def group_views(
    config: LongSparkConfig, queries: torch.Tensor, rows: TargetRows, group: list[int], carry: Carry
) -> AnchorViews:
    """
    Views at a group of anchors.

    Args:
        config, queries, rows: As for [`prefix_scan`].
        group (`list[int]`): Indices of the anchors in increasing order, each at least 1.
        carry (`Carry`): Summaries of the rows before the first of them.
    """
    device, count = rows.hidden_states.device, len(group)
    first, last = group[0], group[-1]
    low = max(first - config.window_size, 0)
    index = torch.tensor(group, device=device)
    row = torch.arange(low, last, device=device)
    window = (row < index[:, None]) & (row >= index[:, None] - config.window_size)
    inner = torch.arange(first, last, device=device) < index[:, None]

    layers = []
    for layer_queries, keys, values, before in zip(queries, rows.keys, rows.values, carry, strict=True):
        keys, values = keys[None], values[None]
        summary, lse = (t.expand(count, *t.shape[1:]) for t in before)
        if last > first:
            own = (t[:, :, first:last].expand(count, -1, -1, -1) for t in (keys, values))
            summary, lse = fold_rows(layer_queries, *own, summary, lse, inner)
        seen = (t[:, :, low:last].expand(count, -1, -1, -1) for t in (keys, values))
        layers.append(AnchorLayerViews(*seen, window, summary))
    return AnchorViews(rows.boundaries[index - 1], layers)


def anchor_groups(
    drafter: LongSparkDrafter, rows: TargetRows, anchors: list[int], anchors_per_group: int = 32
) -> Iterator[tuple[list[int], AnchorViews]]:
    r"""
    Views at many anchors of a sequence, group by group.

    The summary is one scan over the sequence: what lies before a group is folded once and carried on, differentiable in
    the summary queries; inside a group each anchor adds its own rows under a mask. Windows of a group are masks over the
    union of its rows.

    Args:
        drafter ([`LongSparkDrafter`]): Its config and summary queries are read.
        rows ([`TargetRows`]): The sequence.
        anchors (`list[int]`): Indices in increasing order, each at least 1.
        anchors_per_group (`int`, *optional*, defaults to 32): Bounds what one group needs in memory.

    Returns:
        `Iterator[tuple(list[int], AnchorViews)]`
    """
    groups = split_anchors(anchors, anchors_per_group)
    config, queries = drafter.config, drafter.summary_queries
    for group, carry in zip(groups, prefix_scan(config, queries, rows, [group[0] for group in groups])):
        yield group, group_views(config, queries, rows, group, carry)


def split_anchors(anchors: list[int], anchors_per_group: int) -> list[list[int]]:
    """Anchors of a sequence in groups, one for each pass of the drafter."""
    return [anchors[i : i + anchors_per_group] for i in range(0, len(anchors), anchors_per_group)]
