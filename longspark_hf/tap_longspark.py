"""The tap: takes the drafter's views from the target's own passes, and leaves nothing behind.

Knows: how to read key/value rows as the target writes them, hidden states as its layers emit them, and how to resume
from a cache filled by an earlier call.
Does not know: what is drafted (modeling_longspark) or when a round ends (generation_longspark).
"""

import threading
import types
import weakref
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils import logging

from .cache_longspark import LongSparkCache
from .configuration_longspark import LongSparkConfig
from .target_longspark import BorrowedTarget


logger = logging.get_logger(__name__)

# Rounds whose committed rows may wait for the next draft.
MOST_PENDING = 16
# The state of a finished call travels with the user's cache under this name, through `copy.deepcopy` too.
STATE_ATTRIBUTE = "longspark_state"


def to_device(values: list, device: torch.device) -> torch.Tensor:
    """A tensor of host values on a device, without waiting for the device."""
    return torch.tensor(values).to(device, non_blocking=True)


class TargetTap:
    r"""
    Fills a [`LongSparkCache`] from a target's passes over one target cache. A context manager: hooks and the tapped
    `update` exist inside it only, whatever happens.

    Rows are taken in the call to `Cache.update` of a selected layer. The layer output that follows on the same thread is
    then known to belong to a pass over our cache, so nested or concurrent calls on the same target never mix.

    Args:
        borrowed ([`BorrowedTarget`]): Of the target.
        config ([`LongSparkConfig`]): Of the drafter.
        target_cache (`Cache`): The cache the target writes in this call.
        state ([`LongSparkCache`]): To be filled; holds the rows already in `target_cache`.
        row_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*):
            True for the rows of the prompt that are not padding, counted from the first row of `target_cache`.

    Until the first [`~TargetTap.commit`] every row is committed and folded at once (prefill, in one pass or many); later
    passes wait for `commit` to say how many of their rows were accepted.
    """

    def __init__(
        self,
        borrowed: BorrowedTarget,
        config: LongSparkConfig,
        target_cache: Cache,
        state: LongSparkCache,
        row_mask: torch.Tensor | None = None,
    ):
        self.target_cache, self._state = target_cache, state
        self.prefilling = True
        self._borrowed = borrowed
        self._draft_layer = {layer_id: index for index, layer_id in enumerate(config.target_layer_ids)}
        self._num_kv_heads = config.num_key_value_heads
        self._row_mask = row_mask
        self._next_row = dict.fromkeys(self._draft_layer, int(target_cache.get_seq_length()))
        self._thread = threading.get_ident()
        self._awaited: int | None = None
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._boundary: list[torch.Tensor] | None = None
        self._pending: list[tuple[list[int], dict[int, tuple[torch.Tensor, torch.Tensor]]]] = []
        self._handles: list[Any] = []
        self._user_update: Any = None

    def __enter__(self) -> "TargetTap":
        try:
            last = len(self._borrowed.layers) - 1
            for layer_id in self._draft_layer:
                # The last layer's boundary is the state after the final norm, all others are raw (format file, trap 3).
                module = self._borrowed.final_norm if layer_id == last else self._borrowed.layers[layer_id]
                self._handles.append(module.register_forward_hook(self._output_hook(layer_id)))
            self._user_update = self.target_cache.__dict__.get("update")
            self.target_cache.update = self._tapped_update()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.target_cache.__dict__.pop("update", None)
        if self._user_update is not None:
            self.target_cache.update = self._user_update
        self._rows.clear()
        self._hidden.clear()

    def _output_hook(self, layer_id: int):
        tap_reference = weakref.ref(self)

        @torch.compiler.disable  # a compiled target breaks its graph here rather than trace us
        def keep_hidden_states(_module: Any, _args: Any, output: Any) -> None:
            tap = tap_reference()
            if tap is None or tap._awaited != layer_id or tap._thread != threading.get_ident():
                return
            tap._awaited = None
            hidden_states = output[0] if isinstance(output, tuple) else output
            # A clone: a view of the last row would keep the hidden states of the whole prompt alive.
            kept = hidden_states[:, -1:] if tap.prefilling else hidden_states
            tap._hidden[layer_id] = kept.detach().clone()

        return keep_hidden_states

    def _tapped_update(self):
        tap_reference, user_update = weakref.ref(self), self._user_update

        def update(
            cache: Cache, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
        ):
            tap = tap_reference()
            # A deep copy of the cache made during the call carries this method, but is not tapped.
            if tap is None or cache is not tap.target_cache:
                return type(cache).update(cache, key_states, value_states, layer_idx, *args, **kwargs)
            if layer_idx in tap._draft_layer and tap._thread == threading.get_ident():
                tap._take_rows(layer_idx, key_states.detach(), value_states.detach())
            if user_update is not None:
                return user_update(key_states, value_states, layer_idx, *args, **kwargs)
            return type(cache).update(cache, key_states, value_states, layer_idx, *args, **kwargs)

        return types.MethodType(update, self.target_cache)

    def _take_rows(self, layer_id: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.shape[1] != self._num_kv_heads:
            raise ValueError(
                f"Target layer {layer_id} caches {keys.shape[1]} key/value heads, but the drafter expects "
                f"{self._num_kv_heads}, the target config's `num_key_value_heads`. This architecture is not supported."
            )
        self._awaited = layer_id
        if not self.prefilling:
            self._rows[layer_id] = (keys.clone(), values.clone())
            return
        first = self._next_row[layer_id]
        self._next_row[layer_id] = first + keys.shape[2]
        mask = None if self._row_mask is None else self._row_mask[:, first : first + keys.shape[2]]
        self._state.update(keys, values, self._draft_layer[layer_id], mask)

    def commit(self, num_rows: list[int] | None = None) -> None:
        r"""
        Say how many rows of the last pass were accepted; they become the drafter's state.

        Args:
            num_rows (`list[int]`, *optional*):
                Anchor plus accepted drafts of each sequence. Left out after the prefill, which commits itself.

        Raises:
            `ValueError`: if a selected layer wrote no rows or emitted no hidden states.
        """
        silent = [layer_id for layer_id in self._draft_layer if layer_id not in self._hidden]
        if silent:
            raise ValueError(
                f"Target layers {silent} wrote no key/value rows to the cache in this pass, so the drafter cannot read "
                "them. Choose `target_layer_ids` among the target's attention layers that keep a cache of their own."
            )
        hidden = [self._hidden[layer_id] for layer_id in self._draft_layer]
        if num_rows is None:
            self._boundary = [states[:, -1] for states in hidden]
        else:
            # Chosen where they are: a target may be spread over devices, and the drafter sit on another one.
            last = [to_device(num_rows, states.device) - 1 for states in hidden]
            self._boundary = [states[torch.arange(len(states)), at] for states, at in zip(hidden, last)]
            kept = {i: (k[:, :, : max(num_rows)], v[:, :, : max(num_rows)]) for i, (k, v) in self._rows.items()}
            self._pending.append((num_rows, kept))
        self.prefilling = False
        self._row_mask = None
        self._rows.clear()
        self._hidden.clear()
        if num_rows is None or len(self._pending) == MOST_PENDING:
            self._settle()

    @property
    def state(self) -> LongSparkCache:
        """The drafter's state with all that was committed."""
        self._settle()
        return self._state

    def _settle(self) -> None:
        # Rows of several rounds cost little more than those of one, so rounds without a draft leave theirs for later.
        if self._boundary is not None:
            device = self._boundary[-1].device
            self._state.set_boundary(torch.stack([states.to(device) for states in self._boundary], dim=1))
            self._boundary = None
        if not self._pending:
            return
        counts, rows = zip(*self._pending)
        self._pending.clear()
        even = all(len(set(numbers)) == 1 for numbers in counts)
        for layer_id, index in self._draft_layer.items():
            keys, values = (torch.cat(parts, dim=2) for parts in zip(*(kept[layer_id] for kept in rows)))
            mask = None
            if not even:
                masks = [
                    torch.arange(max(numbers), device=keys.device) < to_device(numbers, keys.device)[:, None]
                    for numbers in counts
                ]
                mask = torch.cat(masks, dim=1)
            self._state.update(keys, values, index, mask)


def held_rows(target_cache: Cache, layer_id: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """
    The key/value rows a target cache layer still holds, and the index of the first.

    Args:
        target_cache (`Cache`): Dynamic or static; sliding layers hold their last rows only.
        layer_id (`int`): Index of the layer.

    Returns:
        `tuple(torch.Tensor, torch.Tensor, int)`: keys and values of shape `(batch_size, num_key_value_heads, n, head_dim)`.
    """
    layer = target_cache.layers[layer_id]
    length = int(layer.get_seq_length())
    # Static layers are longer than what was written; dynamic sliding layers shorter.
    held = min(length, layer.keys.shape[2])
    return layer.keys[:, :, :held], layer.values[:, :, :held], length - held


def leave_state(target_cache: Cache, state: LongSparkCache, config: LongSparkConfig) -> None:
    """Attach a finished call's state to its target cache, for the next turn on that cache or a deep copy of it."""
    setattr(target_cache, STATE_ATTRIBUTE, (state, list(config.target_layer_ids), int(target_cache.get_seq_length())))


def take_state(target_cache: Cache, fresh: LongSparkCache, config: LongSparkConfig) -> tuple[LongSparkCache, int]:
    r"""
    The state left on a target cache if it belongs to the rows that are in it now. Removes it from there: the call that
    follows changes both, and leaves it again when it ends well.

    Args:
        target_cache (`Cache`): The target's cache.
        fresh ([`LongSparkCache`]): An empty state of the drafter that asks.
        config ([`LongSparkConfig`]): Of that drafter.

    Returns:
        `tuple(LongSparkCache, int)`: the state, and how many rows of `target_cache` it covers; `fresh` and 0 otherwise.
    """
    state, layer_ids, length = target_cache.__dict__.pop(STATE_ATTRIBUTE, (None, None, 0))
    if state is None or layer_ids != config.target_layer_ids or state.dtype != fresh.dtype:
        return fresh, 0
    if max(layer_ids) == 0:
        return fresh, 0  # keys of the first layer know nothing of the tokens before them, see below
    if state.boundary.is_inference() and not torch.is_inference_mode_enabled():
        return fresh, 0  # torch forbids to update it in place now
    same_queries = all(
        mine.summary_queries.device == other.summary_queries.device
        and mine.summary_queries.dtype == other.summary_queries.dtype
        and mine.window_size == other.window_size
        and torch.equal(mine.summary_queries, other.summary_queries)
        for mine, other in zip(fresh.layers, state.layers, strict=True)
    )
    if not same_queries or length > int(target_cache.get_seq_length()):
        return fresh, 0
    # Keys of a deep layer depend on every token before them: equal recent keys mean the same prefix. A cache cropped or
    # refilled between the calls fails this.
    index, layer_id = max(enumerate(config.target_layer_ids), key=lambda pair: pair[1])
    keys, _, first = held_rows(target_cache, layer_id)
    layer, num_rows = state.layers[index], state.layers[index].get_seq_length()
    recent = min(num_rows, layer.window_size, length - first)
    slots = torch.arange(num_rows - recent, num_rows, device=layer.keys.device) % layer.window_size
    expected = keys[:, :, length - first - recent : length - first].to(layer.keys)
    if recent <= 0 or layer.keys.shape[:2] != expected.shape[:2] or not torch.equal(layer.keys[:, :, slots], expected):
        return fresh, 0
    return state, length


def holds_rows_from(target_cache: Cache, config: LongSparkConfig, start: int) -> bool:
    """Whether every selected layer of a filled target cache still holds all rows from `start` on."""
    return all(held_rows(target_cache, layer_id)[2] <= start for layer_id in config.target_layer_ids)


def absorb_held_rows(
    target_cache: Cache, state: LongSparkCache, config: LongSparkConfig, start: int, row_mask: torch.Tensor | None
) -> None:
    r"""
    Bring a state up to a filled target cache by reading the rows it holds.

    Args:
        target_cache (`Cache`): Filled by earlier calls.
        state ([`LongSparkCache`]): Covers the rows before `start`.
        config ([`LongSparkConfig`]): Of the drafter.
        start (`int`): First row to absorb; rows no longer held are left out.
        row_mask (`torch.Tensor` of shape `(batch_size, length)`, *optional*): False for padding.
    """
    for index, layer_id in enumerate(config.target_layer_ids):
        keys, values, first = held_rows(target_cache, layer_id)
        skip = max(start - first, 0)
        mask = None if row_mask is None else row_mask[:, first + skip : first + keys.shape[2]]
        state.update(keys[:, :, skip:], values[:, :, skip:], index, mask)
