"""Tiny random targets and scripted drafters that the whole suite shares."""

import contextlib
import copy
import importlib
import inspect
import sys
import types
from pathlib import Path

import torch
from transformers import (
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import AutoModelForCausalLM

from longspark_hf import LongSparkCache, LongSparkConfig, LongSparkDrafter
from longspark_hf.modeling_longspark import LongSparkDraft


VOCAB_SIZE = 97
MASK_TOKEN_ID = VOCAB_SIZE - 1
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # Wide weights spread the logits, so that greedy choices are no coin tosses between near-ties.
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tiny(config_class, **overrides):
    """A config of a tiny target; `build` makes the model."""
    return config_class(**(SHAPE | overrides))


# One row per architecture trait that the seam, the tap or the drafter could get wrong.
TARGETS = {
    "qwen3": tiny(Qwen3Config, head_dim=16),  # q/k norm, head_dim * heads != hidden size
    "llama": tiny(LlamaConfig, tie_word_embeddings=True),
    "gemma3": tiny(  # local and global layers with rotary bases of their own, scaled embedding, window crossed
        Gemma3TextConfig,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    "mistral-window-crossed": tiny(MistralConfig, sliding_window=24, num_key_value_heads=1),
    "qwen3-moe": tiny(Qwen3MoeConfig, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "phi": tiny(PhiConfig, partial_rotary_factor=0.5, num_key_value_heads=4),  # partial rotary, LayerNorm, head bias
}
# Further architectures that must pass through the same accessors; run with one drafter only.
MORE_TARGETS = {
    "qwen2": tiny(Qwen2Config),  # biased projections
    "phi3": tiny(Phi3Config),  # fused qkv
    "olmo2": tiny(Olmo2Config),  # norms after the sub-layers
    "gemma2": tiny(Gemma2Config, head_dim=12, sliding_window=24),  # soft-capped logits outside the head
    "gpt-oss": tiny(  # attention sinks, each rotary angle once
        GptOssConfig, head_dim=12, num_local_experts=2, num_experts_per_tok=1, sliding_window=24
    ),
    "gpt-neox": tiny(GPTNeoXConfig, num_key_value_heads=4),  # other names for everything
    "falcon": tiny(  # asks for the name of its attention, and computes it itself
        FalconConfig,
        new_decoder_architecture=True,
        alibi=False,
        ffn_hidden_size=64,
        num_kv_heads=4,
        num_key_value_heads=4,
    ),
    "falcon-multi-query": FalconConfig(  # fields of its own for widths and heads
        **{key: value for key, value in SHAPE.items() if key not in ("intermediate_size", "num_key_value_heads")},
        alibi=False,
        ffn_hidden_size=64,
    ),
    "llama-one-layer": tiny(LlamaConfig, num_hidden_layers=1),
    "llama-yarn": tiny(
        LlamaConfig,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "gemma3-multimodal": Gemma3Config(
        text_config=tiny(
            Gemma3TextConfig, head_dim=16, sliding_window=24, layer_types=["sliding_attention", "full_attention"] * 3
        ).to_dict(),
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        eos_token_id=None,
    ),
}
FULL_ATTENTION = ["qwen3", "llama", "qwen3-moe", "phi"]


def build(name: str, seed: int = 0):
    """The tiny target of that name, in fp32."""
    config = copy.deepcopy((TARGETS | MORE_TARGETS)[name])  # tests change that of their own target
    torch.manual_seed(seed)
    if isinstance(config, Gemma3Config):
        model = Gemma3ForConditionalGeneration(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def drafter_config(target, **overrides):
    """Config of a tiny drafter with a window that the tests' sequences cross."""
    fields = {"mask_token_id": MASK_TOKEN_ID, "window_size": 32, "num_summary_queries": 4, "markov_rank": 8}
    return LongSparkConfig.from_target(target.config, **(fields | overrides))


def random_drafter(target, seed: int = 1, **overrides):
    """An untrained drafter."""
    torch.manual_seed(seed)
    return LongSparkDrafter(drafter_config(target, **overrides)).eval()


class ScriptedCache(LongSparkCache):
    """A drafter state that knows which sequences of the batch it is for."""

    sequences: torch.Tensor | None = None

    def batch_select_indices(self, indices):
        self.sequences = sequences_of(self)[indices]
        super().batch_select_indices(indices)


def sequences_of(cache: LongSparkCache) -> torch.Tensor:
    """Of the batch of a call, those that a state is for."""
    sequences = getattr(cache, "sequences", None)
    return torch.arange(len(cache.layers[0].num_rows)) if sequences is None else sequences


class ScriptedDrafter(LongSparkDrafter):
    """
    A drafter whose proposals are the tokens of a script, by position; everything around them is real.

    `wrong_at` lists, per round in turn, the slot from which its proposals are wrong (`block_size` for never), so that any
    acceptance length can be asked for. Every further sequence of a batch is one round ahead.
    """

    def follow(self, scripts: list[torch.Tensor], wrong_at: list[int] | None = None):
        self.scripts, self.wrong_at, self.round = scripts, wrong_at or [self.config.block_size], 0
        return self

    def new_cache(self):
        return ScriptedCache(self.config, self.summary_queries, dtype=self.dtype)

    def draft(self, anchor_ids, position_ids, cache, target, num_tokens, input_ids=None, ends_before=None, **_):
        firsts = position_ids.flatten().tolist()
        tokens = torch.zeros(len(firsts), num_tokens, dtype=torch.long)
        for row, first, b in zip(tokens, firsts, sequences_of(cache).tolist()):
            known = self.scripts[b % len(self.scripts)][first + 1 : first + 1 + num_tokens]
            row[: len(known)] = known
            wrong = self.wrong_at[(self.round + b) % len(self.wrong_at)]
            row[wrong:] = (row[wrong:] + 1) % self.config.vocab_size
        self.round += 1
        for slot in range(num_tokens if ends_before else 0):
            if ends_before(torch.cat([input_ids, tokens[:, : slot + 1]], dim=1)):
                tokens = tokens[:, :slot]
                break
        # A point mass is a distribution too: its q is one on the scripted token.
        logits = torch.full((*tokens.shape, self.config.vocab_size), -torch.inf).scatter(-1, tokens[..., None], 0.0)
        yes = torch.ones(len(tokens), 1 + tokens.shape[1], dtype=torch.bool)
        return LongSparkDraft(token_ids=tokens, logits=logits, finite=yes[:, 0], possible=yes[:, 1:])


def scripted_drafter(target, script: torch.Tensor | list, wrong_at: list[int] | None = None, **overrides):
    """A [`ScriptedDrafter`]; `script` holds the tokens of prompt and answer, a list of them for a batch."""
    torch.manual_seed(1)
    drafter = ScriptedDrafter(drafter_config(target, **overrides)).eval()
    return drafter.follow(script if isinstance(script, list) else [script], wrong_at)


def left_on(target) -> list[str]:
    """
    What of ours is still on a target: hooks, attributes shadowing methods, and the attention and products of a verification
    pass behind "sdpa" and `linear`. (transformers keeps hooks of its own.)
    """
    left = [] if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward else ["sdpa"]
    left += [] if torch.nn.functional.linear is torch._C._nn.linear else ["linear"]
    for name, module in target.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        left += [name for hook in hooks if getattr(hook, "__module__", "").startswith("longspark_hf")]
    return left + [name for name in vars(target) if callable(getattr(type(target), name, None))]


@contextlib.contextmanager
def interrupted(function, line: int):
    """
    Ctrl-C in the `line`-th line that runs in a function, or in what it wraps; nothing once the yielded function is called.
    """
    code, left = inspect.unwrap(function).__code__, [line]

    def trace(frame, event, _):
        if frame.f_code is not code:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: sys.settrace(before)
    finally:
        sys.settrace(before)


def another_copy(monkeypatch, module):
    """A second copy of a module of ours and of what it imports, as remote code beside the package is one."""
    package = types.ModuleType("copy_of_longspark")
    package.__path__ = [str(Path(module.__file__).parent)]
    name = module.__name__.rpartition(".")[2]
    for loaded in ["", ".patching_longspark", f".{name}"]:
        monkeypatch.delitem(sys.modules, package.__name__ + loaded, raising=False)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    return importlib.import_module(f"{package.__name__}.{name}")


# The cache argument and output of this transformers version: renamed in 5.24.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def cache_of(output):
    """The target cache of a `generate` output."""
    return output[CACHE]
