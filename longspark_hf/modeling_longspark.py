"""The LongSpark drafter: one parallel pass over a block, from fixed-size views of the target's prefix.

Knows: what is computed from the views (a `LongSparkCache`) and the modules borrowed from a target (a `BorrowedTarget`).
Does not know: how the views are filled, when a round happens (generation_longspark), or how weights are loaded and saved
(repository_longspark).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LogitsProcessorList, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from .cache_longspark import LongSparkCache, LongSparkCacheLayer
from .configuration_longspark import LongSparkConfig
from .generation_longspark import LongSparkAssistant
from .linear_longspark import few_rows
from .loss_longspark import at_least_fp32, slot_weights, weighted_loss
from .repository_longspark import LongSparkRepository
from .target_longspark import BorrowedTarget, call_borrowed, config_rotary
from .weights_longspark import RELEASED_NAMES


# The fusion blocks keep this epsilon whatever `config.rms_norm_eps` says (format file, section 2.2).
FUSION_EPS = 1e-6


class LongSparkRMSNorm(nn.Module):
    """RMSNorm with statistics in at least fp32, cast back before the weight is applied (format file, trap 6)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.to(at_least_fp32(hidden_states.dtype))
        return self.weight * F.rms_norm(wide, wide.shape[-1:], eps=self.eps).to(hidden_states.dtype)


class LongSparkFusion(nn.Module):
    """`RMSNorm(fc2(SiLU(fc1(x))))`: fuses the boundary states, and a slot's token with the fused boundary."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.fc1 = nn.Linear(input_size, hidden_size, bias=False)
        self.fc2 = nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm = LongSparkRMSNorm(hidden_size, FUSION_EPS)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc2(F.silu(self.fc1(hidden_states))))


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """
    Rotary embedding on the first `rotary_dim` dimensions of every head; the rest passes through.

    Args:
        states (`torch.Tensor` of shape `(batch_size, heads, n, head_dim)`): Queries or keys.
        cos, sin (`torch.Tensor` of shape `(batch_size, n, rotary_dim)`): Half-split angles, as transformers makes them.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated, passed = states.split([cos.shape[-1], states.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, passed], dim=-1)


class LongSparkAttention(nn.Module):
    """
    One softmax over three kinds of keys: summary entries (per query head), window rows, and the block (bidirectional).

    Source: format file, section 2.4; paper, section 3.
    """

    def __init__(self, config: LongSparkConfig):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = LongSparkRMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = LongSparkRMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        summary_queries: torch.Tensor,
        state: LongSparkCacheLayer,
    ) -> torch.Tensor:
        batch_size, block, _ = hidden_states.shape
        heads = (batch_size, block, -1, self.head_dim)
        queries = rotate(self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2), *position_embeddings)
        keys = rotate(self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2), *position_embeddings)
        values = self.v_proj(hidden_states).view(heads).transpose(1, 2)

        # Query heads of a group are consecutive and become rows, so keys and values are never repeated.
        grouped = (batch_size, self.num_kv_heads, -1, self.head_dim)
        rows = queries.reshape(grouped)
        dtype = at_least_fp32(hidden_states.dtype)
        window_scores = (rows @ state.keys.to(rows.dtype).transpose(-1, -2)).to(dtype)
        window_scores = window_scores.masked_fill(~state.window_mask()[:, None, None], -torch.inf)
        summary_scores = (queries @ summary_queries.transpose(-1, -2)).reshape(*rows.shape[:3], -1)
        block_scores = rows @ keys.transpose(-1, -2)
        scores = torch.cat([summary_scores.to(dtype), window_scores, block_scores.to(dtype)], dim=-1)
        weights = (scores * self.head_dim**-0.5).softmax(dim=-1).to(rows.dtype)

        sizes = [summary_scores.shape[-1], window_scores.shape[-1], block]
        summary_weights, window_weights, block_weights = weights.split(sizes, dim=-1)
        output = window_weights @ state.values.to(rows.dtype) + block_weights @ values
        summary_weights = summary_weights.reshape(batch_size, self.num_heads, block, -1)
        output = output.view_as(queries) + summary_weights @ state.summary_values.to(rows.dtype)
        return self.o_proj(output.transpose(1, 2).reshape(batch_size, block, -1))


