"""The LongSpark drafter: one parallel pass over a block, from fixed-size views of the target's prefix.

Knows: what is computed from the views (a `LongSparkCache`) and the modules borrowed from a target (a `BorrowedTarget`).
Does not know: how the views are filled, or when a round happens (generation_longspark).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LogitsProcessorList, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from .cache_longspark import LongSparkCache, LongSparkCacheLayer
from .configuration_longspark import LongSparkConfig
from .generation_longspark import LongSparkAssistant
from .target_longspark import BorrowedTarget, config_rotary


# Names in the released checkpoints -> ours (format file, section 1.2).
RELEASED_NAMES = {
    r"^draft_state_encoder\.proj\.net\.0\.": "boundary_fusion.fc1.",
    r"^draft_state_encoder\.proj\.net\.2\.": "boundary_fusion.fc2.",
    r"^draft_state_encoder\.norm\.": "boundary_fusion.norm.",
    r"^parallel_shifted_input\.position_embedding\.": "position_embedding.",
    r"^parallel_shifted_input\.proj\.net\.0\.": "input_mapping.fc1.",
    r"^parallel_shifted_input\.proj\.net\.2\.": "input_mapping.fc2.",
    r"^parallel_shifted_input\.norm\.": "input_mapping.norm.",
    r"^parallel_qwen_layers\.": "layers.",
    r"^global16_raw256_reference\.global_query_generator\.learned_query$": "summary_queries",
    r"^parallel_markov_head\.markov_w1\.": "markov_head.w1.",
    r"^parallel_markov_head\.markov_w2\.": "markov_head.w2.",
}
# The fusion blocks keep this epsilon whatever `config.rms_norm_eps` says (format file, section 2.2).
FUSION_EPS = 1e-6


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics, softmax and losses: float32, or float64 in a float64 model."""
    return torch.promote_types(dtype, torch.float32)


class LongSparkRMSNorm(nn.Module):
    """RMSNorm with statistics in at least fp32, cast back before the weight is applied (format file, trap 6)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.to(at_least_fp32(hidden_states.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden_states.dtype)


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


class LongSparkDraftLayer(nn.Module):
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
        self.w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

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
        possible (`torch.Tensor` of shape `(batch_size, num_tokens)`): False where the processors left no token.
    """

    token_ids: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    finite: torch.Tensor | None = None
    possible: torch.Tensor | None = None


