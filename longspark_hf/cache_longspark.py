"""Fixed-size state of a LongSpark drafter: a learned summary and a recent window per draft layer, and the boundary.

Knows: which rows were committed, how they fold into the summary, where the window's ring stands.
Does not know: how rows are obtained from a target (generation_longspark) or what attends to them (modeling_longspark).
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .configuration_longspark import LongSparkConfig


# Rows folded into the summary at once: bounds the scores of a long prefill, far above any verify block.
ROWS_PER_STEP = 4096


def fold_rows(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    summary_values: torch.Tensor,
    summary_lse: torch.Tensor,
    row_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Fold target rows into a summary: the attention output of the summary queries over all rows seen so far.

    Args:
        queries (`torch.Tensor` of shape `(num_attention_heads, num_summary_queries, head_dim)`):
            Summary queries G, neither normalised nor rotated.
        keys (`torch.Tensor` of shape `(batch_size, num_key_value_heads, num_rows, head_dim)`):
            Target keys after rotary embedding.
        values (`torch.Tensor`, same shape): Target values.
        summary_values (`torch.Tensor` of shape `(batch_size, num_attention_heads, num_summary_queries, head_dim)`):
            Summary so far; zeros when nothing was folded yet. At least fp32.
        summary_lse (`torch.Tensor` of shape `(batch_size, num_attention_heads, num_summary_queries)`):
            Its log-sum-exp; minus infinity when nothing was folded yet.
        row_mask (`torch.Tensor` of shape `(batch_size, num_rows)`, *optional*): True for rows that count.

    Returns:
        `tuple(torch.Tensor, torch.Tensor)`: the new summary values and log-sum-exp. Differentiable in `queries`.

    Cost is O(num_rows), independent of how much was folded before (paper, appendix A.2; format file, section 3.2).
    """
    batch_size, num_kv_heads, num_rows, head_dim = keys.shape
    num_heads, num_queries, _ = queries.shape
    dtype = summary_lse.dtype

    # Query heads of one key/value head are consecutive: they become rows of one product and nothing is repeated.
    grouped = queries.to(dtype).reshape(num_kv_heads, -1, head_dim) * head_dim**-0.5
    for start in range(0, num_rows, ROWS_PER_STEP):
        step = slice(start, start + ROWS_PER_STEP)
        scores = grouped @ keys[:, :, step].to(dtype).transpose(-1, -2)  # (b, g, heads per group * r, w)
        if row_mask is not None:
            scores = scores.masked_fill(~row_mask[:, None, None, step], -torch.inf)
        step_lse = scores.logsumexp(dim=-1).view(batch_size, num_heads, num_queries)

        # exp(lse - new_lse) can only shrink old mass, so a long prefix never overflows, however sharp the new scores are.
        new_lse = torch.logaddexp(summary_lse, step_lse)
        # Sequences without any row yet stay at minus infinity; zero is a safe stand-in where nothing has mass.
        reference = new_lse.masked_fill(new_lse == -torch.inf, 0.0)
        keep = (summary_lse - reference).exp().unsqueeze(-1)
        weights = (scores - reference.view(batch_size, num_kv_heads, -1, 1)).exp()
        new_mass = (weights @ values[:, :, step].to(dtype)).view(batch_size, num_heads, num_queries, head_dim)
        summary_values = summary_values * keep + new_mass
        summary_lse = new_lse
    return summary_values, summary_lse


