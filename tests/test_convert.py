"""Released checkpoints become repositories that load anywhere."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.hub import convert, plan_push
from longspark_hf.hub.convert import PUBLISHED, check_published
from longspark_hf.weights_longspark import RELEASED_NAMES, our_name, read_header

from .targets import build, random_drafter
from .test_hub import COMMON, WITHOUT_PACKAGE, released_shapes, run_python, write_sparse
from .test_push import Hub, online


SHAPES = {
    "Hehy/LongSpark-Qwen3-4B": {"hidden": 2560, "heads": 32, "inner": 9728},
    "Hehy/LongSpark-Qwen3-8B": {"hidden": 4096, "heads": 32, "inner": 12288},
    "Hehy/LongSpark-Qwen3-14B": {"hidden": 5120, "heads": 40, "inner": 17408},
}


def released_name(ours: str) -> str:
    """Inverse of `our_name`."""
    for pattern, prefix in RELEASED_NAMES.items():
        if ours.startswith(prefix):
            return pattern.removeprefix("^").removesuffix("$").replace("\\.", ".") + ours.removeprefix(prefix)
    raise KeyError(ours)


def write_released(drafter: LongSparkDrafter, folder: Path, stored: torch.dtype = torch.float32, **more) -> None:
    """A drafter as the authors publish theirs."""
    c = drafter.config
    fields = {
        "model_type": "draftfreekv",
        "architectures": ["DraftFreeKVModel"],
        "dtype": "bfloat16",
        "draft_mode": "parallel_shifted_qwen",
        "hidden_size": c.hidden_size,
        "qwen_intermediate_size": c.intermediate_size,
        "qwen_num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "num_target_layers": c.num_target_layers,
        "target_layer_ids": c.target_layer_ids,
        "parallel_mixer_layers": len(c.target_layer_ids),
        "block_size": c.block_size,
        "raw_target_rows": c.window_size,
        "global_memory_slots": c.num_summary_queries,
        "parallel_markov_rank": c.markov_rank,
        "mask_token_id": c.mask_token_id,
        "qwen_rms_norm_eps": c.rms_norm_eps,
        "qwen_rope_theta": c.rope_parameters["rope_theta"],
        "training_objective": "dspark_l1",
        "target_model_name_or_path": "/mnt/models/Qwen3-Tiny",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields | more))
    weights = {released_name(name): tensor.to(stored).contiguous() for name, tensor in drafter.state_dict().items()}
    assert [our_name(name) for name in weights] == list(drafter.state_dict())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target, a released drafter for it and the converted one."""
    folder = tmp_path_factory.mktemp("made")
    target = build("qwen3")
    target.save_pretrained(folder / "target")
    drafter = random_drafter(target)
    write_released(drafter, folder / "released")
    (folder / "released" / "README.md").write_text("---\nlicense: mit\n---\nTheirs.")
    report = convert(folder / "released", folder / "ours", target="someone/Qwen3-Tiny")
    prompt = torch.randint(2, 90, (1, 20), generator=torch.Generator().manual_seed(7))
    (folder / "prompt.json").write_text(json.dumps(prompt.tolist()))
    return folder, drafter, report, target.generate(prompt, do_sample=False, max_new_tokens=16)[0].tolist()


def test_weights_are_renamed_and_otherwise_unchanged(made):
    folder, drafter, report, _ = made
    weights = load_file(folder / "ours" / "model.safetensors")
    assert set(weights) == set(drafter.state_dict()) and len(weights) == report["tensors"] == 65
    for name, tensor in drafter.state_dict().items():
        # Their config says bfloat16; rounding would be a change.
        assert weights[name].dtype == torch.float32 and torch.equal(weights[name], tensor), name
    assert report["parameters"] == drafter.num_parameters()
    assert report["weight_bytes"] == (folder / "released" / "model.safetensors").stat().st_size
    assert not report["published"]


def test_a_half_precision_checkpoint_stays_one(made, tmp_path):
    write_released(made[1], tmp_path / "released", torch.bfloat16, dtype=None)
    convert(tmp_path / "released", tmp_path / "ours", target="someone/Qwen3-Tiny")
    assert {info.dtype for info in read_header(tmp_path / "ours" / "model.safetensors").values()} == {"BF16"}


def test_the_converted_repository_loads_without_the_package_and_drafts(made):
    folder, drafter, _, plain = made
    found = run_python(
        folder,
        WITHOUT_PACKAGE,
        COMMON,
        """
        drafter = AutoModel.from_pretrained("ours", trust_remote_code=True).eval()
        target = AutoModelForCausalLM.from_pretrained("target").eval()
        print(json.dumps(answer(target, torch.tensor(json.load(open("prompt.json"))), drafter)))
        """,
    )
    assert found["tokens"] == plain and found["rounds"] > 0


def test_config_and_card_name_the_target_and_where_the_weights_come_from(made):
    folder = made[0]
    config = LongSparkConfig.from_pretrained(folder / "ours")
    assert config.target_name_or_path == "someone/Qwen3-Tiny"
    card = ModelCard.load(folder / "ours" / "README.md")
    assert card.data.base_model == "someone/Qwen3-Tiny" and card.data.license == "mit"
    assert "Converted from a released checkpoint, `released` by longspark_hf: 65 tensors" in card.text
    assert "/mnt/models" not in str(card) and "model-index" not in card.data.to_dict()


def test_the_converted_repository_can_be_pushed_and_keeps_its_origin(made):
    planned = plan_push(made[0] / "ours", "me/converted")
    assert "Converted from a released checkpoint" in planned.card and "license: mit" in planned.card
    assert 'from_pretrained("me/converted"' in planned.card