def _call(module: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Run a borrowed module where it lives and in its dtype; a module under offloading moves its inputs itself."""
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.device.type != "meta":
        states = states.to(parameter.device)
    if parameter is not None and parameter.is_floating_point() and states.is_floating_point():
        states = states.to(parameter.dtype)
    return module(states)


class LongSparkDrafter(LongSparkAssistant, PreTrainedModel):
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
    _no_split_modules = ["LongSparkDraftLayer"]

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
        self.stats = None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LongSparkRMSNorm):
            init.ones_(module.weight)
        if module is self:
            init.normal_(self.summary_queries, mean=0.0, std=self.config.head_dim**-0.5)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> "LongSparkDrafter":
        r"""
        Load a drafter in our format or a released checkpoint (`Hehy/LongSpark-Qwen3-*`).

        Args:
            pretrained_model_name_or_path (`str`): Hub id or local folder.
            kwargs (`Any`): As for `PreTrainedModel.from_pretrained`.

        Raises:
            `ValueError`: if the weights lack a tensor the config asks for, or hold one it does not.
        """
        with_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("key_mapping", RELEASED_NAMES)
        drafter, info = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        if missing or unexpected:
            raise ValueError(
                f"The weights of {pretrained_model_name_or_path} do not fit their config: missing {missing or 'none'}, "
                f"unexpected {unexpected or 'none'}. The repository is incomplete or its config.json belongs to another one."
            )
        drafter._weight_conversions = []  # or saving would write the released names back
        return (drafter, info) if with_info else drafter

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
            target_hidden_states (`torch.Tensor` of shape `(batch_size, block_size, hidden_size)`, *optional*):
                The target's states after its final norm at the anchor and its successors; row `j` judges slot `j`.
            label_mask (`torch.Tensor` of shape `(batch_size, block_size)`, *optional*): True where a label counts.

        Returns:
            [`LongSparkOutput`]

        Source: format file, sections 2.2 to 2.5.
        """
        config, batch_size = self.config, anchor_ids.shape[0]
        slots = torch.full((batch_size, config.block_size), config.mask_token_id, device=anchor_ids.device)
        slots[:, 0] = anchor_ids
        tokens = _call(target.embed_tokens, slots).to(device=self.device, dtype=self.dtype)
        tokens = tokens + self.position_embedding.weight
        boundary = self.boundary_fusion(cache.boundary.to(self.dtype).flatten(1))
        hidden_states = self.input_mapping(torch.cat([tokens, boundary[:, None].expand_as(tokens)], dim=-1))

        rotary = target.rotary or config_rotary(config)
        block_positions = position_ids.to(self.device)[:, None] + torch.arange(config.block_size, device=self.device)
        for index, (layer, state) in enumerate(zip(self.layers, cache.layers, strict=True)):
            cos_sin = rotary(hidden_states, block_positions, index)
            hidden_states = layer(hidden_states, cos_sin, self.summary_queries[index], state)
        hidden_states = _call(target.final_norm, hidden_states)

        loss = None
        if labels is not None:
            if target_hidden_states is None:
                raise ValueError(
                    "`labels` need `target_hidden_states`: the loss compares with the target's distribution."
                )
            previous_ids = torch.cat([anchor_ids[:, None], labels[:, :-1]], dim=1)
            weights = torch.exp(-torch.arange(config.block_size, device=labels.device) / 4.0).expand(labels.shape)
            weights = weights if label_mask is None else weights * label_mask
            total = self.weighted_loss(hidden_states, previous_ids, labels, target_hidden_states, weights, target)
            loss = total / weights.sum().clamp(min=torch.finfo(total.dtype).tiny)
        return LongSparkOutput(hidden_states=hidden_states, loss=loss)

    def corrected_logits(self, base_logits: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """
        Add the Markov head's bias, in at least fp32.

        Args:
            base_logits (`torch.Tensor` of shape `(..., vocab_size)`): Of the target's head at a slot.
            previous_ids (`torch.LongTensor` of shape `(...)`): The draft token before each slot; the anchor for slot 0.
        """
        bias = self.markov_head(previous_ids.to(self.device))
        dtype = at_least_fp32(base_logits.dtype)
        return base_logits.to(device=self.device, dtype=dtype) + bias.to(dtype)

    @torch.no_grad()
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
    ) -> LongSparkDraft:
        r"""
        Draft a block: the trunk once, then the Markov chain token by token.

        Args:
            anchor_ids, position_ids, cache, target: As for [`~LongSparkDrafter.forward`].
            num_tokens (`int`, *optional*): Tokens to draft, `config.block_size` by default and at most.
            do_sample (`bool`, *optional*, defaults to `False`): Sample each token, or take the most likely.
            logits_processor (`LogitsProcessorList`, *optional*): Applied to the corrected logits of each token.
            input_ids (`torch.LongTensor` of shape `(batch_size, length)`, *optional*):
                All tokens so far, anchor included; only processors read them.

        Returns:
            [`LongSparkDraft`]
        """
        num_tokens = self.config.block_size if num_tokens is None else num_tokens
        hidden_states = self(anchor_ids, position_ids, cache, target).hidden_states
        base_logits = _call(target.lm_head, hidden_states[:, :num_tokens]).to(self.device)

        previous = anchor_ids.to(self.device)
        prefix = input_ids.to(self.device) if logits_processor else None
        tokens, logits, finite = [], [], torch.ones_like(previous, dtype=torch.bool)
        for slot in range(num_tokens):
            scores = self.corrected_logits(base_logits[:, slot], previous)
            finite = finite & scores.isfinite().all(dim=-1)
            if logits_processor:
                scores = logits_processor(prefix, scores)
            previous = self._sample(scores) if do_sample else scores.argmax(dim=-1)
            tokens.append(previous)
            logits.append(scores)
            if logits_processor:
                prefix = torch.cat([prefix, previous[:, None]], dim=1)
        logits = torch.stack(logits, dim=1)
        possible = logits.amax(dim=-1) > -torch.inf
        return LongSparkDraft(token_ids=torch.stack(tokens, dim=1), logits=logits, finite=finite, possible=possible)

    @staticmethod
    def _sample(scores: torch.Tensor) -> torch.Tensor:
        # Argmax of p / Exp(1) is a sample of p. `torch.multinomial` would raise on a non-finite row (and kill the context
        # on a GPU) before anyone could look at it.
        probabilities = scores.softmax(dim=-1)
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)

    def weighted_loss(
        self,
        hidden_states: torch.Tensor,
        previous_ids: torch.LongTensor,
        labels: torch.LongTensor,
        target_hidden_states: torch.Tensor,
        weights: torch.Tensor,
        target: BorrowedTarget,
        ce_weight: float = 0.1,
        rows_per_chunk: int = 256,
    ) -> torch.Tensor:
        r"""
        The paper's objective, summed over slots: `w * (0.1 * CE(x) + 0.9 * ||p - q||_1)` over the full vocabulary.

        Logits exist only for `rows_per_chunk` rows at a time and are made again in the backward pass, so peak memory does
        not grow with the number of rows.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): Slot states after the target's final norm.
            previous_ids (`torch.LongTensor` of shape `(...)`): True token before each label: Markov predecessor.
            labels (`torch.LongTensor` of shape `(...)`): True tokens.
            target_hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): Target states of the judging rows.
            weights (`torch.Tensor` of shape `(...)`): Weight of each slot, zero for slots that do not count.
            target ([`BorrowedTarget`]): Lends the head.
            ce_weight (`float`, *optional*, defaults to 0.1): Lambda of the paper.
            rows_per_chunk (`int`, *optional*, defaults to 256): Rows whose logits exist at a time.

        Returns:
            `torch.Tensor` of shape `()`: the sum, in at least fp32. Divide by the sum of the weights.

        Source: format file, section 4.
        """
        rows = (
            hidden_states.flatten(0, -2),
            previous_ids.flatten(),
            labels.flatten(),
            target_hidden_states.detach().flatten(0, -2),
            weights.flatten(),
        )

        def chunk_loss(hidden, previous, label, judged, weight):
            logits = self.corrected_logits(_call(target.lm_head, hidden), previous)
            q = logits.softmax(dim=-1)
            with torch.no_grad():
                p = _call(target.lm_head, judged).to(device=q.device, dtype=q.dtype).softmax(dim=-1)
            loss = ce_weight * F.cross_entropy(logits, label.to(q.device), reduction="none")
            loss = loss + (1 - ce_weight) * (p - q).abs().sum(dim=-1)
            return (loss * weight.to(loss)).sum()

        total = hidden_states.new_zeros((), dtype=at_least_fp32(hidden_states.dtype))
        for chunk in zip(*(row.split(rows_per_chunk) for row in rows), strict=True):
            total = total + checkpoint(chunk_loss, *chunk, use_reentrant=False)
        return total


__all__ = ["LongSparkDrafter"]
