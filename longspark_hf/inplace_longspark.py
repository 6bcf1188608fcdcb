"""A target's cache that appends in place, where the stock one copies all its rows in every forward.

Knows: buffers with spare columns, and that whoever reads a layer sees exactly the rows that were written.
Does not know: sequences of different progress (rows_longspark), or what the rows are for.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


# Spare columns of a buffer when it is made: one in so many of those it holds, and at least so many. It is made anew where it
# has twice as many.
SPARE_ONE_IN, SPARE_COLUMNS = 16, 32


def with_spare(columns: int, times: int = 1) -> int:
    """Columns of a buffer that has to hold `columns` now."""
    return columns + times * max(columns // SPARE_ONE_IN, SPARE_COLUMNS)


class InPlaceLayer(DynamicLayer):
    """
    A layer of full attention that appends in place. `keys` and `values`, of shape `(batch_size, num_heads, length,
    head_dim)`, are views of what is written; replaced by other tensors, as in a reordered batch, they are copied once.
    """

    def __init__(self):
        super().__init__()
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # each with the view that is handed out

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        """Append rows of shape `(batch_size, num_heads, num_new, head_dim)`; returns all keys and all values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        others = self.get_seq_length() and self.keys.shape[:2] != key_states.shape[:2]
        if torch.is_grad_enabled() or others:
            # Autograd keeps what was handed out before. Rows that do not fit meet the stock error.
            keys_and_values = super().update(key_states, value_states, *args, **kwargs)
            self.forget_buffers()
            return keys_and_values
        self.keys, self.values = self._append("keys", key_states), self._append("values", value_states)
        return self.keys, self.values

    def _append(self, name: str, new: torch.Tensor) -> torch.Tensor:
        held = getattr(self, name)
        length = self.get_seq_length() if held.numel() else 0
        end, dtype = length + new.shape[2], torch.promote_types(held.dtype, new.dtype)
        buffer, view = self._buffers.get(name, (held, None))
        ours = view is held and buffer.dtype == dtype
        frozen = buffer.is_inference() and not torch.is_inference_mode_enabled()  # torch forbids to write there now
        if not ours or frozen or not end <= buffer.shape[2] <= with_spare(end, times=2):
            buffer = held.new_empty((*new.shape[:2], with_spare(end), new.shape[3]), dtype=dtype)
            if length:
                buffer[:, :, :length] = held
        buffer[:, :, length:end] = new
        view = buffer[:, :, :end]
        self._buffers[name] = (buffer, view)
        return view

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` rows."""
        before = {name: getattr(self, name) for name in self._buffers}
        super().crop(tokens_to_remove)
        for name, (buffer, view) in self._buffers.items():
            if view is before[name]:
                self._buffers[name] = (buffer, getattr(self, name))

    def forget_buffers(self) -> None:
        """Let go of all memory that `keys` and `values` do not hold."""
        self._buffers.clear()

    def reset(self) -> None:
        """Forget all rows."""
        super().reset()
        self.forget_buffers()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Put the sequences of the batch in another order."""
        super().reorder_cache(beam_idx)
        self.forget_buffers()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        super().batch_repeat_interleave(repeats)
        self.forget_buffers()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences of the batch."""
        super().batch_select_indices(indices)
        self.forget_buffers()


class InPlaceCache(DynamicCache):
    r"""
    A `DynamicCache` whose layers of full attention append in place. Any `generate` takes it, with a drafter or without:
    `target.generate(**inputs, cache=InPlaceCache(target.config))`. Sliding layers are those of transformers.

    Args:
        config (`PreTrainedConfig`, *optional*): Of the model, for its kinds of layers.

    A forward without gradients then writes its own rows alone, where `DynamicCache` copies all of them. After it, an eighth
    of the columns is spare at most, or 64.
    """

    def __init__(self, config: PreTrainedConfig | None = None):
        super().__init__(config=config)
        self.layers = [InPlaceLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = InPlaceLayer


@contextlib.contextmanager
def appending_in_place(cache: Cache) -> Iterator[None]:
    """
    Within it, the stock layers of full attention of a cache append in place, be they there already or to come. They stay
    the objects they are, and behind it they are stock layers again, with their rows.

    Args:
        cache (`Cache`): Of a target; any layers but `DynamicLayer` are left as they are.
    """
    theirs = {id(layer) for layer in cache.layers if type(layer) is InPlaceLayer}
    replicated = cache.layer_class_to_replicate
    try:
        if not getattr(cache, "offloading", False):
            for layer in cache.layers:
                if type(layer) is DynamicLayer:
                    layer._buffers = {}
                    layer.__class__ = InPlaceLayer
            if replicated is DynamicLayer:
                cache.layer_class_to_replicate = InPlaceLayer
        yield
    finally:
        cache.layer_class_to_replicate = replicated
        for layer in cache.layers if replicated is not InPlaceLayer else ():
            if id(layer) not in theirs and type(layer) in (DynamicLayer, InPlaceLayer):
                layer.__class__ = DynamicLayer
                vars(layer).pop("_buffers", None)
