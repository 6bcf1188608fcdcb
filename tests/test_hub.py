"""Drafters as repositories: what is saved, what loads where, what is refused before anything is read."""

import ast
import json
import logging
import os
import struct
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_imports, get_relative_imports
from transformers.utils import logging as transformers_logging

import longspark_hf
from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.configuration_longspark import tokenizer_fingerprint
from longspark_hf.weights_longspark import check_weights, read_header

from .targets import build, drafter_config, random_drafter, tiny
from .test_integrations import tiny_tokenizer


PACKAGE = Path(longspark_hf.__file__).parent
MODULES = sorted(path.name for path in PACKAGE.glob("*_longspark.py"))
OPTIONS = {"do_sample": False, "max_new_tokens": 16}

# Makes `import longspark_hf` fail for good, though it is installed: no path and no finder of it is left.
WITHOUT_PACKAGE = """
import importlib.util, os, sys
sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p or ".", "longspark_hf"))]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", getattr(f, "__name__", "")).lower()]
assert importlib.util.find_spec("longspark_hf") is None, "the package can still be imported"
"""
COMMON = """
import json, sys, torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation import GenerationMixin
torch.set_num_threads(1)

def depth(name):
    found, method = 0, getattr(GenerationMixin, name)
    while hasattr(method, "__wrapped__"):
        found, method = found + hasattr(method, "_longspark_seam"), method.__wrapped__
    return found

def depths():
    return [depth(n) for n in ("_assisted_decoding", "_get_candidate_generator", "_validate_generation_mode")]

def answer(target, prompt, drafter):
    tokens = target.generate(prompt, assistant_model=drafter, do_sample=False, max_new_tokens=16)[0].tolist()
    return {"tokens": tokens, "rounds": drafter.stats.rounds, "class": type(drafter).__module__}
"""


