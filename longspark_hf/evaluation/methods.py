"""What the context sweep compares: drafters and target caches as a prefill of some length would leave them.

Knows: how to make LongSpark drafters and the DFlash drafters of transformers for a target, and one drafting step of each.
Does not know: what is timed, how often, or what becomes of the numbers (sweep).
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from longspark_hf import LongSparkCache, LongSparkConfig, LongSparkDrafter
from longspark_hf.inplace_longspark import with_spare
from longspark_hf.target_longspark import BorrowedTarget


# Named with what happens to its state: the two peers are easily confused.
METHODS = {
    "longspark": "LongSpark (fixed state)",
    "window": "LongSpark without summary",
    "dflash": "DFlash, full attention (grows)",
    "dflash_sliding": "DFlash, sliding window",
}
# What a round commits before the next draft, the same for all methods: the anchor and three accepted tokens.
COMMITTED_ROWS = 4
DFLASH_BLOCK_SIZE = 8  # the anchor and seven drafts
DFLASH_SLIDING_WINDOW = 2048  # the default of transformers
ROWS_PER_STEP = 4096


def random_rows(num_heads: int, num_rows: int, head_dim: int, like: torch.Tensor) -> torch.Tensor:
    """Random key or value rows, `(1, num_heads, num_rows, head_dim)`; long ones repeat, which costs nothing to make."""
    rows = torch.randn(1, num_heads, min(num_rows, ROWS_PER_STEP), head_dim, dtype=like.dtype, device=like.device)
    if num_rows <= ROWS_PER_STEP:
        return rows
    return rows.repeat(1, 1, -(-num_rows // ROWS_PER_STEP), 1)[:, :, :num_rows]


class HeldLayer(DynamicLayer):
    """A target's cached rows that stay as they are: a pass attends over them and its own, and leaves nothing behind."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any):
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


