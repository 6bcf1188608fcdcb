"""A target's cache while the sequences of a batch progress at their own pace.

Knows: where the next rows of every sequence go, which rows each may see, how finished sequences step aside.
Does not know: what is verified or accepted (decoding_longspark), or what a drafter keeps (cache_longspark).

Column `c` of a sequence is column `c` of the output, as plain `generate` has it. The rows of a round are written behind
the last committed one of each sequence, over those that the round before rejected: nothing is ever moved or packed again.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from .inplace_longspark import InPlaceLayer, with_spare


class RaggedLayer(DynamicLayer):
    r"""
    One layer's rows, written in place. Stands in for a dynamic layer of transformers until [`~RaggedLayer.release`].

    Args:
        layer (`DynamicLayer`): Holds `(batch_size, num_heads, length, head_dim)`, or the end of it where it slides.
        rows ([`TargetRows`]): How far each sequence is.

    `first` is the column its buffers begin with: columns that no sequence sees any more are dropped when they grow.
    """

    def __init__(self, layer: DynamicLayer, rows: "TargetRows"):
        super().__init__()
        self.stock, self.rows = layer, rows
        self.window = layer.sliding_window if layer.is_sliding else None
        self.is_sliding, self.is_initialized, self.device = layer.is_sliding, True, layer.keys.device
        self.keys, self.values = layer.keys, layer.values
        self.first = rows.longest - layer.keys.shape[2]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any):
        """Write the new rows of all running sequences; returns the columns that one of them may see."""
        running, _, num_new, _ = key_states.shape
        start, end = self.rows.visible_from(self.window), self.rows.longest + num_new
        pairs = ((self.keys, key_states), (self.values, value_states))
        dtypes = [torch.promote_types(buffer.dtype, new.dtype) for buffer, new in pairs]
        if end - self.first > self.keys.shape[2] or dtypes != [self.keys.dtype, self.values.dtype]:
            self._grow(start, end, dtypes)
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            if self.rows.even:
                buffer[:running, :, end - num_new - self.first : end - self.first] = new
            else:
                columns = self.rows.new_columns(num_new, buffer.device) - self.first
                buffer[:running].scatter_(2, columns[:, None, :, None].expand_as(new), new.to(buffer.dtype))
        seen = slice(start - self.first, end - self.first)
        return self.keys[:running, :, seen], self.values[:running, :, seen]

    def _grow(self, start: int, end: int, dtypes: list[torch.dtype]) -> None:
        grown = []
        for buffer, dtype in zip((self.keys, self.values), dtypes):
            old = buffer[:, :, start - self.first : end - self.first]
            new = old.new_zeros((*old.shape[:2], with_spare(end - start), old.shape[3]), dtype=dtype)
            new[:, :, : old.shape[2]] = old
            grown.append(new)
        # All or nothing: there may be no memory for the second.
        (self.keys, self.values), self.first = grown, start
        self.stock.keys = self.stock.values = None
        if isinstance(self.stock, InPlaceLayer):
            self.stock.forget_buffers()

    def get_seq_length(self) -> int:
        return self.rows.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        start = self.rows.visible_from(self.window)
        return self.rows.longest + query_length - start, start

    def arrange(self, swaps: list[tuple[int, int]]) -> None:
        """Exchange the places of sequences, in place: a long cache is not held twice."""
        for buffer in (self.keys, self.values):
            for one, other in swaps:
                kept = buffer[one].clone()
                buffer[one] = buffer[other]
                buffer[other] = kept

    def release(self, length: int) -> DynamicLayer:
        """The layer of transformers with `length` columns, or as many of them as it keeps."""
        start = self.first if self.window is None else max(length - self.window + 1, self.first)
        seen = slice(start - self.first, length - self.first)
        self.stock.keys, self.stock.values = self.keys[:, :, seen], self.values[:, :, seen]
        if self.window is not None:
            self.stock.cumulative_length = length
        return self.stock


class TargetRows:
    r"""
    The sequences of a batch in one target cache. A context manager: inside it the cache's layers are [`RaggedLayer`]s.

    Args:
        target (`PreTrainedModel`): The target; says what masks its attention reads.
        cache (`Cache`): Prefilled.
        prompt_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): False for padding.

    Raises:
        `ValueError`: if the cache or the target's attention cannot hold sequences of different progress.

    `ends` has the committed columns of every running sequence. Running sequences come first; `order` names the sequence
    of the batch in each place. `length` is the longest that any sequence became.
    """

    def __init__(self, target: PreTrainedModel, cache: Cache, prompt_mask: torch.Tensor | None = None):
        check_rows(target, cache)
        self.cache, self.device, self.dtype = cache, target.device, target.dtype
        self.additive = target.config.get_text_config(decoder=True)._attn_implementation == "eager"
        self.length = int(cache.get_seq_length())
        batch_size = next(layer.keys.shape[0] for layer in cache.layers if layer.is_initialized)
        self.ends = [self.length] * batch_size
        self.order = list(range(batch_size))
        self.finished: dict[int, int] = {}  # columns of sequences that stepped aside
        config = target.config.get_text_config(decoder=True)
        self._attention_window = getattr(config, "sliding_window", None)
        self._layer_types = getattr(config, "layer_types", None)
        self._columns: dict[tuple, torch.LongTensor] = {}
        self._padding: torch.Tensor | None = None
        if prompt_mask is not None and not bool(prompt_mask[:, : self.length].all()):
            self._padding = ~prompt_mask[:, : self.length].to(device=self.device, dtype=torch.bool)

    def __enter__(self) -> "TargetRows":
        stock = self.cache.layers
        try:
            self.cache.layers = [RaggedLayer(y, self) if y.is_initialized else y for y in stock]
            return self
        except BaseException:
            self.cache.layers = stock
            raise

    def __exit__(self, error: Any, *_: Any) -> None:
        whole = False
        try:
            self._restore_order()
            if error is not None:
                # What all sequences have: a user who goes on from this cache passes the rest again.
                self.length = min([*self.ends, *self.finished.values()])
            layers = [layer for layer in self.cache.layers if isinstance(layer, RaggedLayer)]
            lost = any(layer.first > max(self.length - (layer.window or 0) + 1, 0) for layer in layers)
            whole = error is None or not lost
        finally:
            released = [y.release(self.length) if isinstance(y, RaggedLayer) else y for y in self.cache.layers]
            self.cache.layers = released
            if not whole:
                self.cache.reset()

    def _restore_order(self) -> None:
        swaps = []
        for place in range(len(self.order)):
            while self.order[place] != place:
                other = self.order[place]
                self.order[place], self.order[other] = self.order[other], self.order[place]
                swaps.append((place, other))
        for layer in self.cache.layers:
            if isinstance(layer, RaggedLayer):
                layer.arrange(swaps)

    @property
    def longest(self) -> int:
        """Columns of the running sequence that is farthest."""
        return max(self.ends)

    @property
    def even(self) -> bool:
        """Whether all running sequences are equally far."""
        return min(self.ends) == max(self.ends)

    def visible_from(self, window: int | None) -> int:
        """The first column that a new row of some running sequence may see."""
        return 0 if window is None else max(min(self.ends) - window + 1, 0)

    def new_columns(self, num_new: int, device: torch.device) -> torch.LongTensor:
        """Where the next rows go, `(running, num_new)`."""
        key = (num_new, device)
        if key not in self._columns:
            ends = torch.tensor(self.ends, device=device)
            self._columns[key] = ends[:, None] + torch.arange(num_new, device=device)
        return self._columns[key]

    def masks(self, num_new: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """
        What the next `num_new` rows of every running sequence may see, in the form that the target's attention reads:
        `(running, 1, num_new, columns)`, by layer type where the target has more than one.
        """
        kinds: dict[str, tuple[int | None, int | None]] = {}
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, RaggedLayer):
                # A cache made without the target's config holds all rows of layers that attend to a window only.
                slides = layer.is_sliding or self._attention_window is not None
                kind = (
                    self._layer_types[index] if self._layer_types else ("full_attention", "sliding_attention")[slides]
                )
                window = None if kind == "full_attention" else layer.window or self._attention_window
                kinds[kind] = (layer.window, window)
        masks = {kind: self._mask(num_new, *windows) for kind, windows in kinds.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, num_new: int, held: int | None, window: int | None) -> torch.Tensor:
        start = self.visible_from(held)
        columns = torch.arange(start, self.longest + num_new, device=self.device)
        queries = self.new_columns(num_new, self.device)[:, :, None]
        seen = columns <= queries
        if window is not None:
            seen &= columns > queries - window
        if self._padding is not None and start < self._padding.shape[1]:
            padding = self._padding[self.order[: len(self.ends)], None, start:]
            seen[:, :, : padding.shape[2]] &= ~padding
        seen = seen[:, None]
        if not self.additive:
            return seen
        return torch.zeros_like(seen, dtype=self.dtype).masked_fill(~seen, torch.finfo(self.dtype).min)

    def commit(self, kept: list[int]) -> None:
        """Say how many of the last rows of every running sequence were accepted."""
        self.ends = [end + number for end, number in zip(self.ends, kept)]
        self.length = max(self.length, *self.ends)
        self._columns.clear()

    def retire(self, finished: list[int]) -> list[int]:
        """
        Let sequences step aside: later rounds run without them.

        Args:
            finished (`list[int]`): Their places.

        Returns:
            `list[int]`: the places that the sequences left running had before.
        """
        left = len(self.ends) - len(finished)
        holes = [place for place in finished if place < left]
        movers = [place for place in range(left, len(self.ends)) if place not in finished]
        swaps = list(zip(holes, movers))
        self.finished |= {self.order[place]: self.ends[place] for place in finished}
        before = list(range(len(self.ends)))
        for hole, mover in swaps:
            before[hole] = mover
            self.order[hole], self.order[mover] = self.order[mover], self.order[hole]
        for layer in self.cache.layers:
            if isinstance(layer, RaggedLayer):
                layer.arrange(swaps)
        self.ends = [self.ends[place] for place in before[:left]]
        self._columns.clear()
        return before[:left]


def check_rows(target: PreTrainedModel, cache: Cache) -> None:
    """Raise `ValueError` if sequences of a batch cannot progress at their own pace in this cache."""
    fit = (DynamicLayer, InPlaceLayer, DynamicSlidingWindowLayer)
    unfit = {type(layer).__name__ for layer in cache.layers if type(layer) not in fit}
    if unfit or getattr(cache, "offloading", False):
        raise ValueError(
            f"A batch with `assistant_model` needs a `DynamicCache`, the default, for the target; got "
            f"{', '.join(sorted(unfit)) or 'an offloaded cache'}. Pass one sequence at a time, or no cache."
        )
    config = target.config.get_text_config(decoder=True)
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"A batch with `assistant_model` needs a target with `attn_implementation` 'sdpa' or 'eager', got "
            f"'{config._attn_implementation}': its sequences progress at their own pace, which takes a mask of its own. Call "
            "`target.set_attn_implementation('sdpa')` first, or pass one sequence at a time."
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(
            f"A batch with `assistant_model` needs full or sliding attention in every layer; {type(target).__name__} has "
            f"{', '.join(sorted(kinds))}. Pass one sequence at a time."
        )