def run_python(folder: Path, *parts: str, **environment: str) -> dict:
    """What a fresh Python process prints last, as JSON; it runs in `folder`, with a cache of remote modules of its own."""
    script = "\n".join(textwrap.dedent(part) for part in parts)
    own = {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-I", "-W", "error::FutureWarning", "-c", script],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **own, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A target and a drafter for it, saved side by side; and what the target says plainly."""
    folder = tmp_path_factory.mktemp("saved")
    target = build("qwen3")
    target.save_pretrained(folder / "target")
    random_drafter(target).save_pretrained(folder / "drafter")
    prompt = torch.randint(2, 90, (1, 20), generator=torch.Generator().manual_seed(7))
    (folder / "prompt.json").write_text(json.dumps(prompt.tolist()))
    return folder, target.generate(prompt, **OPTIONS)[0].tolist()


# --- the round trip -------------------------------------------------------------------------------------------------


def test_a_saved_drafter_brings_along_the_packages_own_modules_and_nothing_else(saved):
    folder = saved[0] / "drafter"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*MODULES, "README.md", "config.json", "model.safetensors"]
    )
    for name in MODULES:
        assert (folder / name).read_bytes() == (PACKAGE / name).read_bytes(), name
    assert json.loads((folder / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_longspark.LongSparkConfig",
        "AutoModel": "modeling_longspark.LongSparkDrafter",
    }


@pytest.mark.parametrize("name", MODULES)
def test_a_shipped_module_imports_its_siblings_torch_and_transformers_alone(name):
    path = PACKAGE / name
    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    assert set(get_imports(path)) <= allowed
    assert {f"{module}.py" for module in get_relative_imports(path)} <= set(MODULES)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            # `from . import x` is not copied, `from .a.b import x` is looked for under a name that is not there.
            assert node.level == 1 and node.module and "." not in node.module, ast.unparse(node)


def test_remote_code_alone_drafts_in_a_process_without_the_package(saved):
    folder, plain = saved
    found = run_python(
        folder,
        WITHOUT_PACKAGE,
        COMMON,
        """
        drafter = AutoModel.from_pretrained("drafter", trust_remote_code=True).eval()
        target = AutoModelForCausalLM.from_pretrained("target").eval()
        prompt = torch.tensor(json.load(open("prompt.json")))
        plain = target.generate(prompt, do_sample=False, max_new_tokens=16)[0].tolist()
        bf16 = AutoModel.from_pretrained("drafter", trust_remote_code=True, dtype=torch.bfloat16).eval()
        again = AutoModel.from_pretrained("drafter", trust_remote_code=True)
        again.save_pretrained("again")
        third = AutoModel.from_pretrained("again", trust_remote_code=True)
        print(json.dumps({
            "plain": plain, "first": answer(target, prompt, drafter), "bf16": answer(target, prompt, bf16),
            "third": answer(target, prompt, third), "depths": depths(), "package": "longspark_hf" in sys.modules,
            "dtype": str(bf16.dtype),
        }))
        """,
    )
    assert found["plain"] == plain and not found["package"] and found["depths"] == [1, 1, 1]
    assert found["dtype"] == "torch.bfloat16"
    for which in ("first", "bf16", "third"):
        assert found[which]["tokens"] == plain and found[which]["rounds"] > 0
        assert found[which]["class"].startswith("transformers_modules.")


@pytest.mark.parametrize("order", ["package first", "remote code first"])
def test_package_and_remote_code_live_in_one_process_in_any_order(order, saved):
    folder, plain = saved
    remote = """
        from transformers.dynamic_module_utils import get_class_from_dynamic_module
        auto = AutoModel.from_pretrained("drafter", trust_remote_code=True).eval()
        remote = get_class_from_dynamic_module("modeling_longspark.LongSparkDrafter", "drafter").from_pretrained("drafter")
        """
    package = f"sys.path.insert(0, {str(PACKAGE.parent)!r}); import longspark_hf"
    steps = [package, remote] if order == "package first" else [remote, package]
    found = run_python(
        folder,
        COMMON,
        *steps,
        """
        own = longspark_hf.LongSparkDrafter.from_pretrained("drafter").eval()
        plainly_auto = AutoModel.from_pretrained("drafter").eval()
        target = AutoModelForCausalLM.from_pretrained("target").eval()
        prompt = torch.tensor(json.load(open("prompt.json")))
        answers = [answer(target, prompt, d) for d in (auto, remote.eval(), own, plainly_auto)]
        before = depths()
        longspark_hf.uninstall()
        print(json.dumps({"answers": answers, "depths": before, "uninstalled": depths()}))
        """,
    )
    auto, remote, own, plainly_auto = found["answers"]
    assert all(a["tokens"] == plain and a["rounds"] == own["rounds"] > 0 for a in found["answers"])
    assert remote["class"].startswith("transformers_modules.") and own["class"].startswith("longspark_hf.")
    assert plainly_auto["class"].startswith("longspark_hf.")
    assert found["depths"] == [1, 1, 1] and found["uninstalled"] == [0, 0, 0]


def test_auto_classes_load_without_remote_code_once_the_package_is_imported(saved):
    folder, _ = saved
    assert type(AutoConfig.from_pretrained(folder / "drafter")) is LongSparkConfig
    assert type(AutoModel.from_pretrained(folder / "drafter")) is LongSparkDrafter


@pytest.mark.parametrize(
    "arguments, dtype",
    [
        ({}, torch.float32),
        ({"dtype": "auto"}, torch.float32),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"device_map": "cpu"}, torch.float32),
        ({"device_map": "auto"}, torch.float32),
        ({"device_map": "auto", "dtype": torch.bfloat16}, torch.bfloat16),
    ],
    ids=str,
)
def test_a_drafter_drafts_however_it_was_loaded(arguments, dtype, saved, qwen3, prompt):
    if "device_map" in arguments:
        pytest.importorskip("accelerate")
    drafter = AutoModel.from_pretrained(saved[0] / "drafter", **arguments)
    assert drafter.dtype == dtype
    assert qwen3.generate(prompt, assistant_model=drafter, **OPTIONS)[0].tolist() == saved[1]
    assert drafter.stats.rounds > 0


def test_a_sharded_checkpoint_loads_equal(saved, qwen3, prompt, tmp_path):
    drafter = random_drafter(qwen3)
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3 and not (tmp_path / "model.safetensors").exists()
    loaded = LongSparkDrafter.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())
    assert qwen3.generate(prompt, assistant_model=loaded, **OPTIONS)[0].tolist() == saved[1]


