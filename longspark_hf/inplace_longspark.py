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


# Spare columns of a buffer: one in so many of those it holds, and at least so many.
SPARE_ONE_IN, SPARE_COLUMNS = 16, 32


def with_spare(columns: int) -> int:
    """Columns of a buffer that has to hold `columns` now."""
    return columns + max(columns // SPARE_ONE_IN, SPARE_COLUMNS)


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
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(
                key_states, value_states, *args, **kwargs
            )  # autograd keeps what was handed out before
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._append("keys", key_states), self._append("values", value_states)
        return self.keys, self.values

    def _append(self, name: str, new: torch.Tensor) -> torch.Tensor:
        held = getattr(self, name)
        length = self.get_seq_length() if held.numel() else 0
        end = length + new.shape[2]
        buffer, view = self._buffers.get(name, (held, None))
        frozen = buffer.is_inference() and not torch.is_inference_mode_enabled()  # torch forbids to write there now
        if view is not held or end > buffer.shape[2] or frozen:
            buffer = held.new_empty((*new.shape[:2], with_spare(end), new.shape[3]))
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

    def reset(self) -> None:
        """Forget all rows."""
        self.forget_buffers()
        super().reset()

    def forget_buffers(self) -> None:
        """Let go of all memory that `keys` and `values` do not hold."""
        self._buffers.clear()


class InPlaceCache(DynamicCache):
    r"""
    A `DynamicCache` whose layers of full attention append in place. Any `generate` takes it, with a drafter or without:
    `target.generate(**inputs, cache=InPlaceCache(target.config))`. Sliding layers are those of transformers.

    Args:
        config (`PreTrainedConfig`, *optional*): Of the model, for its kinds of layers.

    A forward then writes its own rows alone, where `DynamicCache` copies all of them. At most 1/16 of the columns, or 32,
    are spare.
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
    adopts = not getattr(cache, "offloading", False)
    adopted = [layer for layer in cache.layers if adopts and type(layer) is DynamicLayer]
    replicated = cache.layer_class_to_replicate
    for layer in adopted:
        layer.__class__, layer._buffers = InPlaceLayer, {}
    if adopts and replicated is DynamicLayer:
        cache.layer_class_to_replicate = InPlaceLayer
    try:
        yield
    finally:
        if cache.layer_class_to_replicate is not replicated:
            cache.layer_class_to_replicate = replicated
            adopted = [layer for layer in cache.layers if type(layer) is InPlaceLayer]
        for layer in adopted:
            layer.__class__ = DynamicLayer
            del layer._buffers
