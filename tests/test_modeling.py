"""The drafter's configuration, its weights, its pass over a block, and its training objective."""

import copy
import json
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModel,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LogitsProcessorList,
    Phi3Config,
    PhiConfig,
    Qwen3Config,
    SuppressTokensLogitsProcessor,
    T5Config,
    TemperatureLogitsWarper,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.configuration_longspark import uniform_layer_ids
from longspark_hf.modeling_longspark import RELEASED_NAMES
from longspark_hf.target_longspark import BorrowedTarget, config_rotary

from .targets import MORE_TARGETS, TARGETS, tiny


VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 37, 24, 4, 2, 8, 5
ALL_TARGETS = TARGETS | MORE_TARGETS


def tiny_config(**overrides):
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_target_layers": 6,
        "target_layer_ids": [0, 2, 5],
        "block_size": BLOCK,
        "window_size": 16,
        "num_summary_queries": 4,
        "markov_rank": 6,
        "mask_token_id": VOCAB - 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return LongSparkConfig(**(fields | overrides))


def make_drafter(dtype=torch.float32, seed=0, **overrides):
    """A drafter with weights of a size at which every part of it matters to the output."""
    torch.manual_seed(seed)
    return LongSparkDrafter(tiny_config(initializer_range=0.2, **overrides)).to(dtype).eval()


def make_target(dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    modules = nn.Embedding(VOCAB, HIDDEN), nn.RMSNorm(HIDDEN, eps=1e-6), nn.Linear(HIDDEN, VOCAB, bias=False)
    return BorrowedTarget(*(module.to(dtype).requires_grad_(False) for module in modules))


def fill(drafter, batch_size=2, num_rows=40, dtype=None, seed=2):
    """A state of random rows, and the anchors that follow them."""
    generator = torch.Generator().manual_seed(seed)
    dtype = dtype or drafter.dtype
    cache = drafter.new_cache()
    for layer in range(drafter.config.num_hidden_layers):
        for step in torch.arange(num_rows).split(4096):
            shape = (batch_size, KV_HEADS, len(step), HEAD_DIM)
            cache.update(*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)), layer)
    shape = (batch_size, drafter.config.num_hidden_layers, HIDDEN)
    cache.set_boundary(torch.randn(shape, generator=generator).to(dtype))
    anchors = torch.randint(0, VOCAB, (batch_size,), generator=generator)
    return anchors, torch.full((batch_size,), num_rows), cache


# --- configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_TARGETS)
def test_config_from_target_takes_the_targets_shapes(name):
    target_config = ALL_TARGETS[name]
    text = target_config.get_text_config(decoder=True)

    config = LongSparkConfig.from_target(target_config, mask_token_id=5)

    for field in ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"):
        assert getattr(config, field) == getattr(text, field), field
    assert config.intermediate_size == (64 if name.startswith("falcon") else text.intermediate_size)
    assert config.num_key_value_heads == (1 if name == "falcon-multi-query" else text.num_key_value_heads)
    assert config.head_dim == (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    assert config.num_target_layers == text.num_hidden_layers
    assert config.target_layer_ids == uniform_layer_ids(text.num_hidden_layers)
    assert config.num_hidden_layers == len(config.target_layer_ids)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (
        text.bos_token_id,
        text.eos_token_id,
        text.pad_token_id,
    )
    assert (config.block_size, config.window_size, config.num_summary_queries, config.markov_rank) == (7, 256, 16, 256)
    LongSparkDrafter(config)


@pytest.mark.parametrize("name", ALL_TARGETS)
def test_config_survives_saving_and_loading(name, tmp_path):
    config = LongSparkConfig.from_target(ALL_TARGETS[name], mask_token_id=5, window_size=33)
    config.save_pretrained(tmp_path)
    for auto in (LongSparkConfig, AutoConfig):
        loaded = auto.from_pretrained(tmp_path)
        assert type(loaded) is LongSparkConfig
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()


def test_config_from_target_shares_nothing_with_the_targets_config():
    target_config = tiny(Qwen3Config, head_dim=16)
    before = copy.deepcopy(target_config.to_dict())
    config = LongSparkConfig.from_target(target_config, mask_token_id=5)
    config.rope_parameters["rope_theta"] = 1.0
    assert target_config.to_dict() == before


def test_config_does_not_depend_on_whether_the_target_ties_its_embeddings():
    tied, untied = (
        LongSparkConfig.from_target(tiny(LlamaConfig, tie_word_embeddings=tie), mask_token_id=5)
        for tie in (True, False)
    )
    assert tied.to_dict() == untied.to_dict()


def test_config_overrides_reach_every_size():
    overrides = {
        "target_layer_ids": [1, 4],
        "block_size": 3,
        "window_size": 9,
        "num_summary_queries": 2,
        "markov_rank": 11,
        "qk_norm": False,
        "intermediate_size": 20,
        "mask_token_id": 0,
    }
    config = LongSparkConfig.from_target(tiny(Qwen3Config, head_dim=16), **overrides)
    assert {name: getattr(config, name) for name in overrides} == overrides
    assert config.num_hidden_layers == 2


def test_config_knows_the_rotary_of_each_layer_it_reads():
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = LongSparkConfig.from_target(
        tiny(Gemma3TextConfig, head_dim=16, layer_types=types), mask_token_id=5, target_layer_ids=[2, 3, 5]
    )
    assert config.layer_types == ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    "num_layers, expected",
    [
        (1, [0]),
        (2, [0, 1]),
        (3, [0, 1, 2]),
        (4, [0, 1, 2, 3]),
        (5, [0, 1, 2, 3, 4]),
        (6, [0, 1, 2, 4, 5]),
        (36, [0, 9, 18, 26, 35]),
        (40, [0, 10, 20, 29, 39]),
    ],
)
def test_uniform_policy_selects_first_last_and_between(num_layers, expected):
    config = LongSparkConfig.from_target(tiny(LlamaConfig, num_hidden_layers=num_layers), mask_token_id=5)
    assert config.target_layer_ids == expected and config.num_hidden_layers == len(expected)