def test_a_drafter_that_would_stay_on_disk_says_so(saved, tmp_path):
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match="`device_map` leaves the whole drafter on disk"):
        LongSparkDrafter.from_pretrained(saved[0] / "drafter", device_map={"": "disk"}, offload_folder=tmp_path)


class Int8Linear(nn.Module):
    """A weight-only quantised layer, as far as the drafter can tell: integer weights, and only it knows how to apply them."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        weight = (self.weight.float() * self.scale).to(states.dtype)
        return nn.functional.linear(states, weight, self.bias)


def test_a_quantised_target_is_drafted_for_by_a_bf16_drafter(saved, prompt):
    target = build("qwen3")
    for name, module in [*target.named_modules()]:
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(target.get_submodule(parent), child, Int8Linear(module))
    drafter = LongSparkDrafter.from_pretrained(saved[0] / "drafter", dtype=torch.bfloat16)
    plain = target.generate(prompt, **OPTIONS)
    assert isinstance(target.get_output_embeddings(), Int8Linear)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **OPTIONS), plain)
    assert drafter.stats.rounds > 0 and drafter.dtype == torch.bfloat16


def write_gguf(target, path: Path) -> None:
    """A tiny Llama with 8-bit weights in a GGUF file."""
    gguf = pytest.importorskip("gguf")
    config, q8 = target.config, gguf.GGMLQuantizationType.Q8_0
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    outer = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
    rotated = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for key, tensor in target.state_dict().items():
        array, name = tensor.numpy(), outer.get(key.removesuffix(".weight"))
        if name is None:
            _, _, layer, inner = key.removesuffix(".weight").split(".", 3)
            name = f"blk.{layer}.{names[inner]}"
            if heads := rotated.get(names[inner]):  # GGUF keeps the pairs of a rotation side by side
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 2:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(array, q8), raw_dtype=q8)
        else:
            writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_target_is_drafted_for_by_a_bf16_drafter(prompt, tmp_path):
    config = tiny(LlamaConfig, hidden_size=64, num_attention_heads=4)
    written = AutoModelForCausalLM.from_config(config)
    write_gguf(written, tmp_path / "tiny.gguf")
    random_drafter(written).save_pretrained(tmp_path / "drafter")
    target = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf").eval()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    drafter = LongSparkDrafter.from_pretrained(tmp_path / "drafter", dtype=torch.bfloat16)
    plain = target.generate(prompt, **OPTIONS)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **OPTIONS), plain)
    assert drafter.stats.rounds > 0


def test_a_card_is_written_once_and_then_left_alone(qwen3, tmp_path):
    drafter = random_drafter(qwen3, target_name_or_path="Qwen/Qwen3-8B")
    drafter.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert 'base_model: "Qwen/Qwen3-8B"' in card and "Not a standalone model" in card
    (tmp_path / "README.md").write_text("mine")
    drafter.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


# --- weights that are refused before they are read -----------------------------------------------------------------


RELEASED_4B = {
    "model_type": "draftfreekv",
    "architectures": ["DraftFreeKVModel"],
    "dtype": "bfloat16",
    "hidden_size": 2560,
    "qwen_intermediate_size": 9728,
    "qwen_num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_target_layers": 36,
    "target_layer_ids": [0, 9, 18, 26, 35],
    "target_layer_policy": "uniform_5",
    "block_size": 7,
    "draft_mode": "parallel_shifted_qwen",
    "parallel_mixer_layers": 5,
    "mask_token_id": 151669,
    "parallel_markov_rank": 256,
    "qwen_rope_theta": 1000000.0,
    "global_query_mode": "learned",
}


def released_shapes(hidden=2560, heads=32, inner=9728, vocab=151936) -> dict[str, tuple[int, ...]]:
    """The 65 tensors of a released checkpoint (format file, section 1.2)."""
    shapes = {
        "draft_state_encoder.proj.net.0.weight": (hidden, 5 * hidden),
        "draft_state_encoder.proj.net.2.weight": (hidden, hidden),
        "draft_state_encoder.norm.weight": (hidden,),
        "parallel_shifted_input.position_embedding.weight": (7, hidden),
        "parallel_shifted_input.proj.net.0.weight": (hidden, 2 * hidden),
        "parallel_shifted_input.proj.net.2.weight": (hidden, hidden),
        "parallel_shifted_input.norm.weight": (hidden,),
        "global16_raw256_reference.global_query_generator.learned_query": (5, heads, 16, 128),
        "parallel_markov_head.markov_w1.weight": (vocab, 256),
        "parallel_markov_head.markov_w2.weight": (vocab, 256),
    }
    for layer in range(5):
        for name, shape in {
            "self_attn.q_proj": (heads * 128, hidden),
            "self_attn.k_proj": (1024, hidden),
            "self_attn.v_proj": (1024, hidden),
            "self_attn.o_proj": (hidden, heads * 128),
            "self_attn.q_norm": (128,),
            "self_attn.k_norm": (128,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            shapes[f"parallel_qwen_layers.{layer}.{name}.weight"] = shape
    return shapes


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]], cut: int = 0) -> None:
    """A bf16 safetensors file of full size whose zeros take no disk."""
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(shapes):
        size = 2 * int(torch.Size(shapes[name]).numel())
        header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position - cut)


def write_released_4b(folder: Path, shapes: dict | None = None, cut: int = 0, **config) -> None:
    (folder / "config.json").write_text(json.dumps(RELEASED_4B | config))
    write_sparse(folder / "model.safetensors", released_shapes() if shapes is None else shapes, cut)


def test_a_released_4b_file_has_the_published_size_and_all_of_its_65_tensors_are_used(tmp_path):
    write_released_4b(tmp_path)
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size == 1_283_564_720
    assert file.stat().st_blocks * 512 < 1e6, "the file is not sparse here, so this test would fill the disk"

    drafter, info = LongSparkDrafter.from_pretrained(tmp_path, device_map={"": "meta"}, output_loading_info=True)

    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    used = check_weights(tmp_path, expected)
    assert len(used) == len(expected) == 65
    assert drafter.num_parameters() == sum(torch.Size(t.shape).numel() for t in used.values()) == 641_778_432
    assert drafter.dtype == torch.bfloat16


class MemorySpent(Exception):
    """Raised by the stand-in for the loader of transformers."""


@pytest.fixture
def nothing_may_be_read(monkeypatch):
    """Whatever gets as far as the loader of transformers fails the test."""

    def spend(*_, **__):
        raise MemorySpent

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(spend))


def without(shapes: dict, name: str) -> dict:
    return {key: shape for key, shape in shapes.items() if key != name}


Q_PROJ = "parallel_qwen_layers.3.self_attn.q_proj.weight"
BAD_RELEASED = {
    "truncated": ({"cut": 4096}, "truncated"),
    "one byte short": ({"cut": 1}, "1,283,564,719 bytes, its header promises 1,283,564,720"),
    "missing": ({"shapes": without(released_shapes(), Q_PROJ)}, r"missing: layers\.3\.self_attn\.q_proj"),
    "extra": ({"shapes": released_shapes() | {"adapter.weight": (8, 8)}}, r"unexpected: adapter\.weight"),
    "both names": ({"shapes": released_shapes() | {"summary_queries": (5, 32, 16, 128)}}, "under two names"),
    "wrong shape": (
        {"shapes": released_shapes() | {Q_PROJ: (4096, 2561)}},
        r"layers\.3\.self_attn\.q_proj\.weight \(4096, 2561\), not \(4096, 2560\)",
    ),
    "of another target": (
        {"hidden_size": 4096},
        r"of another shape: boundary_fusion\.fc1\.weight \(2560, 12800\), not \(4096, 20480\)",
    ),
    "another draft_mode": ({"draft_mode": "markov"}, "`draft_mode` = 'markov'"),
    "unknown key": ({"gated_mixture": True}, "gated_mixture"),
    "another model": ({"model_type": "qwen3"}, "`qwen3` model"),
    "weights elsewhere": ({"model_type": "longspark", "transformers_weights": "../x.safetensors"}, "never followed"),
    "hub kernel by another name": (
        {"model_type": "longspark", "_attn_implementation": "someone/kernel"},
        "someone/kernel",
    ),
    "hub kernel for a part": (
        {"model_type": "longspark", "attn_implementation": {"": "someone/kernel"}},
        "someone/kernel",
    ),
    "hub kernel": ({"model_type": "longspark", "attn_implementation": "someone/kernel"}, "someone/kernel"),
}


def test_the_loader_would_be_reached_by_a_good_file(tmp_path, nothing_may_be_read):
    write_released_4b(tmp_path)
    with pytest.raises(MemorySpent):
        LongSparkDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("case", BAD_RELEASED)
def test_a_bad_repository_is_refused_before_memory_is_spent(case, tmp_path, nothing_may_be_read):
    arguments, message = BAD_RELEASED[case]
    write_released_4b(tmp_path, **arguments)
    with pytest.raises(ValueError, match=message):
        LongSparkDrafter.from_pretrained(tmp_path)


def pickle_that_would_run(path: Path) -> None:
    """A pickle that leaves a trace when it is loaded without care."""

    class Trace:
        def __reduce__(self):
            return os.mkdir, (str(path.parent / "executed"),)

    torch.save({"weight": Trace()}, path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_refused_and_not_run(name, saved, qwen3, tmp_path, nothing_may_be_read):
    drafter_config(qwen3).save_pretrained(tmp_path)
    pickle_that_would_run(tmp_path / name)
    with pytest.raises(ValueError, match=f"pickle.*{name}"):
        LongSparkDrafter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pickle"):
        AutoModel.from_pretrained(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_safetensors_cannot_be_switched_off(saved):
    with pytest.raises(ValueError, match="use_safetensors"):
        LongSparkDrafter.from_pretrained(saved[0] / "drafter", use_safetensors=False)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/x.safetensors", "weights.bin"])
def test_an_index_that_leads_out_of_its_folder_is_refused(shard, qwen3, tmp_path, nothing_may_be_read):
    folder = tmp_path / "drafter"
    random_drafter(qwen3).save_pretrained(folder, max_shard_size="20KB")
    first = sorted(folder.glob("model-*.safetensors"))[0]
    (tmp_path / "elsewhere.safetensors").write_bytes(first.read_bytes())
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {k: shard if v == first.name else v for k, v in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="only safetensors files in its own folder"):
        LongSparkDrafter.from_pretrained(folder)


def test_a_missing_shard_is_named(qwen3, tmp_path, nothing_may_be_read):
    random_drafter(qwen3).save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=gone.name):
        LongSparkDrafter.from_pretrained(tmp_path)


def test_an_adapter_that_names_another_model_is_refused(saved, tmp_path, nothing_may_be_read):
    LongSparkDrafter.config_class.from_pretrained(saved[0] / "drafter").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((saved[0] / "drafter" / "model.safetensors").read_bytes())
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/else"}))
    with pytest.raises(ValueError, match="adapter_config.json"):
        LongSparkDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (struct.pack("<Q", 10**15) + b"{}", "no safetensors file"),
        (struct.pack("<Q", 8) + b"{]......", "damaged"),
        (
            struct.pack("<Q", 62) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}        ' + b"0" * 8,
            "damaged",
        ),
        (
            struct.pack("<Q", 62) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}       ' + b"0" * 16,
            "damaged",
        ),
        (
            struct.pack("<Q", 62) + b'{"a":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}}    ' + b"0" * 8,
            "F8_E4M3",
        ),
    ],
    ids=["empty", "lfs pointer", "huge header", "no json", "size against shape", "hole", "quantised"],
)
def test_a_damaged_file_is_named_as_such(content, message, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_header(tmp_path / "model.safetensors")


def test_integer_weights_are_refused(saved, tmp_path):
    LongSparkConfig.from_pretrained(saved[0] / "drafter").save_pretrained(tmp_path)
    weights = load_file(saved[0] / "drafter" / "model.safetensors")
    weights["position_embedding.weight"] = weights["position_embedding.weight"].long()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="position_embedding.weight I64"):
        LongSparkDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("ids", [[1, 2, 97], [2, 1, 5], [-1, 2, 5], [3, 3, 5]], ids=str)
def test_a_draft_vocabulary_that_is_none_is_refused(ids, qwen3, tmp_path):
    drafter = random_drafter(qwen3)
    drafter.set_draft_vocabulary(torch.tensor([1, 2, 5]))
    drafter.save_pretrained(tmp_path)
    LongSparkDrafter.from_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {"draft_token_ids": torch.tensor(ids)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="not ascending tokens"):
        LongSparkDrafter.from_pretrained(tmp_path)


# --- binding ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def warnings_of(caplog):
    """Messages of our loggers, each of which must be new: `warning_once` remembers what it has said."""
    transformers_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        yield lambda: [r.message for r in caplog.records if r.name.startswith("longspark_hf")]
    transformers_logging.disable_propagation()


def test_the_config_keeps_the_targets_fingerprint(qwen3, tmp_path):
    tokenizer = tiny_tokenizer()
    config = LongSparkConfig.from_target(qwen3.config, tokenizer, mask_token_id=96)
    config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.target_model_type == "qwen3" and config.vocab_size == 97
    assert config.target_tokenizer == tokenizer_fingerprint(tiny_tokenizer())
    tokenizer.chat_template = "another"
    assert config.target_tokenizer == tokenizer_fingerprint(tokenizer)
    tokenizer.add_tokens(["new"])
    assert config.target_tokenizer != tokenizer_fingerprint(tokenizer)


def test_another_tokenizer_is_warned_about_once(qwen3, warnings_of):
    tokenizer = tiny_tokenizer()
    drafter = LongSparkDrafter(LongSparkConfig.from_target(qwen3.config, tokenizer, mask_token_id=96))
    drafter.check_target(qwen3, tiny_tokenizer())
    assert warnings_of() == []
    tokenizer.add_tokens(["of another tokenizer"])
    drafter.check_target(qwen3, tokenizer)
    drafter.check_target(qwen3, tokenizer)
    assert len(warnings_of()) == 1 and drafter.config.target_tokenizer in warnings_of()[0]


def test_a_fine_tune_of_the_same_base_is_drafted_for_with_one_warning(prompt, warnings_of):
    target = build("qwen3", seed=3)
    drafter = random_drafter(target, target_name_or_path="Qwen/Base-1B")
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(1.1)
    target.config._name_or_path = "someone/Base-1B-Instruct"
    target.config.rope_parameters = dict(target.config.rope_parameters, rope_theta=54321.0)
    target = AutoModelForCausalLM.from_config(target.config).eval()
    target.generation_config.eos_token_id = None
    plain = target.generate(prompt, **OPTIONS)
    for _ in range(3):
        assert torch.equal(target.generate(prompt, assistant_model=drafter, **OPTIONS), plain)
    assert len(warnings_of()) == 1
    assert "made for Qwen/Base-1B, the target is someone/Base-1B-Instruct" in warnings_of()[0]
    assert "54321.0" in warnings_of()[0]


def test_a_lora_of_the_same_base_is_drafted_for_with_one_warning(prompt, warnings_of):
    peft = pytest.importorskip("peft")
    target = build("llama", seed=4)
    target.config._name_or_path = "someone/Base-LoRA-test"
    drafter = random_drafter(target)
    drafter.check_target(target)
    assert warnings_of() == []
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():  # from inside peft, which is not ours to fix
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = peft.get_peft_model(target, config, adapter_name="tuned").eval()
    plain = wrapped.generate(input_ids=prompt, **OPTIONS)
    for _ in range(3):
        assert torch.equal(wrapped.generate(input_ids=prompt, assistant_model=drafter, **OPTIONS), plain)
    assert len(warnings_of()) == 1 and "the target has tuned" in warnings_of()[0]


def test_another_architecture_of_the_same_shapes_is_warned_about(qwen3, warnings_of):
    drafter = random_drafter(qwen3)
    llama = tiny(LlamaConfig, head_dim=16, rope_parameters=dict(qwen3.config.rope_parameters))
    target = AutoModelForCausalLM.from_config(llama)
    drafter.check_target(target)
    assert len(warnings_of()) == 1 and "made for a `qwen3`, the target is a `llama`" in warnings_of()[0]


def test_a_target_of_another_shape_is_an_error(qwen3):
    drafter = random_drafter(qwen3)
    target = AutoModelForCausalLM.from_config(tiny(LlamaConfig, head_dim=12))
    with pytest.raises(ValueError, match=r"head_dim 16 \(target: 12\)"):
        drafter.check_target(target)