class LongSparkCacheLayer(CacheLayerMixin):
    r"""
    State of one draft layer. Tensors are allocated at the first update and never change shape.

    `keys` and `values`, `(batch_size, num_key_value_heads, window_size, head_dim)`, hold the window as a ring: the row
    with index `t` lies in slot `t % window_size`; slots not yet written are named by [`~LongSparkCacheLayer.window_mask`].
    `summary_values` and `summary_lse` are described in [`fold_rows`]. `num_rows`, `(batch_size,)`, counts committed rows.

    Args:
        summary_queries (`torch.Tensor` of shape `(num_attention_heads, num_summary_queries, head_dim)`):
            Referred to, not owned: they are weights of the drafter and no part of the state.
        window_size (`int`): Rows of the window.
        dtype (`torch.dtype`, *optional*): Of the window; that of the first keys by default.
    """

    is_sliding = False

    def __init__(self, summary_queries: torch.Tensor, window_size: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.summary_queries = summary_queries.detach()
        self.window_size = window_size
        self.window_dtype = dtype
        self.transferred_bytes = 0  # from and to a target on another device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch_size, num_kv_heads, _, head_dim = key_states.shape
        num_heads, num_queries, query_dim = self.summary_queries.shape
        if head_dim != query_dim or value_states.shape[-1] != query_dim or num_heads % num_kv_heads:
            raise ValueError(
                f"The target's key rows have {num_kv_heads} heads of {head_dim} and its value rows heads of "
                f"{value_states.shape[-1]}, but the summary queries expect {num_heads} query heads of {query_dim}. "
                "Use a drafter made for this target: `LongSparkConfig.from_target(target.config, ...)`."
            )
        device = self.summary_queries.device
        window_dtype = self.window_dtype or key_states.dtype
        summary_dtype = torch.promote_types(
            torch.promote_types(key_states.dtype, self.summary_queries.dtype), torch.float32
        )

        shape = (batch_size, num_kv_heads, self.window_size, head_dim)
        self.keys = torch.zeros(shape, dtype=window_dtype, device=device)
        self.values = torch.zeros(shape, dtype=window_dtype, device=device)
        shape = (batch_size, num_heads, num_queries)
        self.summary_values = torch.zeros((*shape, head_dim), dtype=summary_dtype, device=device)
        self.summary_lse = torch.full(shape, -torch.inf, dtype=summary_dtype, device=device)
        self.num_rows = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.is_initialized = True

    @torch.no_grad()
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, row_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        r"""
        Absorb newly committed target rows into the summary and the window.

        Args:
            key_states (`torch.Tensor` of shape `(batch_size, num_key_value_heads, num_rows, head_dim)`):
                Target keys after rotary embedding, in position order. Only committed rows: prompt, anchor, accepted drafts.
            value_states (`torch.Tensor`, same shape): Target values of the same rows.
            row_mask (`torch.Tensor` of shape `(batch_size, num_rows)`, *optional*):
                True for rows that count; left padding and the uncommitted rows of a ragged batch are False.

        Returns:
            `tuple(torch.Tensor, torch.Tensor)`: the window's keys and values.

        Raises:
            `ValueError`: if the shapes are not the state's.

        Cost is O(num_rows), independent of how much was absorbed before (paper, appendix A.2).
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        expected = (*self.keys.shape[:2], key_states.shape[2], self.keys.shape[-1])
        if key_states.shape != expected or value_states.shape != expected:
            raise ValueError(
                f"Got keys of shape {tuple(key_states.shape)} and values of shape {tuple(value_states.shape)}, but this "
                f"state holds rows of {expected[0]} sequences and {expected[1]} heads of {expected[3]}."
            )
        if row_mask is not None and row_mask.shape != (expected[0], expected[2]):
            raise ValueError(
                f"Got a `row_mask` of shape {tuple(row_mask.shape)} for {expected[2]} rows of {expected[0]} sequences; "
                f"expected {(expected[0], expected[2])}."
            )
        if key_states.shape[2] == 0:
            return self.keys, self.values
        device = self._fold_device(key_states)
        key_states, value_states = key_states.to(device), value_states.to(device)
        queries, values, lse = (t.to(device) for t in (self.summary_queries, self.summary_values, self.summary_lse))
        mask = None if row_mask is None else row_mask.to(device=device, dtype=torch.bool)
        new_values, new_lse = fold_rows(queries, key_states, value_states, values, lse, mask)
        self.summary_values.copy_(new_values)
        self.summary_lse.copy_(new_lse)
        self._write_window(key_states, value_states, mask)
        return self.keys, self.values

    def transfer(self, num_rows: int) -> tuple[int, bool]:
        """
        What absorbing `num_rows` rows of a target on another device sends between the devices.

        Returns:
            `tuple(int, bool)`: bytes, and whether it is the rows that cross. Otherwise they are folded where they are, and
            state of fixed size crosses instead: whichever is less.
        """
        row = self.keys[:, :, :1].nbytes + self.values[:, :, :1].nbytes
        fixed = self.summary_queries.nbytes + 2 * (self.summary_values.nbytes + self.summary_lse.nbytes)
        fixed += min(num_rows, self.window_size) * row
        return (num_rows * row, True) if num_rows * row <= fixed else (fixed, False)

    def _fold_device(self, rows: torch.Tensor) -> torch.device:
        if rows.device == self.keys.device:
            return rows.device
        num_bytes, rows_cross = self.transfer(rows.shape[2])
        self.transferred_bytes += num_bytes
        return self.keys.device if rows_cross else rows.device

    def _write_window(self, keys: torch.Tensor, values: torch.Tensor, row_mask: torch.Tensor | None) -> None:
        total = keys.shape[2] if row_mask is None else row_mask.sum(dim=-1)[:, None].to(self.num_rows.device)
        size = min(keys.shape[2], self.window_size)
        if size > 0:
            # The last `size` rows that count end at `num_rows + total`. Where fewer count, rows that do not come before
            # them: those have slots of their own too, and keep what is there.
            position = self.num_rows[:, None] + total + torch.arange(-size, 0, device=self.num_rows.device)
            slot = (position % self.window_size)[:, None, :, None].expand(*keys.shape[:2], size, keys.shape[3])
            if row_mask is not None:
                order = row_mask.byte().argsort(dim=-1, stable=True)[:, -size:]
                order = order[:, None, :, None].expand(slot.shape)
                counts = (position >= self.num_rows[:, None])[:, None, :, None]
            for window, rows in ((self.keys, keys), (self.values, values)):
                new = (rows[:, :, -size:] if row_mask is None else rows.gather(2, order)).to(window)
                window.scatter_(2, slot, new if row_mask is None else torch.where(counts, new, window.gather(2, slot)))
        self.num_rows += total if row_mask is None else total[:, 0]

    def window_mask(self) -> torch.Tensor:
        """True for the ring slots that hold a row, `(batch_size, window_size)`."""
        return torch.arange(self.window_size, device=self.num_rows.device) < self.num_rows[:, None]

    def get_seq_length(self) -> int:
        """Committed rows; the largest count of the batch. Reads the device."""
        return int(self.num_rows.max()) if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """What one softmax of a draft layer runs over: summary entries, window rows and the block; never the context."""
        return self.summary_queries.shape[1] + self.window_size + query_length, 0

    def _state(self) -> tuple[torch.Tensor, ...]:
        return (self.keys, self.values, self.summary_values, self.summary_lse) if self.is_initialized else ()

    def reset(self) -> None:
        """Forget all rows; the tensors stay allocated."""
        for tensor in self._state():
            tensor.zero_()
        if self.is_initialized:
            self.summary_lse.fill_(-torch.inf)
            self.num_rows.zero_()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices` of the batch."""
        if self.is_initialized:
            for name in ("keys", "values", "summary_values", "summary_lse", "num_rows"):
                setattr(self, name, getattr(self, name)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch `repeats` times."""
        if self.is_initialized:
            self.batch_select_indices(
                torch.arange(len(self.num_rows), device=self.keys.device).repeat_interleave(repeats)
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    @property
    def nbytes(self) -> int:
        """Bytes of window and summary."""
        return sum(tensor.nbytes for tensor in self._state())


class LongSparkCache(Cache):
    r"""
    Everything a drafter keeps between rounds: one [`LongSparkCacheLayer`] per draft layer and the boundary.

    Args:
        config ([`LongSparkConfig`]): Of the drafter.
        summary_queries (`torch.Tensor` of shape `(num_hidden_layers, num_attention_heads, num_summary_queries, head_dim)`):
            The drafter's summary queries. The state lives on their device.
        dtype (`torch.dtype`, *optional*): Of window and boundary; that of the target's rows by default.

    `boundary`, `(batch_size, num_hidden_layers, hidden_size)`, holds the hidden states of the selected target layers at
    the last committed row (format file, section 2.1), or `None` before the first pass.
    """

    def __init__(self, config: LongSparkConfig, summary_queries: torch.Tensor, dtype: torch.dtype | None = None):
        super().__init__(
            layers=[LongSparkCacheLayer(queries, config.window_size, dtype) for queries in summary_queries]
        )
        self.boundary: torch.Tensor | None = None
        self.dtype = dtype

    def set_boundary(self, hidden_states: torch.Tensor) -> None:
        """
        Replace the boundary.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, num_hidden_layers, hidden_size)`):
                Of the selected target layers at the last committed row, in the order of `target_layer_ids`.
        """
        device = self.layers[0].summary_queries.device
        if hidden_states.device != device:
            self.layers[0].transferred_bytes += hidden_states.nbytes
        hidden_states = hidden_states.to(device=device, dtype=self.dtype or hidden_states.dtype)
        if self.boundary is None or self.boundary.shape != hidden_states.shape:
            self.boundary = hidden_states.clone()
        else:
            self.boundary.copy_(hidden_states)

    def reset(self) -> None:
        """Forget everything; the tensors stay allocated."""
        super().reset()
        if self.boundary is not None:
            self.boundary.zero_()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices` of the batch."""
        super().batch_select_indices(indices)
        if self.boundary is not None:
            self.boundary = self.boundary[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch `repeats` times."""
        super().batch_repeat_interleave(repeats)
        if self.boundary is not None:
            self.boundary = self.boundary.repeat_interleave(repeats, dim=0)

    @property
    def transferred_bytes(self) -> int:
        """Bytes that this state received from a target on another device, or sent there to be folded with its rows."""
        return sum(layer.transferred_bytes for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the state: windows, summaries and boundary. The same number at any context length."""
        boundary = 0 if self.boundary is None else self.boundary.nbytes
        return sum(layer.nbytes for layer in self.layers) + boundary


__all__ = ["LongSparkCache", "LongSparkCacheLayer"]