def test_config_from_target_requires_a_mask_token():
    with pytest.raises(ValueError, match="mask_token_id"):
        LongSparkConfig.from_target(tiny(LlamaConfig))


def test_drafter_requires_a_mask_token():
    with pytest.raises(ValueError, match="mask_token_id"):
        LongSparkDrafter(tiny_config(mask_token_id=None))


@pytest.mark.parametrize(
    "target_config, named",
    [(T5Config(), "encoder-decoder"), (GPT2Config(), "rotary"), (FalconConfig(alibi=True), "alibi.*rotary")],
    ids=["t5", "gpt2", "falcon-alibi"],
)
def test_config_from_target_refuses_a_target_that_cannot_be_drafted_for(target_config, named):
    with pytest.raises(ValueError, match=named) as error:
        LongSparkConfig.from_target(target_config, mask_token_id=5)
    assert type(target_config).__name__ in str(error.value)


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"num_hidden_layers": 4}, ["3 layers", "4"]),
        ({"target_layer_ids": [0, 2, 6]}, ["6 layers", "[0, 2, 6]"]),
        ({"target_layer_ids": [0, -1]}, ["[0, -1]"]),
        ({"target_layer_ids": [2, 2, 5]}, ["distinct", "[2, 2, 5]"]),
        ({"target_layer_ids": []}, ["[]"]),
        ({"num_attention_heads": 5}, ["num_attention_heads", "5", "2"]),
        ({"block_size": 0}, ["block_size", "0"]),
        ({"window_size": -1}, ["window_size", "-1"]),
        ({"num_summary_queries": -1}, ["num_summary_queries", "-1"]),
        ({"markov_rank": 0}, ["markov_rank", "0"]),
        ({"mask_token_id": VOCAB}, ["mask_token_id", str(VOCAB - 1), str(VOCAB)]),
        ({"mask_token_id": -1}, ["mask_token_id", "-1"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "1", "3"]),
    ],
)
def test_config_that_contradicts_itself_raises(fields, named):
    with pytest.raises(ValueError) as error:
        tiny_config(**fields)
    assert all(name in str(error.value) for name in named), error.value


# --- the released checkpoints -------------------------------------------------------------------------------------

RELEASED = {
    "4B": ({"hidden_size": 2560, "qwen_num_attention_heads": 32, "qwen_intermediate_size": 9728}, 36, 641_778_432),
    "8B": ({"hidden_size": 4096, "qwen_num_attention_heads": 32, "qwen_intermediate_size": 12288}, 36, 1_193_882_880),
    "14B": ({"hidden_size": 5120, "qwen_num_attention_heads": 40, "qwen_intermediate_size": 17408}, 40, 1_965_736_192),
}


def released_config(size="8B", **overrides):
    """A released config with only the keys that have no default."""
    shapes, num_layers, _ = RELEASED[size]
    return {
        "model_type": "draftfreekv",
        **shapes,
        "vocab_size": 151936,
        "num_target_layers": num_layers,
        "target_layer_ids": uniform_layer_ids(num_layers),
        "mask_token_id": 151669,
        **overrides,
    }