class HeldInPlaceLayer(HeldLayer):
    """The same for a cache that appends in place: new rows are written behind, over what is there."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int):
        super().__init__(keys[:, :, :length], values[:, :, :length])
        self.buffers = keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any):
        start, end = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, start:end] = new
        keys, values = self.buffers
        return keys[:, :, :end], values[:, :, :end]


def held_caches(target: PreTrainedModel, contexts: list[int]) -> dict[tuple[str, int], Cache]:
    """A `"stock"` and an `"in_place"` target cache of every length; the shorter ones are the beginning of the longest."""
    config, like = target.config, next(target.parameters())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = [
        [
            random_rows(config.num_key_value_heads, with_spare(max(contexts)), head_dim, like)
            for _ in ("keys", "values")
        ]
        for _ in range(config.num_hidden_layers)
    ]
    caches = {}
    for context in contexts:
        stock = [HeldLayer(keys[:, :, :context], values[:, :, :context]) for keys, values in rows]
        caches["stock", context] = Cache(layers=stock)
        caches["in_place", context] = Cache(layers=[HeldInPlaceLayer(*pair, context) for pair in rows])
    return caches


def synthetic_state(drafter: LongSparkDrafter, num_rows: int) -> LongSparkCache:
    """A drafter state that has absorbed `num_rows` random rows, as a prefill of that length would leave it."""
    config, state = drafter.config, drafter.new_cache()
    weight = drafter.summary_queries
    for start in range(0, num_rows, ROWS_PER_STEP):
        size = min(ROWS_PER_STEP, num_rows - start)
        rows = random_rows(config.num_key_value_heads, size, config.head_dim, weight)
        for layer in range(config.num_hidden_layers):
            state.update(rows, rows, layer)
    shape = (1, config.num_hidden_layers, config.hidden_size)
    state.set_boundary(torch.randn(shape, dtype=weight.dtype, device=weight.device))
    return state


class LongSparkMethod:
    r"""
    A LongSpark drafter with a state for every context. Its drafts are verified in a cache that appends in place.

    Args:
        drafter ([`LongSparkDrafter`]): On the target's device.
        target (`PreTrainedModel`): The target.
        contexts (`list[int]`): Rows that each state has absorbed.
    """

    def __init__(self, drafter: LongSparkDrafter, target: PreTrainedModel, contexts: list[int]):
        self.drafter, self.borrowed = drafter, BorrowedTarget.of(target, drafter.config)
        self.verified_tokens, self.verified_in = drafter.config.block_size + 1, "in_place"
        self.states = {context: synthetic_state(drafter, context) for context in contexts}
        config, weight = drafter.config, drafter.summary_queries
        self._rows = random_rows(config.num_key_value_heads, COMMITTED_ROWS, config.head_dim, weight)
        self._boundary = torch.randn(
            1, config.num_hidden_layers, config.hidden_size, dtype=weight.dtype, device=weight.device
        )
        self._anchor = torch.ones(1, dtype=torch.long, device=weight.device)

    @torch.no_grad()
    def draft(self, context: int) -> torch.Tensor:
        """What happens between two verifications: committed rows are absorbed, a block is drafted."""
        state = self.states[context]
        for layer in range(self.drafter.config.num_hidden_layers):
            state.update(self._rows, self._rows, layer)
        state.set_boundary(self._boundary)
        return self.drafter.draft(self._anchor, state.layers[0].num_rows, state, self.borrowed).token_ids

    def restore(self, context: int) -> None:
        """Nothing to do: a few rows more change neither size nor cost of the state."""

    def state_bytes(self, context: int) -> int:
        return self.states[context].nbytes

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.drafter.parameters())


class DFlashMethod:
    r"""
    The DFlash path of transformers: its own candidate generator, with a drafter cache for every context.

    Args:
        drafter (`PreTrainedModel`): From [`dflash_drafter`], on the target's device.
        target (`PreTrainedModel`): The target.
        contexts (`list[int]`): Rows that each cache holds, or has seen where its window slides.
    """

    def __init__(self, drafter: PreTrainedModel, target: PreTrainedModel, contexts: list[int]):
        self.drafter, self.verified_tokens, self.verified_in = drafter, drafter.config.block_size, "stock"
        self.generators = {context: self._generator(target, context) for context in contexts}
        self._held = {context: self._tensors(context) for context in contexts}
        weight = drafter.norm.weight
        hidden = torch.randn(1, COMMITTED_ROWS, drafter.config.hidden_size, dtype=weight.dtype, device=weight.device)
        # The same for every layer, which transformers counts from the embeddings on in 5.24, and not in 5.18.
        self._outputs = SimpleNamespace(hidden_states=defaultdict(lambda: hidden))
        # Until the first draft nothing was committed yet; afterwards the cache stands as after any round.
        self._bytes: dict[int, int] = {}

    def _generator(self, target: PreTrainedModel, context: int) -> Any:
        from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

        generator = DFlashTokenCandidateGenerator(
            self.drafter,
            target.get_input_embeddings(),
            target.get_output_embeddings(),
            GenerationConfig(max_length=2 * context + 1024, do_sample=False),
        )
        config, weight = self.drafter.config, self.drafter.norm.weight
        for layer in generator.cache.layers:
            kept = min(context, config.sliding_window - 1) if layer.is_sliding else context
            rows = random_rows(config.num_key_value_heads, kept, config.head_dim, weight)
            layer.update(rows, rows)
            if layer.is_sliding:
                layer.cumulative_length = context
            # The block of the draft before, which the next one removes first.
            block = random_rows(config.num_key_value_heads, config.block_size, config.head_dim, weight)
            layer.update(block, block)
        generator.is_main_model_prefill = False
        return generator

    def _tensors(self, context: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        layers = self.generators[context].cache.layers
        return [(layer.keys, layer.values, getattr(layer, "cumulative_length", 0)) for layer in layers]

    @torch.no_grad()
    def draft(self, context: int) -> torch.Tensor:
        """What happens between two verifications: committed rows are projected and cached, a block is drafted."""
        length = context + COMMITTED_ROWS + 1
        device = self.drafter.device
        candidates, _ = self.generators[context].get_candidates(
            torch.ones(1, length, dtype=torch.long, device=device),
            model_kwargs={"position_ids": torch.arange(length, device=device)[None], "attention_mask": None},
            model_outputs=self._outputs,
            is_first_iteration=False,
            n_last_matches=COMMITTED_ROWS - 1,
        )
        return candidates

    def restore(self, context: int) -> None:
        """Back to `context` rows, so that repeats are alike."""
        self._bytes[context] = sum(keys.nbytes + values.nbytes for keys, values, _ in self._tensors(context))
        for layer, (keys, values, length) in zip(self.generators[context].cache.layers, self._held[context]):
            layer.keys, layer.values = keys, values
            if layer.is_sliding:
                layer.cumulative_length = length

    def state_bytes(self, context: int) -> int:
        """Of the drafter's K/V cache as it stands after a draft."""
        return self._bytes[context]

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.drafter.parameters())