def test_a_path_of_the_authors_machine_is_no_target(made, tmp_path):
    report = convert(made[0] / "released", tmp_path / "ours")
    assert report["target"] is None
    with pytest.raises(ValueError, match="`target_name_or_path` in config.json is None"):
        plan_push(tmp_path / "ours", "me/converted", license="mit")


def test_a_checkpoint_on_the_hub_is_converted_unless_it_is_not_what_was_published(made):
    folder = made[0]
    files = {path.name: path.read_bytes() for path in (folder / "released").iterdir()}
    with Hub() as hub:
        hub.repos = {"someone/released": {"main": files}, "Hehy/LongSpark-Qwen3-4B": {"main": files}}
        found = run_python(
            folder,
            """
            import json
            from longspark_hf.hub import convert
            report = convert("someone/released", "from-hub", target="someone/Qwen3-Tiny", revision="1" * 40)
            messages = []
            for name in ("Hehy/LongSpark-Qwen3-4B", "someone/nothing"):
                try:
                    convert(name, "never")
                except ValueError as error:
                    messages.append(str(error))
            print(json.dumps([report, messages]))
            """,
            **online(hub),
        )
    report, messages = found
    assert report["tensors"] == 65 and not report["published"]
    card = (folder / "from-hub" / "README.md").read_text()
    assert f"[someone/released](https://huggingface.co/someone/released) at revision `{'1' * 40}`" in card
    assert "is not what was published under this name" in messages[0] and "(published: 641,778,432)" in messages[0]
    assert "Cannot read 'someone/nothing'" in messages[1] and not (folder / "never").exists()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_file_of_the_published_shapes_has_the_published_sizes(name, tmp_path):
    write_sparse(tmp_path / "model.safetensors", released_shapes(**SHAPES[name]))
    header = read_header(tmp_path / "model.safetensors")
    sizes = {
        "tensors": len(header),
        "parameters": sum(torch.Size(info.shape).numel() for info in header.values()),
        "weight_bytes": (tmp_path / "model.safetensors").stat().st_size,
    }
    facts = PUBLISHED[name]
    for key in (name, str(tmp_path)):
        assert check_published(key, **sizes, config_bytes=facts.config_bytes) == (facts, False)
        assert check_published(key, **sizes, config_bytes=facts.config_bytes + 1) == (facts, True)
    sizes["weight_bytes"] -= 8
    assert check_published(str(tmp_path), **sizes, config_bytes=facts.config_bytes) == (None, False)
    with pytest.raises(ValueError, match=re.escape(f"(published: {facts.weight_bytes:,})")):
        check_published(name, **sizes, config_bytes=facts.config_bytes)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"model_type": "longspark"}, "in our format already"),
        ({"model_type": "qwen3"}, "`qwen3` model"),
        ({"draft_mode": "markov"}, "draft_mode"),
        ({"gated_mixture": 2}, "gated_mixture"),
        ({"block_size": 5}, "position_embedding.weight"),
    ],
    ids=str,
)
def test_what_is_no_released_checkpoint_is_refused_and_nothing_is_written(more, message, made, tmp_path):
    write_released(made[1], tmp_path / "released", **more)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "released", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_folder_with_something_in_it_is_not_written_to(made, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        convert(made[0] / "released", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def command(*arguments):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from longspark_hf.cli import app

    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_command_convert_says_what_was_written(made, tmp_path):
    result = command("convert", made[0] / "released", tmp_path / "ours", "--target", "someone/Qwen3-Tiny")
    assert result.exit_code == 0, result.output
    assert "65 tensors" in result.stdout and f'from_pretrained("{tmp_path / "ours"}", trust' in result.stdout
    assert LongSparkConfig.from_pretrained(tmp_path / "ours").target_name_or_path == "someone/Qwen3-Tiny"

    result = command("convert", made[0] / "released", tmp_path / "again", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["tensors"] == 65

    result = command("convert", made[0] / "released", tmp_path / "ours")
    assert result.exit_code == 2 and "not empty" in result.stderr and "Traceback" not in result.stderr


def test_command_push_shows_everything_and_uploads_nothing(made):
    folder = made[0] / "ours"
    result = command("push", folder, "me/converted", "--private")
    assert result.exit_code == 0, result.output
    planned = plan_push(folder, "me/converted")
    for name, size in planned.files.items():
        assert re.search(rf"{re.escape(name)} +{size:,}\b", result.stdout), name
    assert planned.card.strip() in result.stdout
    assert "me/converted, branch main, private if new" in result.stdout
    assert "Nothing has been uploaded yet" in result.stdout

    report = json.loads(command("push", folder, "me/converted", "--json").stdout)
    assert report["files"] == planned.files and report["card"] == planned.card and report["commit_url"] is None


def test_command_push_exits_with_2_and_the_reason(made, tmp_path):
    result = command("push", made[0] / "released", "me/converted")
    assert result.exit_code == 2 and "`longspark convert` first" in result.stderr
    result = command("push", tmp_path / "nothing", "me/converted")
    assert result.exit_code == 2 and "is no folder" in result.stderr


def test_command_push_uploads_when_told_to(made):
    with Hub() as hub:
        code = """
        import json, sys
        from longspark_hf.cli import main
        sys.argv = ["longspark", "push", "ours", "me/converted", "--upload", "--message", "Here it is"]
        try:
            main()
        except SystemExit as leave:
            print(json.dumps(leave.code))
        """
        assert run_python(made[0], code, **online(hub), HF_TOKEN="TOKEN") == 0
        assert set(hub.repos["me/converted"]["main"]) == set(plan_push(made[0] / "ours", "me/converted").files)
        assert hub.commits[0]["summary"] == "Here it is" and hub.tokens == {"Bearer TOKEN"}