def released_tensors(config):
    """Names and shapes of a released checkpoint, as the format file lists them in section 1.2."""
    n, hidden, heads, d = config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.head_dim
    kv, inner, vocab, rank = (
        config.num_key_value_heads,
        config.intermediate_size,
        config.vocab_size,
        config.markov_rank,
    )
    layer = {
        "self_attn.q_proj": (heads * d, hidden),
        "self_attn.k_proj": (kv * d, hidden),
        "self_attn.v_proj": (kv * d, hidden),
        "self_attn.o_proj": (hidden, heads * d),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {
        "draft_state_encoder.proj.net.0.weight": (hidden, n * hidden),
        "draft_state_encoder.proj.net.2.weight": (hidden, hidden),
        "draft_state_encoder.norm.weight": (hidden,),
        "parallel_shifted_input.position_embedding.weight": (config.block_size, hidden),
        "parallel_shifted_input.proj.net.0.weight": (hidden, 2 * hidden),
        "parallel_shifted_input.proj.net.2.weight": (hidden, hidden),
        "parallel_shifted_input.norm.weight": (hidden,),
        "global16_raw256_reference.global_query_generator.learned_query": (n, heads, config.num_summary_queries, d),
        "parallel_markov_head.markov_w1.weight": (vocab, rank),
        "parallel_markov_head.markov_w2.weight": (vocab, rank),
    }
    for index in range(n):
        shapes |= {f"parallel_qwen_layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def our_name(released):
    for pattern, ours in RELEASED_NAMES.items():
        released = re.sub(pattern, ours, released)
    return released


@pytest.mark.parametrize("size", RELEASED)
def test_released_shapes_have_65_tensors_and_the_published_parameter_count(size):
    config = LongSparkConfig.from_released(released_config(size))
    with torch.device("meta"):
        drafter = LongSparkDrafter(config)

    assert sum(parameter.numel() for parameter in drafter.parameters()) == RELEASED[size][2]
    assert len(drafter.state_dict()) == len(list(drafter.parameters())) == 65
    expected = {our_name(name): shape for name, shape in released_tensors(config).items()}
    assert {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} == expected


def test_released_config_with_missing_keys_gets_the_documented_defaults():
    config = LongSparkConfig.from_released(released_config())
    expected = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_target_layers": 36,
        "target_layer_ids": [0, 9, 18, 26, 35],
        "num_hidden_layers": 5,
        "block_size": 7,
        "window_size": 256,
        "num_summary_queries": 16,
        "markov_rank": 256,
        "mask_token_id": 151669,
        "rms_norm_eps": 1e-6,
        "qk_norm": True,
        "model_type": "longspark",
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1_000_000.0}


def test_released_config_is_recognised_by_its_model_type(tmp_path):
    values = {"qwen_rope_theta": 5e5, "raw_target_rows": 99, "dtype": "bfloat16", "target_model_name_or_path": "a/b"}
    (tmp_path / "config.json").write_text(json.dumps(released_config(**values)))

    config = LongSparkConfig.from_pretrained(tmp_path)

    assert config.rope_parameters["rope_theta"] == 5e5 and config.window_size == 99
    assert config.dtype == torch.bfloat16 and config.target_name_or_path == "a/b"


UNUSED = {
    "adapter_rank": 512,
    "adapter_alpha": 512.0,
    "transition_rank": 64,
    "parallel_mixer_rank": 512,
    "parallel_mixer_num_heads": 8,
    "memory_query_mode": "hidden_r16",
    "memory_external_key_mode": "akav",
    "memory_anchor_policy": "recent",
    "memory_output_slots": None,
    "memory_attention_backend": "sdpa",
    "target_kv_memory_query_rank": 16,
    "global_query_mode": "fixed_equicorrelated",
    "global_query_equicorrelation": 0.4,
    "global_checkpoint_compatibility": "retrain_required",
    "xpress_num_refinement_steps": 4,
    "xpress_early_stop": False,
    "xpress_activation": "silu",
    "qwen_gradient_checkpointing": True,
    "qwen_initialize_from_target": True,
    "training_objective": "lk_hybrid",
    "transformers_version": "4.57.1",
    "something_new": [1, 2],
}


def test_released_config_may_hold_keys_without_a_meaning_here():
    config = LongSparkConfig.from_released(released_config(**UNUSED))
    assert config.to_dict() == LongSparkConfig.from_released(released_config()).to_dict()
    assert not set(UNUSED) - {"transformers_version"} & set(config.to_dict())


@pytest.mark.parametrize("num_layers, policy", [(36, "uniform_5"), (36, "last_4"), (40, "uniform_3")])
def test_released_config_without_ids_follows_its_policy(num_layers, policy):
    released = released_config(num_target_layers=num_layers, target_layer_policy=policy)
    del released["target_layer_ids"]
    expected = {
        "uniform_5": [0, 9, 18, 26, 35],
        "last_4": [32, 33, 34, 35],
        "uniform_3": [0, 20, 39],
    }
    assert LongSparkConfig.from_released(released).target_layer_ids == expected[policy]


def test_released_configs_explicit_ids_win_over_its_policy():
    released = released_config(target_layer_ids=[1, 9, 17, 25, 33], target_layer_policy="uniform_5")
    assert LongSparkConfig.from_released(released).target_layer_ids == [1, 9, 17, 25, 33]


@pytest.mark.parametrize(
    "overrides",
    [
        {"parallel_mixer_layers": 4},
        {"local_draft_rows": 8},
        {"max_accepted_tokens": 7},
        {"block_size": 8, "local_draft_rows": 7},
        {"draft_mode": "markov"},
        {"parallel_markov_head_type": "gated"},
        {"global16_raw256_enabled": False},
        {"global_memory_source_window": "recent"},
        {"target_kv_memory_layout": "compressed"},
        {"target_kv_window_size": 128},
        {"target_layer_ids": [0, 9, 18, 26, 36]},
        {"qwen_num_attention_heads": 33},
        {"mask_token_id": 151936},
    ],
    ids=lambda overrides: "-".join(overrides),
)
def test_released_config_that_contradicts_itself_or_this_drafter_raises(overrides):
    with pytest.raises(ValueError) as error:
        LongSparkConfig.from_released(released_config(**overrides))
    values = [str(value) for value in overrides.values()]
    assert any(value in str(error.value) for value in values), error.value


@pytest.mark.parametrize("key", ["hidden_size", "qwen_num_attention_heads", "mask_token_id"])
def test_released_config_without_a_key_that_has_no_default_raises(key):
    released = released_config()
    del released[key]
    with pytest.raises(ValueError, match=key):
        LongSparkConfig.from_released(released)


def test_released_config_implies_its_number_of_target_layers_by_the_last_id():
    released = released_config()
    del released["num_target_layers"]
    assert LongSparkConfig.from_released(released).num_target_layers == max(released["target_layer_ids"]) + 1
    del released["target_layer_ids"]
    with pytest.raises(ValueError, match="target_layer_ids"):
        LongSparkConfig.from_released(released)


# --- loading and saving -------------------------------------------------------------------------------------------


def save_as_ours(folder):
    drafter = make_drafter()
    drafter.save_pretrained(folder)
    return drafter


def save_as_released(folder):
    drafter = make_drafter()
    config = drafter.config
    released = {
        "model_type": "draftfreekv",
        "hidden_size": HIDDEN,
        "qwen_intermediate_size": config.intermediate_size,
        "qwen_num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": config.target_layer_ids,
        "block_size": BLOCK,
        "raw_target_rows": config.window_size,
        "global_memory_slots": config.num_summary_queries,
        "parallel_markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "qwen_rope_theta": 10000.0,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(released))
    weights = {name: drafter.state_dict()[our_name(name)].clone() for name in released_tensors(config)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return drafter


FORMATS = pytest.mark.parametrize("save", [save_as_ours, save_as_released])


@FORMATS
def test_checkpoint_loads_with_equal_weights_and_equal_drafts(save, tmp_path):
    drafter = save(tmp_path)

    loaded, info = LongSparkDrafter.from_pretrained(tmp_path, output_loading_info=True)

    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())
    drafts = [model.draft(*fill(model), make_target()) for model in (drafter, loaded.eval())]
    assert torch.equal(drafts[0].logits, drafts[1].logits)


@FORMATS
def test_saving_a_loaded_checkpoint_writes_our_format_again_and_again(save, tmp_path):
    drafter = save(tmp_path)
    folder = tmp_path
    for generation in ("first", "second"):
        LongSparkDrafter.from_pretrained(folder).save_pretrained(tmp_path / generation)
        folder = tmp_path / generation
        assert json.loads((folder / "config.json").read_text())["model_type"] == "longspark"
        weights = load_file(folder / "model.safetensors")
        assert set(weights) == set(drafter.state_dict())
        assert all(torch.equal(weights[name], tensor) for name, tensor in drafter.state_dict().items())


def test_auto_classes_know_the_drafter(tmp_path):
    save_as_ours(tmp_path)
    assert type(AutoModel.from_pretrained(tmp_path)) is LongSparkDrafter


@FORMATS
def test_checkpoint_with_a_missing_tensor_raises(save, tmp_path):
    save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if "layers.1.mlp.up_proj" in name)
    del weights[gone]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj"):
        LongSparkDrafter.from_pretrained(tmp_path)


@FORMATS
def test_checkpoint_with_an_extra_tensor_raises(save, tmp_path):
    save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["adapter.weight"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"adapter\.weight"):
        LongSparkDrafter.from_pretrained(tmp_path)


@FORMATS
@pytest.mark.parametrize("tensor", ["markov", "learned_query|summary_queries", r"position_embedding"])
def test_checkpoint_with_a_tensor_of_another_shape_than_its_config_raises(save, tensor, tmp_path):
    save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in sorted(weights) if re.search(tensor, name))
    was = weights[name]
    weights[name] = torch.zeros(was.shape[0] + 1, *was.shape[1:])
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match=re.escape(our_name(name))) as error:
        LongSparkDrafter.from_pretrained(tmp_path)
    for shape in (was.shape, weights[name].shape):
        assert str(list(shape))[1:-1] in str(error.value), error.value


