"""The `longspark` command, and what `import longspark_hf` must not need."""

import json
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config
from typer.testing import CliRunner

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.cli import app
from longspark_hf.evaluation.targets import load_drafter_config, load_target, load_target_config, mask_token_id


def tiny_config(**overrides):
    sizes = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(sizes | overrides))


def byte_tokenizer():
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>")


@pytest.fixture
def target_folder(tmp_path):
    folder = tmp_path / "tiny-llama"
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_drafter(target_config, folder, **overrides):
    config = LongSparkConfig.from_target(target_config, mask_token_id=271, window_size=16, markov_rank=8, **overrides)
    LongSparkDrafter(config).save_pretrained(folder)
    return folder


def longspark(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_bad_input(result, *hints):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    for hint in hints:
        assert hint in line


def test_info_describes_the_drafter_from_target_would_build(tmp_path):
    tiny_config().save_pretrained(tmp_path)

    result = longspark("info", tmp_path, "--json")

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    config = LongSparkConfig.from_target(tiny_config(), mask_token_id=0)
    assert found["fits"] is True
    assert found["target_layer_ids"] == config.target_layer_ids == [0, 1, 2]
    assert found["state_bytes"] == config.state_bytes(torch.bfloat16)
    assert found["parameters"] == sum(p.numel() for p in LongSparkDrafter(config).parameters())
    # 3 layers, keys and values, 2 heads of 8, two bytes each
    assert found["peer_state_bytes"]["128K"] == 3 * 2 * 2 * 8 * 2 * 131072 == 4 * found["peer_state_bytes"]["32K"]


def test_info_reads_a_saved_drafter_and_prints_one_screen(tmp_path):
    tiny_config().save_pretrained(tmp_path / "target")
    drafter = save_drafter(tiny_config(), tmp_path / "drafter", target_layer_ids=[0, 2])

    result = longspark("info", tmp_path / "target", drafter)

    assert result.exit_code == 0, result.output
    assert "target layer ids" in result.stdout and "0, 2" in result.stdout
    assert len(result.stdout.splitlines()) < 24
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_info_says_why_a_drafter_does_not_fit_and_exits_with_1(tmp_path):
    tiny_config(hidden_size=64).save_pretrained(tmp_path / "target")
    drafter = save_drafter(tiny_config(), tmp_path / "drafter")

    result = longspark("info", tmp_path / "target", drafter, "--json")

    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["fits"] is False
    assert "32" in found["misfit"] and "64" in found["misfit"]


def test_info_names_the_fix_when_there_is_no_such_target(tmp_path):
    assert_bad_input(longspark("info", tmp_path / "missing"), "missing", "smollm2", "config.json")
    assert_bad_input(longspark("info", tmp_path), str(tmp_path), "config.json")


def test_info_refuses_a_drafter_that_is_none(tmp_path):
    tiny_config().save_pretrained(tmp_path / "target")

    assert_bad_input(longspark("info", tmp_path / "target", tmp_path / "missing"), "drafter", "missing")
    assert_bad_input(longspark("info", tmp_path / "target", tmp_path / "target"), "`llama`", "not a LongSpark drafter")


def test_info_refuses_an_encoder_decoder_target(tmp_path):
    T5Config().save_pretrained(tmp_path)
    assert_bad_input(longspark("info", tmp_path), "encoder-decoder")


def test_bad_arguments_exit_with_2():
    assert longspark("info").exit_code == 2
    assert longspark("demo", "--max-new-tokens", "0").exit_code == 2
    assert longspark("nonsense").exit_code == 2


def test_demo_compares_plain_and_drafted_answers(target_folder):
    arguments = ("demo", "--target", target_folder, "--max-new-tokens", 12, "--long-tokens", 300)

    result = longspark(*arguments, "--json")

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["trained"] is False
    short, long = report["rows"]
    assert 290 <= long["prompt_tokens"] <= 310 and short["prompt_tokens"] < 120
    for row in (short, long):
        assert row["identical"] is True
        assert row["new_tokens"] == 12
        assert row["mean_acceptance_length"] >= 1
        assert row["speedup"] > 0 and row["draft_ms_per_round"] > 0
    assert short["state_bytes"] == long["state_bytes"]
    assert "with the drafter" in result.stderr


def test_demo_prints_one_table_of_at_most_100_columns(target_folder, tmp_path):
    drafter = save_drafter(load_target_config(str(target_folder)), tmp_path / "drafter")

    result = longspark(
        "demo", "--target", target_folder, "--drafter", drafter, "--max-new-tokens", 4, "--long-tokens", 300
    )

    assert result.exit_code == 0, result.output
    assert "identical" in result.stdout and "yes" in result.stdout and "NO" not in result.stdout
    # The title holds a path, which wraps; the table itself is what has to fit.
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_demo_refuses_prompts_beyond_the_targets_positions(target_folder):
    result = longspark("demo", "--target", target_folder, "--long-tokens", 1020, "--max-new-tokens", 12)
    assert_bad_input(result, "1024 positions", "--long-tokens 1012")


def test_demo_refuses_a_drafter_of_another_target(target_folder, tmp_path):
    drafter = save_drafter(tiny_config(num_hidden_layers=4), tmp_path / "drafter")
    assert_bad_input(longspark("demo", "--target", target_folder, "--drafter", drafter), "target layers 4 (target: 3)")


def test_loaded_targets_are_named_as_asked_for(target_folder):
    model, tokenizer = load_target(str(target_folder))

    assert model.config._name_or_path == str(target_folder)
    assert not model.training and model.dtype == torch.float32
    assert tokenizer.decode(tokenizer("def f(x):").input_ids) == "def f(x):"


def test_mask_token_is_one_that_stands_for_no_text():
    tokenizer = byte_tokenizer()
    assert mask_token_id(tokenizer, 272) == 271
    with pytest.raises(ValueError, match="mask_token_id="):
        mask_token_id(tokenizer, len(tokenizer))


def test_drafter_config_survives_its_folder(tmp_path):
    folder = save_drafter(tiny_config(), tmp_path / "drafter")
    config = load_drafter_config(str(folder))
    assert (config.window_size, config.markov_rank, config.mask_token_id) == (16, 8, 271)


def run_without(*packages, code):
    """Run Python code in a fresh interpreter where importing these packages fails."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({packages!r})); "
    return subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True)


def test_package_imports_with_torch_and_transformers_only():
    extras = ("typer", "rich", "gguf", "accelerate", "peft", "scipy", "matplotlib", "gradio")
    code = "import longspark_hf; print([m for m in sys.modules if m.startswith('longspark_hf.')])"

    result = run_without(*extras, code=code)

    assert result.returncode == 0, result.stderr
    for part in ("cli", "evaluation", "training"):
        assert f"longspark_hf.{part}" not in result.stdout


def test_command_without_typer_says_what_to_install():
    result = run_without("typer", code="from longspark_hf.cli import main; main()")

    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith('Run: pip install "longspark-hf[demo]"')
    assert "Traceback" not in result.stderr