def dflash_drafter(target: PreTrainedModel, config: LongSparkConfig, sliding: bool = False) -> PreTrainedModel:
    r"""
    A DFlash drafter of transformers of the same shape as a LongSpark drafter, with random weights.

    Args:
        target (`PreTrainedModel`): The target; the drafter gets its device and dtype.
        config ([`LongSparkConfig`]): Gives layers, widths, heads and the target layers that are read.
        sliding (`bool`, *optional*, defaults to `False`):
            Whether its layers attend a sliding window, as the default of transformers, or the whole context.

    Raises:
        `ValueError`: if the installed transformers has none.
    """
    try:
        from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    except ImportError as error:
        raise ValueError(
            "The installed transformers has no DFlash drafter to compare with. Leave out the methods `dflash` and "
            "`dflash_sliding`."
        ) from error
    kind = "sliding_attention" if sliding else "full_attention"
    dflash_config = MuseGlimmerAssistantConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        block_size=DFLASH_BLOCK_SIZE,
        mask_token_id=config.mask_token_id,
        target_layer_ids=list(config.target_layer_ids),
        layer_types=[kind] * config.num_hidden_layers,
        sliding_window=DFLASH_SLIDING_WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=config.max_position_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(target.device):
        drafter = MuseGlimmerAssistantModel(dflash_config)
    return drafter.to(target.device, target.dtype).eval()


def longspark_drafter(target: PreTrainedModel, config: LongSparkConfig) -> LongSparkDrafter:
    """A LongSpark drafter of a config, with random weights, on the target's device and in its dtype."""
    torch.manual_seed(0)
    with torch.device(target.device):
        drafter = LongSparkDrafter(config)
    return drafter.to(target.device, target.dtype).eval()


def make_drafters(target: PreTrainedModel, config: LongSparkConfig, methods: list[str]) -> dict[str, PreTrainedModel]:
    """The drafter of every method; those of one family share their weights."""
    drafters: dict[str, PreTrainedModel] = {}
    for name in methods:
        if name.startswith("dflash"):
            drafter = dflash_drafter(target, config, sliding=name == "dflash_sliding")
        else:
            fields = {**config.to_dict(), "num_summary_queries": 0} if name == "window" else config.to_dict()
            drafter = longspark_drafter(target, LongSparkConfig.from_dict(fields))
        for other in drafters.values():
            if type(other) is type(drafter):
                same = {k: v for k, v in other.state_dict().items() if v.shape == drafter.state_dict()[k].shape}
                drafter.load_state_dict(same, strict=False, assign=True)
        drafters[name] = drafter
    return drafters


def make_method(
    drafter: PreTrainedModel, target: PreTrainedModel, contexts: list[int]
) -> LongSparkMethod | DFlashMethod:
    """A drafter ready to draft at every context."""
    kind = LongSparkMethod if isinstance(drafter, LongSparkDrafter) else DFlashMethod
    return kind(drafter, target, contexts)