def test_checkpoint_with_query_norms_does_not_load_without_them(tmp_path):
    save_as_ours(tmp_path)
    with pytest.raises(ValueError, match="q_norm"):
        LongSparkDrafter.from_pretrained(tmp_path, qk_norm=False)


def test_query_norms_can_be_switched_off(tmp_path):
    drafter = make_drafter(qk_norm=False)
    assert not [name for name in drafter.state_dict() if "q_norm" in name or "k_norm" in name]
    drafter.save_pretrained(tmp_path)

    loaded = LongSparkDrafter.from_pretrained(tmp_path).eval()

    draft, again = (model.draft(*fill(model), make_target()) for model in (drafter, loaded))
    assert torch.equal(draft.logits, again.logits)
    with_norms = make_drafter()
    with_norms.load_state_dict(drafter.state_dict(), strict=False)
    assert not torch.allclose(with_norms.draft(*fill(with_norms), make_target()).logits, draft.logits)


# --- rotary -------------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
    "original_max_position_embeddings": 256,
}
ROTARIES = [
    pytest.param(LlamaRotaryEmbedding, tiny(LlamaConfig), id="default"),
    pytest.param(
        Qwen3RotaryEmbedding,
        tiny(Qwen3Config, head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        id="default-qwen3",
    ),
    pytest.param(
        Qwen3RotaryEmbedding,
        tiny(Qwen3Config, head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 4088994.243248622}),
        id="default-ntk",
    ),
    pytest.param(
        LlamaRotaryEmbedding,
        tiny(LlamaConfig, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
        id="linear",
    ),
    pytest.param(Qwen3RotaryEmbedding, tiny(Qwen3Config, head_dim=64, rope_parameters=YARN), id="yarn"),
    pytest.param(LlamaRotaryEmbedding, tiny(LlamaConfig, head_dim=64, rope_parameters=LLAMA3), id="llama3"),
    pytest.param(PhiRotaryEmbedding, tiny(PhiConfig, hidden_size=128, partial_rotary_factor=0.5), id="partial"),
    pytest.param(
        Phi3RotaryEmbedding,
        tiny(Phi3Config, max_position_embeddings=1024, rope_parameters=LONGROPE),
        id="longrope-short",
    ),
]
LONG_POSITIONS = torch.tensor([[0, 1, 7, 100, 255]]), torch.tensor([[255, 4095, 32769, 100003, 131071]])


@pytest.mark.parametrize("rotary, target_config", ROTARIES)
def test_unbound_rotary_is_that_of_the_target(rotary, target_config):
    config = LongSparkConfig.from_target(target_config, mask_token_id=5)
    hidden_states = torch.zeros(1, 5, config.hidden_size)
    longrope = target_config.rope_parameters["rope_type"] == "longrope"

    for position_ids in LONG_POSITIONS[:1] if longrope else LONG_POSITIONS:
        expected = rotary(target_config)(hidden_states, position_ids)
        actual = config_rotary(config)(hidden_states, position_ids, 0)
        # Bit by bit: at 128K one unit in the last place of a frequency turns an angle by a hundredth.
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize(
    "full", [{"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}]
)
def test_unbound_rotary_of_a_layer_is_that_of_its_type(full):
    target_config = tiny(
        Gemma3TextConfig,
        head_dim=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": full},
    )
    config = LongSparkConfig.from_target(target_config, mask_token_id=5, target_layer_ids=[1, 2])
    hidden_states = torch.zeros(1, 5, config.hidden_size)

    for layer, kind in enumerate(["sliding_attention", "full_attention"]):
        expected = Gemma3RotaryEmbedding(target_config)(hidden_states, LONG_POSITIONS[1], kind)
        actual = config_rotary(config)(hidden_states, LONG_POSITIONS[1], layer)
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize(
    "rope_parameters", [{"rope_type": "default", "rope_theta": 1e6}, YARN], ids=["default", "yarn"]
)
def test_rotary_angles_of_a_bf16_drafter_are_computed_in_fp32(rope_parameters):
    config = tiny_config(rope_parameters=rope_parameters, head_dim=64)
    rotary, position_ids = config_rotary(config), LONG_POSITIONS[1]

    in_bf16 = rotary(torch.zeros(1, 5, HIDDEN, dtype=torch.bfloat16), position_ids, 0)
    in_fp32 = rotary(torch.zeros(1, 5, HIDDEN), position_ids, 0)

    for low, high in zip(in_bf16, in_fp32):
        assert low.dtype == torch.bfloat16 and torch.equal(low, high.bfloat16())


def test_rotary_angles_of_a_float64_drafter_are_computed_in_float64():
    config, position_ids = tiny_config(), LONG_POSITIONS[1]
    cos, sin = config_rotary(config)(torch.zeros(1, 5, HIDDEN, dtype=torch.float64), position_ids, 0)
    frequency = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = position_ids[..., None].double() * torch.cat([frequency, frequency])
    torch.testing.assert_close(cos, angles.cos(), atol=1e-9, rtol=0)
    torch.testing.assert_close(sin, angles.sin(), atol=1e-9, rtol=0)


def test_loading_in_bf16_leaves_no_rotary_buffer_to_spoil(tmp_path):
    save_as_ours(tmp_path)
    drafter = LongSparkDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert not list(drafter.buffers())
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}


# --- the draft pass -----------------------------------------------------------------------------------------------


class RecordedOps(TorchDispatchMode):
    """Names and output shapes of every tensor operation."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        outputs = output if isinstance(output, (tuple, list)) else [output]
        self.ops.append((str(func), *(tuple(out.shape) for out in outputs if isinstance(out, torch.Tensor))))
        return output


def recorded_draft(num_rows, **kwargs):
    drafter, target = make_drafter(), make_target()
    views = fill(drafter, batch_size=1, num_rows=num_rows)
    with RecordedOps() as recorded:
        drafter.draft(*views, target, **kwargs)
    return recorded.ops


def test_draft_pass_has_the_same_shapes_at_any_context_length():
    short = recorded_draft(3)  # the window is not full yet
    assert len(short) > 100
    assert recorded_draft(1000) == short
    assert recorded_draft(20000) == short


@pytest.mark.parametrize("do_sample", [False, True])
def test_draft_pass_never_waits_for_the_device(do_sample):
    names = {name for name, *_ in recorded_draft(50, do_sample=do_sample)}
    assert not {name for name in names if "_local_scalar_dense" in name or "nonzero" in name}


def test_draft_does_not_change_the_state():
    drafter, target = make_drafter(), make_target()
    anchors, position_ids, cache = fill(drafter)
    before = copy.deepcopy(cache)
    drafter.draft(anchors, position_ids, cache, target)
    for layer, was in zip(cache.layers, before.layers):
        for name in ("keys", "values", "summary_values", "summary_lse", "num_rows"):
            assert torch.equal(getattr(layer, name), getattr(was, name))
    assert torch.equal(cache.boundary, before.boundary)


@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK, None])
def test_draft_has_the_asked_length(num_tokens):
    drafter = make_drafter()
    draft = drafter.draft(*fill(drafter), make_target(), num_tokens=num_tokens)
    length = num_tokens or BLOCK
    assert draft.token_ids.shape == draft.possible.shape == (2, length)
    assert draft.logits.shape == (2, length, VOCAB)
    assert draft.finite.shape == (2,)


def test_sequences_of_a_batch_are_drafted_independently():
    drafter, target = make_drafter(torch.float64), make_target(torch.float64)
    anchors, position_ids, cache = fill(drafter, batch_size=3)
    more = torch.randn(3, KV_HEADS, 6, HEAD_DIM, dtype=torch.float64)
    counts = torch.tensor([0, 4, 6])  # ragged, as after rounds of different acceptance
    for layer in range(3):
        cache.update(more, more, layer, torch.arange(6) < counts[:, None])
    together = drafter.draft(anchors, position_ids + counts, cache, target)
    for index in range(3):
        alone = copy.deepcopy(cache)
        alone.batch_select_indices(torch.tensor([index]))
        draft = drafter.draft(anchors[[index]], position_ids[[index]] + counts[[index]], alone, target)
        assert torch.equal(draft.token_ids[0], together.token_ids[index])
        torch.testing.assert_close(draft.logits[0], together.logits[index], atol=1e-10, rtol=0)


@pytest.mark.parametrize("change", ["anchor", "position", "boundary", "window", "summary"])
def test_every_view_reaches_the_draft(change):
    drafter, target = make_drafter(), make_target()
    anchors, position_ids, cache = fill(drafter)
    before = drafter.draft(anchors, position_ids, cache, target).logits
    if change == "anchor":
        anchors = (anchors + 1) % (VOCAB - 1)
    elif change == "position":
        position_ids = position_ids + 1
    elif change == "boundary":
        cache.boundary[:, 1] += 1
    elif change == "window":
        cache.layers[1].values[:, :, 3] += 1
    else:
        cache.layers[1].summary_values[:, 0, 2] += 1
    after = drafter.draft(anchors, position_ids, cache, target).logits
    assert (after - before).abs().amax(dim=(1, 2)).min() > 1e-4


def test_slots_of_the_window_that_hold_no_row_are_not_seen():
    drafter, target = make_drafter(), make_target()
    anchors, position_ids, cache = fill(drafter, num_rows=5)
    before = drafter.draft(anchors, position_ids, cache, target).logits
    for layer in cache.layers:
        layer.keys[:, :, 5:], layer.values[:, :, 5:] = 7.0, 7.0
    assert torch.equal(drafter.draft(anchors, position_ids, cache, target).logits, before)


def test_markov_head_conditions_each_token_on_the_one_before():
    drafter, target = make_drafter(), make_target()
    anchors, position_ids, cache = fill(drafter)
    base = target.lm_head(drafter(anchors, position_ids, cache, target).hidden_states)
    draft = drafter.draft(anchors, position_ids, cache, target)
    previous = torch.cat([anchors[:, None], draft.token_ids[:, :-1]], dim=1)
    head = drafter.markov_head
    expected = base + head.w1.weight[previous] @ head.w2.weight.T
    torch.testing.assert_close(draft.logits, expected, atol=1e-5, rtol=0)
    assert torch.equal(draft.token_ids, expected.argmax(dim=-1))


def test_draft_is_reproducible_by_torchs_seed_alone():
    drafter, target = make_drafter(), make_target()
    views = fill(drafter, batch_size=8)

    def sampled(seed):
        torch.manual_seed(seed)
        return drafter.draft(*views, target, do_sample=True)

    assert torch.equal(sampled(3).token_ids, sampled(3).token_ids)
    assert torch.equal(sampled(3).logits, sampled(3).logits)
    assert not torch.equal(sampled(3).token_ids, sampled(4).token_ids)


def test_greedy_draft_draws_no_random_numbers():
    drafter, target = make_drafter(), make_target()
    views = fill(drafter)
    before = torch.get_rng_state()
    drafter.draft(*views, target)
    assert torch.equal(torch.get_rng_state(), before)


def test_processed_logits_are_handed_over():
    drafter, target = make_drafter(), make_target()
    views = fill(drafter)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.5), SuppressTokensLogitsProcessor([3, 4])])
    plain = drafter.draft(*views, target)
    draft = drafter.draft(*views, target, logits_processor=processors, input_ids=torch.zeros(2, 9, dtype=torch.long))
    assert (draft.logits[:, :, [3, 4]] == -torch.inf).all()
    kept = [token for token in range(VOCAB) if token not in (3, 4)]
    torch.testing.assert_close(draft.logits[:, 0, kept], plain.logits[:, 0, kept] / 0.5)
    assert draft.possible.all() and draft.finite.all()


def test_draft_says_where_processors_leave_no_token():
    drafter, target = make_drafter(), make_target()
    nothing = LogitsProcessorList([SuppressTokensLogitsProcessor(list(range(VOCAB)))])
    input_ids = torch.zeros(2, 9, dtype=torch.long)
    draft = drafter.draft(*fill(drafter), target, logits_processor=nothing, input_ids=input_ids, do_sample=True)
    assert not draft.possible.any() and draft.finite.all()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_sequence_with_non_finite_logits_is_flagged(value, do_sample):
    drafter, target = make_drafter(), make_target()
    anchors, position_ids, cache = fill(drafter, batch_size=3)
    cache.boundary[1, 0, 0] = value
    draft = drafter.draft(anchors, position_ids, cache, target, do_sample=do_sample)
    assert draft.finite.tolist() == [True, False, True]


@pytest.mark.parametrize("do_sample", [False, True])
def test_non_finite_weights_are_flagged(do_sample):
    drafter, target = make_drafter(), make_target()
    with torch.no_grad():
        drafter.markov_head.w2.weight[7] = torch.inf
    draft = drafter.draft(*fill(drafter), target, do_sample=do_sample)
    assert not draft.finite.any()
    assert ((0 <= draft.token_ids) & (draft.token_ids < VOCAB)).all()


@pytest.mark.parametrize(
    "drafter_dtype, target_dtype",
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_drafter_and_target_may_differ_in_dtype(drafter_dtype, target_dtype):
    drafter, target = make_drafter(drafter_dtype), make_target(target_dtype)
    views = fill(drafter, dtype=target_dtype)
    assert views[2].layers[0].keys.dtype == views[2].boundary.dtype == drafter_dtype
    draft = drafter.draft(*views, target)
    assert draft.logits.dtype == torch.float32 and draft.finite.all()
    reference, in_fp32 = make_drafter(), make_target()
    expected = reference.draft(*fill(reference), in_fp32).logits[:, 0]
    assert (draft.logits[:, 0] - expected).abs().mean() < 0.1 * expected.std()


def test_borrowed_modules_are_not_part_of_the_drafter():
    drafter, target = make_drafter(), make_target()
    names = set(drafter.state_dict())
    drafter.draft(*fill(drafter), target)
    assert set(drafter.state_dict()) == names
    borrowed = {id(module) for module in (target.embed_tokens, target.final_norm, target.lm_head)}
    assert not borrowed & {id(module) for module in drafter.modules()}


def test_norms_start_at_one_and_summary_queries_at_their_scale():
    drafter = LongSparkDrafter(tiny_config(head_dim=64, num_summary_queries=64))
    norms = [parameter for name, parameter in drafter.named_parameters() if "norm" in name]
    assert norms and all((parameter == 1).all() for parameter in norms)
    assert abs(drafter.summary_queries.std().item() / 64**-0.5 - 1) < 0.05


# --- training objective -------------------------------------------------------------------------------------------


def loss_inputs(batch_size=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    shape = (batch_size, BLOCK)
    return {
        "hidden_states": torch.randn(*shape, HIDDEN, generator=generator).to(dtype),
        "previous_ids": torch.randint(0, VOCAB, shape, generator=generator),
        "labels": torch.randint(0, VOCAB, shape, generator=generator),
        "target_hidden_states": torch.randn(*shape, HIDDEN, generator=generator).to(dtype),
        "weights": torch.rand(shape, generator=generator).to(dtype),
    }


def dense_loss(drafter, target, hidden_states, previous_ids, labels, target_hidden_states, weights, ce_weight=0.1):
    """The paper's objective, written out."""
    head = drafter.markov_head
    z = hidden_states @ target.lm_head.weight.T + head.w1.weight[previous_ids] @ head.w2.weight.T
    q = z.softmax(dim=-1)
    p = (target_hidden_states @ target.lm_head.weight.T).softmax(dim=-1)
    cross_entropy = -q.gather(-1, labels[..., None])[..., 0].log()
    return (weights * (ce_weight * cross_entropy + (1 - ce_weight) * (p - q).abs().sum(dim=-1))).sum()


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 30, 256])
@pytest.mark.parametrize("ce_weight", [0.1, 1.0, 0.0])
def test_loss_and_its_gradient_equal_the_dense_formula(rows_per_chunk, ce_weight):
    drafter, target = make_drafter(torch.float64), make_target(torch.float64)
    inputs = loss_inputs()
    inputs["hidden_states"].requires_grad_()
    wanted = [inputs["hidden_states"], *drafter.markov_head.parameters()]

    loss = drafter.weighted_loss(**inputs, target=target, ce_weight=ce_weight, rows_per_chunk=rows_per_chunk)
    expected = dense_loss(drafter, target, **inputs, ce_weight=ce_weight)

    assert loss.dtype == torch.float64 and loss.shape == ()
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted)):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_loss_of_chunks_too_large_to_keep_is_the_same():
    vocab_size, rows = 20011, 300
    torch.manual_seed(0)
    drafter = LongSparkDrafter(tiny_config(vocab_size=vocab_size, markov_rank=2)).double()
    target = make_target(torch.float64)
    target.lm_head = nn.Linear(HIDDEN, vocab_size, bias=False).double().requires_grad_(False)
    inputs = loss_inputs(batch_size=rows // BLOCK)
    inputs["hidden_states"].requires_grad_()
    wanted = [inputs["hidden_states"], *drafter.markov_head.parameters()]

    loss = drafter.weighted_loss(**inputs, target=target)
    expected = dense_loss(drafter, target, **inputs)

    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted)):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_loss_of_a_bf16_drafter_is_at_least_fp32():
    drafter, target = make_drafter(torch.bfloat16), make_target(torch.bfloat16)
    loss = drafter.weighted_loss(**loss_inputs(dtype=torch.bfloat16), target=target)
    exact = make_drafter(torch.float64), make_target(torch.float64)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), dense_loss(*exact, **loss_inputs()), atol=0, rtol=0.02)