class LongSparkMLP(nn.Module):
    def __init__(self, config: LongSparkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class LongSparkDraftLayer(GradientCheckpointingLayer):
    """Pre-norm decoder layer whose attention reads the prefix through the views of one target layer."""

    def __init__(self, config: LongSparkConfig):
        super().__init__()
        self.self_attn = LongSparkAttention(config)
        self.mlp = LongSparkMLP(config)
        self.input_layernorm = LongSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LongSparkRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, *views: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), *views)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LongSparkMarkovHead(nn.Module):
    """Low-rank bias on the logits from the previous draft token: `w2(w1[prev])` (format file, section 2.5)."""

    def __init__(self, config: LongSparkConfig):
        super().__init__()
        self.w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        # The predecessor may be any token, the anchor at least; only the proposal is limited to a draft vocabulary.
        self.w2 = nn.Linear(config.markov_rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def forward(self, previous_ids: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w1(previous_ids))


@dataclass
class LongSparkOutput(ModelOutput):
    r"""
    Args:
        hidden_states (`torch.Tensor` of shape `(batch_size, block_size, hidden_size)`):
            Of every slot, after the target's final norm: what the target's head turns into base logits.
        loss (`torch.Tensor` of shape `()`, *optional*): When `labels` were given.
    """

    hidden_states: torch.Tensor | None = None
    loss: torch.Tensor | None = None


@dataclass
class LongSparkDraft(ModelOutput):
    r"""
    Args:
        token_ids (`torch.Tensor` of shape `(batch_size, num_tokens)`): The draft.
        logits (`torch.Tensor` of shape `(batch_size, num_tokens, vocab_size)`):
            Processed, Markov-corrected logits: their softmax is exactly the q that `token_ids` were sampled from.
        finite (`torch.Tensor` of shape `(batch_size,)`): False where a logit was not finite before processing.
        possible (`torch.Tensor` of shape `(batch_size, num_tokens)`): False from such a logit on, and with no token left.
    """

    token_ids: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    finite: torch.Tensor | None = None
    possible: torch.Tensor | None = None


class LongSparkDrafter(LongSparkAssistant, LongSparkRepository, PreTrainedModel):
    r"""
    Block-diffusion drafter with a prefix state of fixed size. Pass it as `assistant_model` to the target's `generate`.

    Args:
        config ([`LongSparkConfig`]): With `mask_token_id` set.

    Raises:
        `ValueError`: if the config lacks `mask_token_id`.

    `stats` describes the most recent finished `generate` call ([`LongSparkStats`]), `None` before the first.

    Example:

    ```python
    drafter = LongSparkDrafter.from_pretrained("Hehy/LongSpark-Qwen3-8B", dtype=torch.bfloat16)
    target.generate(**inputs, assistant_model=drafter)
    ```
    """

    config_class = LongSparkConfig
    main_input_name = "anchor_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LongSparkDraftLayer"]
    weighted_loss = weighted_loss
    _compiled_trunk: Callable[..., torch.Tensor] | None = None

    def __init__(self, config: LongSparkConfig):
        super().__init__(config)
        if config.mask_token_id is None:
            raise ValueError(
                "`config.mask_token_id` is not set. Pass `mask_token_id=` a token id that the target never emits to "
                "`LongSparkConfig.from_target`."
            )
        n, hidden_size = config.num_hidden_layers, config.hidden_size
        self.boundary_fusion = LongSparkFusion(n * hidden_size, hidden_size)
        self.position_embedding = nn.Embedding(config.block_size, hidden_size)
        self.input_mapping = LongSparkFusion(2 * hidden_size, hidden_size)
        self.layers = nn.ModuleList(LongSparkDraftLayer(config) for _ in range(n))
        self.summary_queries = nn.Parameter(
            torch.empty(n, config.num_attention_heads, config.num_summary_queries, config.head_dim)
        )
        self.markov_head = LongSparkMarkovHead(config)
        token_ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_token_ids", token_ids)
        self.stats = None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LongSparkRMSNorm):
            init.ones_(module.weight)
        if module is self:
            init.normal_(self.summary_queries, mean=0.0, std=self.config.head_dim**-0.5)
            if self.draft_token_ids is not None:
                init.copy_(self.draft_token_ids, torch.arange(self.config.draft_vocab_size))

    def new_cache(self) -> LongSparkCache:
        """An empty state for this drafter, on its device and with its dtype for window and boundary."""
        return LongSparkCache(self.config, self.summary_queries, dtype=self.dtype)

    def forward(
        self,
        anchor_ids: torch.LongTensor,
        position_ids: torch.LongTensor,
        cache: LongSparkCache,
        target: BorrowedTarget,
        labels: torch.LongTensor | None = None,
        target_hidden_states: torch.Tensor | None = None,
        label_mask: torch.Tensor | None = None,
        judge_rows: torch.LongTensor | None = None,
        probabilities: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | float | None = None,
    ) -> LongSparkOutput:
        r"""
        One pass over the block. All slots are always computed, as each sees all others.

        Args:
            anchor_ids (`torch.LongTensor` of shape `(batch_size,)`): The newest token of each sequence.
            position_ids (`torch.LongTensor` of shape `(batch_size,)`): Position of the anchor: its number of predecessors.
            cache ([`LongSparkCache`]): State at the rows before the anchor.
            target ([`BorrowedTarget`]): Embedding, final norm, head and rotary module of the target.
            labels (`torch.LongTensor` of shape `(batch_size, block_size)`, *optional*):
                The true tokens after the anchor; slot `j` is to predict `labels[:, j]`. Asks for the loss.
            target_hidden_states (`torch.Tensor` of shape `(..., hidden_size)`, *optional*):
                The target's states after its final norm. Without `judge_rows` of shape `(batch_size, block_size,
                hidden_size)`, at the anchor and its successors; row `j` judges slot `j`.
            label_mask (`torch.Tensor` of shape `(batch_size, block_size)`, *optional*): True where a label counts.
            judge_rows (`torch.LongTensor` of shape `(batch_size, block_size)`, *optional*):
                Row of `target_hidden_states` that judges each slot, where slots share rows.
            probabilities (`torch.Tensor`, *optional*): Of the target at `target_hidden_states`, where known already.
            num_items_in_batch (`float`, *optional*):
                What the sum of losses is divided by; the sum of this call's weights by default.

        Returns:
            [`LongSparkOutput`]

        Source: format file, sections 2.2 to 2.5.
        """
        config, batch_size = self.config, anchor_ids.shape[0]
        slots = torch.full((batch_size, config.block_size), config.mask_token_id, device=anchor_ids.device)
        slots[:, 0] = anchor_ids
        tokens = call_borrowed(target.embed_tokens, slots).to(device=self.device, dtype=self.dtype)
        block_positions = position_ids.to(self.device)[:, None] + torch.arange(config.block_size, device=self.device)
        rotary, kinds = target.rotary or config_rotary(config), config.layer_types or ["all"] * len(self.layers)
        angles = {kind: rotary(tokens, block_positions, kinds.index(kind)) for kind in dict.fromkeys(kinds)}

        trunk = self._trunk
        if self._compiled_trunk is not None and not torch.is_grad_enabled():
            trunk = self._compiled_trunk
            torch.compiler.cudagraph_mark_step_begin()  # the norm below has read what an earlier replay left
        hidden_states = trunk(tokens, cache.boundary.to(self.dtype), [angles[kind] for kind in kinds], cache.layers)
        hidden_states = call_borrowed(target.final_norm, hidden_states)

        loss = None
        if labels is not None:
            if target_hidden_states is None:
                raise ValueError(
                    "`labels` need `target_hidden_states`: the loss compares with the target's distribution."
                )
            previous_ids = torch.cat([anchor_ids[:, None], labels[:, :-1]], dim=1)
            weights = slot_weights(config.block_size, labels.device, at_least_fp32(self.dtype)).expand(labels.shape)
            weights = weights if label_mask is None else weights * label_mask
            judges = (target_hidden_states, weights, target, judge_rows, probabilities)
            total = self.weighted_loss(hidden_states, previous_ids, labels, *judges)
            if num_items_in_batch is None:
                num_items_in_batch = weights.sum().clamp(min=torch.finfo(total.dtype).tiny)
            loss = total / num_items_in_batch
        return LongSparkOutput(hidden_states=hidden_states, loss=loss)

    def _trunk(
        self,
        tokens: torch.Tensor,
        boundary: torch.Tensor,
        angles: list[tuple[torch.Tensor, torch.Tensor]],
        views: list[LongSparkCacheLayer],
    ) -> torch.Tensor:
        """The part of the pass that is ours alone and has one shape at any context length: what can be compiled."""
        tokens = tokens + self.position_embedding.weight
        fused = self.boundary_fusion(boundary.flatten(1))
        hidden_states = self.input_mapping(torch.cat([tokens, fused[:, None].expand_as(tokens)], dim=-1))
        if self.config.boundary_residual is not None:
            hidden_states = hidden_states + boundary[:, self.config.boundary_residual, None]
        for index, layer in enumerate(self.layers):
            hidden_states = layer(hidden_states, angles[index], self.summary_queries[index], views[index])
        return hidden_states

    def compile_draft(self, mode: str | None = None, **options: Any) -> None:
        r"""
        Compile the draft pass with `torch.compile`, at the first draft that follows. A second call does nothing.

        The state has one shape at any context length, so a longer context never compiles again; the first batch after a
        single sequence does. Embedding, norm and head of the target stay outside, and so does the Markov chain with its
        sampling. Passes with gradients run as before; copies and saved drafters are not compiled.

        Args:
            mode (`str`, *optional*): As for `torch.compile`; `"reduce-overhead"` replays CUDA graphs on a GPU.
            options (`Any`): Of `torch.compile`, as `fullgraph=True`: an error where torch has compiled too many variants.
        """
        if self._compiled_trunk is None:
            self._compiled_trunk = torch.compile(self._trunk, mode=mode, **options)

    def __getstate__(self) -> dict[str, Any]:
        # What is compiled belongs to these weights: a copy that kept it would draft with them. As for `nn.Module.compile`.
        state = super().__getstate__()
        state.pop("_compiled_trunk", None)
        return state

    def corrected_logits(self, base_logits: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """
        Add the Markov head's bias, in at least fp32.

        Args:
            base_logits (`torch.Tensor` of shape `(..., draft_vocab_size or vocab_size)`): Of the target's head at a slot.
            previous_ids (`torch.LongTensor` of shape `(...)`): The draft token before each slot; the anchor for slot 0.
        """
        bias = self.markov_head(previous_ids.to(self.device))
        dtype = at_least_fp32(base_logits.dtype)
        return base_logits.to(device=self.device, dtype=dtype) + bias.to(dtype)

    @torch.no_grad()
    @few_rows()
    def draft(
        self,
        anchor_ids: torch.LongTensor,
        position_ids: torch.LongTensor,
        cache: LongSparkCache,
        target: BorrowedTarget,
        num_tokens: int | None = None,
        do_sample: bool = False,
        logits_processor: LogitsProcessorList | None = None,
        input_ids: torch.LongTensor | None = None,
        ends_before: Callable[[torch.LongTensor], bool] | None = None,
        ends_behind: Callable[[torch.LongTensor], bool] | None = None,
        by_value: bool = False,
    ) -> LongSparkDraft:
        r"""
        Draft a block: the trunk once, then the Markov chain token by token.

        Args:
            anchor_ids, position_ids, cache, target: As for [`~LongSparkDrafter.forward`].
            num_tokens (`int`, *optional*): Tokens to draft, `config.block_size` by default and at most.
            do_sample (`bool`, *optional*, defaults to `False`): Sample each token, or take the most likely.
            logits_processor (`LogitsProcessorList`, *optional*): Applied to the corrected logits of each token.
            input_ids (`torch.LongTensor` of shape `(batch_size, length)`, *optional*):
                All tokens so far, anchor included; only processors, `ends_before` and `ends_behind` read them.
            ends_before, ends_behind (`Callable`, *optional*):
                Given all tokens and the draft so far, whether it must end before its newest token, or behind it. With either,
                processors never see an impossible prefix. A draft that ends before a sampled token is no sample of its logits.
            by_value (`bool`, *optional*, defaults to `False`):
                Whether processors look at scores only, not at which tokens they are of. A draft vocabulary is all they see then.

        Returns:
            [`LongSparkDraft`], shorter than `num_tokens` where it had to end.
        """
        num_tokens = self.config.block_size if num_tokens is None else num_tokens
        hidden_states = self(anchor_ids, position_ids, cache, target).hidden_states
        base_logits = target.logits(hidden_states[:, :num_tokens], self.draft_token_ids).to(self.device)

        previous = anchor_ids.to(self.device)
        careful = ends_before is not None or ends_behind is not None  # looks at the device in every slot
        prefix = input_ids.to(self.device) if logits_processor or careful else None
        tokens, logits, possible, finite = [], [], [], torch.ones_like(previous, dtype=torch.bool)
        narrow = self.draft_token_ids is not None and (by_value or not logits_processor)

        def stuck(scores: torch.Tensor) -> bool:
            return careful and not bool((scores.amax(dim=-1) > -torch.inf).all())

        for slot in range(num_tokens):
            scores = self.corrected_logits(base_logits[:, slot], previous)
            finite = finite & scores.isfinite().all(dim=-1)
            if not narrow:
                scores = self._over_vocabulary(scores)
            if careful and not bool(finite.all()):
                break
            for processor in logits_processor or ():
                scores = processor(prefix, scores)
                if stuck(scores):
                    break
            if stuck(scores):
                break
            previous = self._sample(scores) if do_sample else scores.argmax(dim=-1)
            previous = self.draft_token_ids[previous] if narrow else previous
            if prefix is not None:
                prefix = torch.cat([prefix, previous[:, None]], dim=1)
            if ends_before is not None and ends_before(prefix):
                break
            tokens.append(previous)
            logits.append(scores)
            possible.append(finite)
            if ends_behind is not None and ends_behind(prefix):
                break
        if not tokens:
            empty = base_logits.new_empty((len(previous), 0, self.config.vocab_size))
            return LongSparkDraft(previous.new_empty((len(previous), 0)), empty, finite, empty[..., 0] > 0)
        logits = torch.stack(logits, dim=1)
        possible = torch.stack(possible, dim=1) & (logits.amax(dim=-1) > -torch.inf)
        logits = self._over_vocabulary(logits) if narrow else logits
        return LongSparkDraft(token_ids=torch.stack(tokens, dim=1), logits=logits, finite=finite, possible=possible)

    @torch.no_grad()
    def set_draft_vocabulary(self, token_ids: torch.LongTensor) -> None:
        """
        Propose only these tokens from now on. Output stays the target's; a draft costs less and covers less.

        Args:
            token_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`): Without repetition, all proposable so far.

        Raises:
            `ValueError`: if the ids repeat or are not proposable.
        """
        device, w2 = self.device, self.markov_head.w2
        ids = torch.as_tensor(token_ids, device=device).sort().values
        known = torch.arange(self.config.vocab_size, device=device)
        known = known if self.draft_token_ids is None else self.draft_token_ids
        rows = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
        if ids.numel() == 0 or bool((ids.diff() == 0).any()) or not torch.equal(known[rows], ids):
            raise ValueError(
                f"`token_ids` must be distinct tokens among the {len(known)} this drafter can propose, got {len(ids)} ids "
                f"between {ids.min().item() if len(ids) else None} and {ids.max().item() if len(ids) else None}."
            )
        w2.weight = nn.Parameter(w2.weight[rows], requires_grad=w2.weight.requires_grad)
        w2.out_features = self.config.draft_vocab_size = len(ids)
        self.draft_token_ids = ids

    def _over_vocabulary(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores of all tokens, from those of the draft vocabulary."""
        if self.draft_token_ids is None:
            return scores
        whole = scores.new_full((*scores.shape[:-1], self.config.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.draft_token_ids, scores)

    @staticmethod
    def _sample(scores: torch.Tensor) -> torch.Tensor:
        # Argmax of p / Exp(1) is a sample of p. `torch.multinomial` would raise on a non-finite row (and kill the context
        # on a GPU) before anyone could look at it.
        probabilities = scores.softmax(dim=-1)
        noise = torch.empty_like(probabilities).exponential_().clamp_(min=torch.finfo(probabilities.dtype).tiny)
        return (probabilities / noise).argmax(dim=-1)


# Saved drafters bring these modules along and name them in `auto_map`.
LongSparkConfig.register_for_auto_class()
LongSparkDrafter.register_for_auto_class("AutoModel")

__all__ = ["LongSparkDrafter", "RELEASED_NAMES"]