def training_batch(drafter, batch_size=3):
    anchors, position_ids, cache = fill(drafter, batch_size=batch_size)
    generator = torch.Generator().manual_seed(8)
    return {
        "anchor_ids": anchors,
        "position_ids": position_ids,
        "cache": cache,
        "labels": torch.randint(0, VOCAB, (batch_size, BLOCK), generator=generator),
        "target_hidden_states": torch.randn(batch_size, BLOCK, HIDDEN, generator=generator).to(drafter.dtype),
    }


@pytest.mark.parametrize("masked", [False, True])
def test_forward_loss_is_the_weighted_mean_over_the_slots_that_count(masked):
    drafter, target = make_drafter(torch.float64), make_target(torch.float64)
    batch = training_batch(drafter)
    mask = torch.ones(3, BLOCK, dtype=torch.bool)
    if masked:
        mask[0, 2:], mask[1, :] = False, False

    output = drafter(**batch, target=target, label_mask=mask if masked else None)

    weights = torch.exp(-torch.arange(BLOCK, dtype=torch.float64) / 4) * mask
    previous_ids = torch.cat([batch["anchor_ids"][:, None], batch["labels"][:, :-1]], dim=1)
    labels, judged = batch["labels"], batch["target_hidden_states"]
    total = dense_loss(drafter, target, output.hidden_states, previous_ids, labels, judged, weights)
    torch.testing.assert_close(output.loss, total / weights.sum(), atol=1e-12, rtol=1e-12)


def test_slots_that_do_not_count_leave_no_trace_in_the_loss():
    drafter, target = make_drafter(), make_target()
    batch = training_batch(drafter)
    mask = torch.ones(3, BLOCK, dtype=torch.bool)
    mask[:, 3:] = False
    loss = drafter(**batch, target=target, label_mask=mask).loss
    batch["labels"][:, 3:] = 0
    batch["target_hidden_states"][:, 3:] = 9.0
    assert torch.equal(drafter(**batch, target=target, label_mask=mask).loss, loss)


def test_loss_without_any_label_that_counts_is_zero():
    drafter, target = make_drafter(), make_target()
    loss = drafter(**training_batch(drafter), target=target, label_mask=torch.zeros(3, BLOCK, dtype=torch.bool)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in drafter.parameters())


def test_gradient_reaches_every_weight_of_the_drafter_and_none_of_the_target():
    drafter, target = make_drafter(), make_target()
    batch = training_batch(drafter)

    drafter(**batch, target=target).loss.backward()

    # The summary queries too: they are the keys of the summary entries, even where the summary itself is a constant.
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    # Of the Markov embedding only the rows of predecessors: anchors, and labels but the last.
    predecessors = torch.cat([batch["anchor_ids"], batch["labels"][:, :-1].flatten()]).unique()
    assert drafter.markov_head.w1.weight.grad.abs().sum(dim=-1).nonzero().flatten().tolist() == predecessors.tolist()
    for module in (target.embed_tokens, target.final_norm, target.lm_head):
        assert all(parameter.grad is None for parameter in module.parameters())


def test_training_steps_lower_the_loss():
    drafter, target = make_drafter(), make_target()
    batch = training_batch(drafter)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for _ in range(12):
        loss = drafter(**batch, target=target).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_labels_without_the_targets_states_raise():
    drafter, target = make_drafter(), make_target()
    batch = training_batch(drafter)
    del batch["target_hidden_states"]
    with pytest.raises(ValueError, match="target_hidden_states"):
        drafter(**batch, target=target)


def test_perfect_draft_costs_only_its_cross_entropy():
    drafter, target = make_drafter(torch.float64), make_target(torch.float64)
    with torch.no_grad():
        drafter.markov_head.w2.weight.zero_()
    inputs = loss_inputs()
    inputs["hidden_states"] = inputs["target_hidden_states"]
    loss = drafter.weighted_loss(**inputs, target=target)
    logits = inputs["target_hidden_states"] @ target.lm_head.weight.T
    expected = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="none")
    torch.testing.assert_close(loss, 0.1 * (expected * inputs["weights"].flatten()).sum())
