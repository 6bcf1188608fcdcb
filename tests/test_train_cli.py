"""`longspark train`: one command from a target and a data file to a drafter, and every way it may be refused before."""

import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, TrainerCallback
from typer.testing import CliRunner

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.cli import app
from longspark_hf.evaluation.targets import load_target, meta_target
from longspark_hf.training import checks
from longspark_hf.training.checks import run_bytes
from longspark_hf.training.estimates import training_memory
from longspark_hf.training.plan import Speed, make_plan
from longspark_hf.training.recipe import batch_size, late_layer_ids, recipe
from longspark_hf.training.run import KeepBest, prepare, train

from . import targets


VOCAB_SIZE, EOS = 272, 2
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
)
# Small enough for seconds; two prompts come again and again, so that a few steps teach something.
SMALL = ("--eval-prompts", 1, "--learning-rate", "0.002")


def byte_tokenizer(**special):
    vocab = {t: i for i, t in enumerate(["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def save_target(folder, tokenizer, vocab_size=VOCAB_SIZE, eos_token_id=EOS):
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    target = LlamaForCausalLM(config)
    # Only bytes that are characters on their own, so that text and tokens of a response are the same thing.
    written = {id for token, id in tokenizer.get_vocab().items() if len(token) == 1 and "!" <= token <= "~"}
    target.generation_config.suppress_tokens = sorted(set(range(vocab_size)) - written)
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answers(folder, prompts, length=64):
    """What the target answers greedily, as lines of a data file."""
    target, tokenizer = load_target(str(folder))
    lines = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        new = target.generate(ids, attention_mask=mask, max_new_tokens=length, do_sample=False)[0, ids.shape[1] :]
        response = tokenizer.decode(new, skip_special_tokens=True)
        lines.append(json.dumps({"prompt": prompt, "response": response, "temperature": 0, "complete": False}))
    return lines


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target") / "tiny-llama", byte_tokenizer())


@pytest.fixture(scope="module")
def data_file(target_folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    file.write_text("\n".join(answers(target_folder, ["one", "two two"]) * 24) + "\n")
    return file


def longspark(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def train_command(target_folder, data_file, tmp_path):
    """Runs `longspark train` on the tiny target; arguments given later win."""

    def command(*arguments, output=tmp_path / "out", target=target_folder, data=data_file):
        return longspark("train", "--target", target, "--data", data, "--output", output, *SMALL, *arguments)

    return command


def assert_refused(result, *hints):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    for hint in hints:
        assert hint in line
    assert "loading" not in result.stderr  # nothing long was begun


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_run_ends_with_a_drafter_that_was_taught_and_loads(train_command, target_folder, tmp_path):
    result = train_command("--steps", 24)

    assert result.exit_code == 0, result.output
    best = tmp_path / "out" / "best"
    assert result.stdout.startswith("24 of 24 steps are done") and "τ on held-out prompts: " in result.stdout
    assert f'LongSparkDrafter.from_pretrained("{best}")' in result.stdout and "{'" not in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "evaluations.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 0 and rows[-1]["step"] == 24
    assert json.loads((best / "metrics.json").read_text())["eval_tau"] > rows[0]["eval_tau"] + 1

    drafter = LongSparkDrafter.from_pretrained(best)
    assert drafter.config.target_layer_ids == [0, 1, 2] and drafter.config.mask_token_id == VOCAB_SIZE - 1
    target, tokenizer = load_target(str(target_folder))
    inputs = tokenizer("one", return_tensors="pt", return_token_type_ids=False)
    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, max_new_tokens=20, do_sample=False), plain)


class InterruptAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_the_same_command_goes_on_after_ctrl_c_as_if_nothing_had_been(
    train_command, target_folder, data_file, tmp_path
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_command("--steps", 12, output=whole).exit_code == 0

    choices = {"steps": 12, "eval_prompts": 1, "learning_rate": 0.002}
    run = make_plan(str(target_folder), str(data_file), str(parts), **choices).get_ready(lambda message: None)
    run.trainer.add_callback(InterruptAt(5))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run()
    # Six steps share a pass of the target: the run stops at the end of them.
    assert (parts / "checkpoint-6" / "complete.json").exists()
    assert signal.getsignal(signal.SIGINT) is before

    result = train_command(output=parts)  # the number of steps is the run's
    assert result.exit_code == 0 and f"going on from {parts / 'checkpoint-6'}" in result.stderr
    for name, tensor in weights(whole / "checkpoint-12").items():
        assert torch.equal(tensor, weights(parts / "checkpoint-12")[name]), name


def test_ctrl_c_in_a_terminal_saves_and_says_how_to_go_on(target_folder, data_file, tmp_path):
    arguments = [
        "--target",
        target_folder,
        "--data",
        data_file,
        "--output",
        tmp_path / "out",
        "--steps",
        100000,
        *SMALL,
    ]
    command = [sys.executable, "-m", "longspark_hf.cli", "train", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not (tmp_path / "out" / "evaluations.jsonl").exists():  # the first evaluation lies behind it
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    assert "with a checkpoint at step " in stderr and "Run the same command again to go on" in stderr
    assert stdout == "" and "Traceback" not in stderr
    assert list((tmp_path / "out").glob("checkpoint-*/complete.json"))


def test_a_finished_run_says_so_and_goes_on_with_more_steps(train_command, tmp_path):
    assert train_command("--steps", 4).exit_code == 0
    again = train_command()
    assert again.exit_code == 0 and "4 of 4 steps are done; --steps with more" in again.stdout
    more = train_command("--steps", 8, "--json")
    assert more.exit_code == 0 and json.loads(more.stdout)["steps"] == 8
    assert (tmp_path / "out" / "checkpoint-8").exists()


def test_no_resume_deletes_the_run_and_only_that(train_command, tmp_path):
    assert train_command("--steps", 8).exit_code == 0
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert train_command("--steps", 4, "--no-resume", "--seed", 1).exit_code == 0
    rows = (tmp_path / "out" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 4]
    assert not (tmp_path / "out" / "checkpoint-8").exists() and (tmp_path / "out" / "notes.txt").exists()


def test_training_can_start_from_a_drafter(train_command, target_folder, tmp_path):
    target, _ = load_target(str(target_folder))
    config = LongSparkConfig.from_target(target.config, mask_token_id=270, window_size=16, markov_rank=8)
    drafter = LongSparkDrafter(config)
    drafter.save_pretrained(tmp_path / "first")

    start = ("--init-from", tmp_path / "first", "--steps", 4)
    result = train_command(*start, "--learning-rate", 1e-30)

    assert result.exit_code == 0, result.output
    for name, tensor in weights(tmp_path / "out" / "best").items():
        assert torch.equal(tensor, drafter.state_dict()[name]), name
    assert_refused(train_command(*start, "--markov-rank", 9, "--no-resume"), "`markov_rank` 8, not 9", "--init-from")
    assert_refused(train_command(*start, "--init-from", tmp_path / "none"), "Cannot read the drafter")


def test_a_time_limit_ends_a_run_with_an_evaluation_and_a_checkpoint(train_command, tmp_path):
    result = train_command("--minutes", 0.03, "--anchors", 8)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "out" / "evaluations.jsonl").read_text().splitlines()]
    assert len(rows) >= 2 and (tmp_path / "out" / f"checkpoint-{rows[-1]['step']}" / "complete.json").exists()


def test_dry_run_tells_the_costs_and_writes_nothing(train_command, tmp_path):
    result = train_command("--dry-run", "--json", "--draft-vocab", 30, "--batch-size", 2, "--epochs", 3)

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert not (tmp_path / "out").exists()
    drafter = report["drafter"]
    assert sum(drafter["split"].values()) == drafter["parameters"]
    assert report["data"]["conversations"] == 46 and report["data"]["held_out"] == 2
    assert report["data"]["response_tokens"] == 46 * 64 and 0.3 < report["data"]["draft_vocab_coverage"] <= 1
    assert report["steps"] == 3 * 46 // 2 * report["settings"]["steps_per_batch"]
    assert report["disk"]["checkpoint"] == 12 * drafter["parameters"]
    memory = report["memory"]
    assert memory["optimizer"] == 2 * memory["gradients"] == 8 * drafter["parameters"]
    assert memory["target"] == 4 * report["target_parameters"]
    seconds = report["time"]
    assert seconds["total_seconds"] > report["steps"] * seconds["step_seconds"] > 0


def test_dry_run_prints_one_screen(train_command):
    result = train_command("--dry-run")
    assert result.exit_code == 0, result.output
    assert "time (measured)" in result.stdout and "memory (estimated)" in result.stdout
    assert len(result.stdout.splitlines()) <= 24 and max(map(len, result.stdout.splitlines())) <= 100


def test_dry_run_says_what_was_dropped_and_why(train_command, data_file, tmp_path):
    lines = data_file.read_text().splitlines()
    lines[0] = json.dumps({"prompt": "p" * 90, "response": "no room"})
    lines[1] = json.dumps({"prompt": "p", "response": "x", "complete": False})
    (tmp_path / "data.jsonl").write_text("\n".join(lines))

    result = train_command("--dry-run", "--json", "--max-length", 64, data=tmp_path / "data.jsonl")

    dropped = json.loads(result.stdout)["data"]["dropped"]
    assert dropped == {"no room for a response within max_length": 1, "response of fewer than two tokens": 1}


def test_training_without_its_extra_says_what_to_install(train_command, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert_refused(train_command(), "accelerate", 'pip install "longspark-hf[train]"')


def test_help_fits_on_one_screen():
    lines = longspark("train", "--help").stdout.splitlines()
    assert len(lines) <= 46 and max(map(len, lines)) <= 80


def drop_a_field(lines):
    return [*lines[:4], json.dumps({"prompt": "p"}), *lines[5:]]


def unknown_role(lines):
    return [lines[0], "", json.dumps({"messages": [{"role": "tool", "content": "c"}], "response": "rr"}), *lines[1:]]


def with_messages(lines):
    return [*lines, json.dumps({"messages": [{"role": "user", "content": "c"}], "response": "rr"})]


def with_an_empty_prompt(lines):
    return [*lines[:2], json.dumps({"prompt": "", "response": "rr"}), *lines[2:]]


def with_fields_that_a_template_cannot_render(lines):
    message = {"role": "user", "content": "c", "name": 5}
    return [*lines[:2], json.dumps({"messages": [message], "response": "rr"}), *lines[2:]]


DATA = [
    pytest.param(drop_a_field, {}, ["data.jsonl, line 5", '"response" must be a text'], id="field"),
    pytest.param(unknown_role, {"chat_template": CHAT_TEMPLATE}, ["line 3", "refuses", "no role tool"], id="template"),
    pytest.param(with_messages, {}, ['no chat template, so samples with "messages"', "data.jsonl"], id="no-template"),
    pytest.param(with_an_empty_prompt, {}, ["data.jsonl, line 3", "the prompt is empty"], id="empty-prompt"),
    pytest.param(
        with_fields_that_a_template_cannot_render,
        {"chat_template": "{% for m in messages %}{{ m.content + (m.name or '') }}{% endfor %}:"},
        ["line 3", "refuses"],
        id="field-of-a-message",
    ),
    pytest.param(lambda lines: lines[:1], {}, ["holds 1 sample", "one is held out"], id="one-line"),
    pytest.param(lambda lines: [], {}, ["holds no samples"], id="empty"),
]


@pytest.mark.parametrize("change, special, hints", DATA)
def test_bad_data_is_refused_with_its_place_and_reason(train_command, data_file, tmp_path, change, special, hints):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(change(data_file.read_text().splitlines())))
    target = save_target(tmp_path / "target", byte_tokenizer(**special))
    assert_refused(train_command(target=target, data=file), *hints)


def test_a_tokenizer_of_another_model_is_refused(train_command, tmp_path):
    without_end = save_target(tmp_path / "no-end", byte_tokenizer(eos_token=None))
    assert_refused(train_command(target=without_end), "no end-of-sequence token", "tokenizer_config.json")
    smaller = save_target(tmp_path / "smaller", byte_tokenizer(), vocab_size=200)
    assert_refused(train_command("--mask-token", 3, target=smaller), "259", "200", "another model")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(20)])
    assert len(tokenizer) > VOCAB_SIZE
    added = save_target(tmp_path / "added", tokenizer)
    line = json.dumps({"prompt": "p", "response": "<19><19>"})
    (tmp_path / "data.jsonl").write_text(f"{line}\n{line}\n")
    result = train_command("--mask-token", 3, target=added, data=tmp_path / "data.jsonl")
    assert_refused(result, "token id 278", "ends at 271")


def test_a_tokenizer_that_ends_where_the_target_does_not_is_refused(train_command, tmp_path):
    result = train_command(target=save_target(tmp_path / "target", byte_tokenizer(), eos_token_id=[5, 7]))
    assert result.exit_code == 2
    assert "'<eos>' (id 2)" in result.stderr and "[5, 7]" in result.stderr


SETTINGS = [
    pytest.param(["--layers", "0,9"], ["`target_layer_ids`", "3 layers", "[0, 9]"], id="layer"),
    pytest.param(["--layers", "late"], ["--layers", "'late'"], id="no-layers"),
    pytest.param(["--layers", "2,2"], ["`target_layer_ids` must be distinct"], id="layer-twice"),
    pytest.param(["--block-size", "0"], ["`block_size` must be at least 1, got 0"], id="block"),
    pytest.param(["--markov-rank", "0"], ["`markov_rank` must be at least 1"], id="rank"),
    pytest.param(["--draft-vocab", "500"], ["`draft_vocab_size`", "272", "500"], id="draft-vocabulary"),
    pytest.param(["--mask-token", "<none>"], ["--mask-token '<none>'"], id="mask"),
    pytest.param(["--mask-token", "272"], ["`mask_token_id`", "0 to 271", "272"], id="mask-id"),
    pytest.param(["--max-length", "513"], ["--max-length 513", "512 positions"], id="length"),
    pytest.param(["--learning-rate", "-1"], ["--learning-rate", "-1"], id="learning-rate"),
    pytest.param(["--minutes", "0"], ["--minutes", "0"], id="minutes"),
    pytest.param(["--epochs", "0"], ["--epochs", "0"], id="epochs"),
]


@pytest.mark.parametrize("arguments, hints", SETTINGS)
def test_bad_settings_are_refused_by_name_and_value(train_command, tmp_path, arguments, hints):
    assert_refused(train_command(*arguments), *hints)
    assert not (tmp_path / "out").exists()


def test_without_an_unused_token_one_is_asked_for(train_command, tmp_path):
    target = save_target(tmp_path / "full", byte_tokenizer(), vocab_size=len(byte_tokenizer()))
    assert_refused(train_command(target=target), "No unused token is known among the 259", "--mask-token")


def test_a_batch_that_processes_cannot_share_is_refused(train_command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused(train_command("--batch-size", 3), "--batch-size 3", "2 processes", "Use 4")


def test_a_missing_target_is_refused(train_command, tmp_path):
    assert_refused(train_command(target=tmp_path / "none"), "Cannot load the target", "none")
    assert_refused(train_command(data=tmp_path / "none.jsonl"), "Cannot read the data file", "none.jsonl")


def test_an_output_that_is_a_file_is_refused(train_command, tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(train_command(output=tmp_path / "file"), "is not a folder", "--output")


def test_a_full_disk_is_noticed_before_it_is_full(train_command, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage)
    assert_refused(train_command(), "GiB are free", "--output on another disk")


def test_a_folder_with_another_run_is_refused_with_what_differs(train_command, data_file, tmp_path):
    assert train_command("--steps", 4).exit_code == 0
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(data_file.read_text().splitlines()[1:]))

    result = train_command("--seed", 7, "--block-size", 5, data=other)

    assert_refused(result, "seed 42 there, 7 now", "block_size 4 there, 5 now", "data_sha256", "--no-resume")
    assert "learning_rate" not in result.stderr
    assert train_command("--steps", 8).exit_code == 0  # as long as nothing differs, a run may be made longer


@pytest.mark.parametrize("arguments", [(), ("--no-resume",), ("--dry-run",)])
@pytest.mark.parametrize("name", ["checkpoint-500", "best"])
def test_a_folder_with_something_elses_checkpoints_is_refused_untouched(train_command, tmp_path, name, arguments):
    (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / name / "weights").write_text("dear")
    assert_refused(train_command("--steps", 4, *arguments), f"holds {name}", "no provenance.json", "--output")
    assert [file.name for file in (tmp_path / "out").rglob("*")] == [name, "weights"]


def test_a_folder_that_is_only_called_like_a_checkpoint_is_none(train_command, tmp_path):
    (tmp_path / "out" / "checkpoint-notes").mkdir(parents=True)
    for arguments in ((), ("--no-resume",)):
        assert train_command("--steps", 2, *arguments).exit_code == 0
    assert (tmp_path / "out" / "checkpoint-notes").exists()


def test_a_damaged_provenance_file_is_named_and_can_be_done_without(train_command, tmp_path):
    assert train_command("--steps", 2).exit_code == 0
    (tmp_path / "out" / "provenance.json").write_text('{"settings": ')
    assert_refused(train_command("--steps", 2), "out/provenance.json is damaged", "--no-resume")
    assert train_command("--steps", 2, "--no-resume").exit_code == 0


@pytest.mark.parametrize("kilobytes", [20, 100, 300])
def test_a_disk_that_gets_full_ends_a_run_with_one_line(target_folder, data_file, tmp_path, kilobytes):
    arguments = ["--target", target_folder, "--data", data_file, "--output", tmp_path / "out", "--steps", 6, *SMALL]
    command = [sys.executable, "-m", "longspark_hf.cli", "train", *map(str, arguments)]
    size = kilobytes << 10
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))  # written past, `EFBIG`
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert "Error: The disk or its quota is full (" in result.stderr


def test_publishing_without_access_is_refused_before_training(train_command, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = train_command("--steps", 4, "--push-to-hub", "someone/drafter")
    assert result.exit_code == 2
    assert "Cannot create the repository someone/drafter" in result.stderr and "hf auth login" in result.stderr
    assert not (tmp_path / "out" / "evaluations.jsonl").exists()


def test_defaults_follow_the_size_of_the_target():
    small = recipe(meta_target(Qwen3Config(num_hidden_layers=28, hidden_size=256, head_dim=32, intermediate_size=512)))
    assert small["config"] == {
        "target_layer_ids": [24, 25, 26, 27],
        "block_size": 4,
        "qk_norm": True,
        "boundary_residual": -1,
        "markov_rank": 64,
    }
    assert small["draft_vocab_size"] == 8192 and small["from_target"] and small["steps_per_batch"] > 1

    large = recipe(meta_target(Qwen3Config(num_hidden_layers=36)))
    assert large["config"] == {} and large["draft_vocab_size"] is None and not large["from_target"]
    assert (large["learning_rate"], large["num_anchors"], large["epochs"]) == (6e-4, 512, 10)
    assert batch_size(1_420_000, 10) == 512 and batch_size(3000, 10) == 16 and batch_size(10, 1) == 1
    assert late_layer_ids(30) == [26, 27, 28, 29] and late_layer_ids(2) == [0, 1]


def test_a_time_limit_shortens_the_run_and_its_evaluations(target_folder, data_file, tmp_path):
    plan = make_plan(str(target_folder), str(data_file), str(tmp_path / "out"), steps=100000)
    plan.options |= {"num_eval_prompts": 8, "num_simulated": 8}
    speed = Speed(step=0.5, simulation=1.0, token=0.5)
    assert speed.evaluation(plan.options) == 8 + 8 * 64 * 0.5

    plan.fit_into(10, speed)

    assert plan.seconds(speed) <= 600 and plan.options["max_steps"] > 700
    assert plan.options["num_eval_prompts"] == 2 and plan.options["max_steps"] % 6 == 0
    decay = plan.options["lr_scheduler_kwargs"]["num_decay_steps"]
    assert 0 < plan.options["warmup_steps"] + decay < plan.options["max_steps"]

    before = dict(plan.options)
    plan.fit_into(10**6, speed)  # more time than the run needs
    assert plan.options["max_steps"] == before["max_steps"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_estimated_activations_bound_what_a_step_keeps(target_folder, data_file, tmp_path, checkpointing):
    plan = make_plan(str(target_folder), str(data_file), str(tmp_path), gradient_checkpointing=checkpointing)
    trainer = plan.get_ready(lambda message: None).trainer
    trainer.model.train()
    if checkpointing:
        enable = getattr(trainer.model, "activation_checkpointing_enable", None)  # its name from transformers 5.24 on
        (enable or trainer.model.gradient_checkpointing_enable)()
    batches, total = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    batches[0]["rows"].rows = trainer.run_target(batches[0])
    for rows in batches[0]["rows"].rows:
        rows.probabilities = trainer._probabilities(rows, trainer.model)
    known = [*trainer.model.parameters(), *trainer.target.parameters()]
    known += [t for rows in batches[0]["rows"].rows for t in (*rows.keys, *rows.values, rows.boundaries)]
    known = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.compute_loss(trainer.model, batches[0], num_items_in_batch=total)
    held = sum(storage.nbytes() for storage in kept.values())

    length, config = batches[0]["input_ids"].shape[1], plan.drafter_config
    shape = {"length": length, "num_anchors": 512, "steps_per_batch": 4, "target_dtype": torch.float32}
    estimate = training_memory(config, plan.target_config, 0, **shape, checkpointing=checkpointing)
    assert held <= estimate["activations"] <= 6 * held


BRIEF = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "num_eval_prompts": 1, "eval_new_tokens": 8}
BRIEF |= {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "num_anchors": 8}


class Killed(BaseException):
    pass


def kill_before(monkeypatch, owner, name, condition):
    """Lets the first call of a function that meets a condition end everything."""
    call = getattr(owner, name)

    def killing(*args, **kwargs):
        if condition(*map(str, args)):
            raise Killed
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, killing)


def test_a_kill_before_a_checkpoint_is_complete_leaves_the_one_before(target_folder, data_file, tmp_path, monkeypatch):
    target, tokenizer = load_target(str(target_folder))
    options = BRIEF | {"save_total_limit": 1}
    train(target, tokenizer, data_file, tmp_path, max_steps=2, **options)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_before(patch, os, "replace", lambda _, name: name.endswith("checkpoint-4/complete.json"))
        train(target, tokenizer, data_file, tmp_path, max_steps=4, **options)
    run = prepare(target, tokenizer, data_file, tmp_path, max_steps=4, **options)
    assert run.checkpoint.endswith("checkpoint-2") and not (tmp_path / "checkpoint-4").exists()
    run()
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.parametrize("moment", ["before-writing", "before-deleting", "before-moving"])
def test_a_kill_while_a_better_drafter_is_kept_loses_no_drafter(
    target_folder, data_file, tmp_path, monkeypatch, moment
):
    target, tokenizer = load_target(str(target_folder))
    train(target, tokenizer, data_file, tmp_path, max_steps=2, **BRIEF)
    best = json.loads((tmp_path / "best" / "metrics.json").read_text())
    (tmp_path / "best" / "metrics.json").write_text(json.dumps(best | {"eval_tau": 0.0}))  # any other is better
    owner, name = {
        "before-writing": (os, "replace"), "before-deleting": (shutil, "rmtree"), "before-moving": (Path, "rename")
    }[moment]  # fmt: skip
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_before(patch, owner, name, lambda *names: names[-1].endswith(("best", "best.new/metrics.json")))
        train(target, tokenizer, data_file, tmp_path, max_steps=4, **BRIEF)

    assert (tmp_path / "best.new").exists()
    prepare(target, tokenizer, data_file, tmp_path, max_steps=4, **BRIEF)

    assert not (tmp_path / "best.new").exists()
    LongSparkDrafter.from_pretrained(tmp_path / "best")
    kept = json.loads((tmp_path / "best" / "metrics.json").read_text())
    assert kept["step"] == (2 if moment == "before-writing" else 4)


def test_of_two_drafters_with_the_same_tau_the_better_guesser_is_kept(tmp_path):
    drafter = targets.random_drafter(targets.build("llama"))
    keep = KeepBest(SimpleNamespace(whole_drafter=lambda: drafter))
    kept = []
    for step, (tau, simulated) in enumerate([(1.5, 1.3), (1.5, 1.4), (1.5, 1.35), (1.6, 1.0), (1.5, 1.5)]):
        metrics = {"eval_tau": tau, "eval_simulated_tau_greedy": simulated}
        state = SimpleNamespace(is_world_process_zero=True, global_step=step)
        keep.on_evaluate(SimpleNamespace(output_dir=tmp_path), state, None, metrics)
        kept.append(json.loads((tmp_path / "best" / "metrics.json").read_text())["step"])
    assert kept == [0, 1, 1, 3, 3]


def test_no_resume_deletes_a_half_kept_drafter_too(train_command, tmp_path):
    assert train_command("--steps", 2).exit_code == 0
    (tmp_path / "out" / "best").rename(tmp_path / "out" / "best.new")
    assert train_command("--steps", 2, "--no-resume", "--learning-rate", 1e-30).exit_code == 0
    assert json.loads((tmp_path / "out" / "best" / "metrics.json").read_text())["step"] == 0


@pytest.mark.parametrize("length", [{"max_steps": 4}, {"num_train_epochs": 4, "gradient_accumulation_steps": 46}])
def test_a_finished_run_is_returned_as_it_is(target_folder, data_file, tmp_path, length):
    target, tokenizer = load_target(str(target_folder))
    options = BRIEF | {"per_device_train_batch_size": 1} | length
    first = train(target, tokenizer, data_file, tmp_path, **options)
    lines = (tmp_path / "evaluations.jsonl").read_text()

    again = train(target, tokenizer, data_file, tmp_path, **options)

    assert again.state.global_step == first.state.global_step == 4
    assert (tmp_path / "evaluations.jsonl").read_text() == lines
    assert sorted(folder.name for folder in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name


def test_a_draft_vocabulary_in_the_config_is_that_of_the_argument(target_folder, data_file, tmp_path):
    target, tokenizer = load_target(str(target_folder))
    ids = []
    for number, options in enumerate([{"draft_vocab_size": 30}, {"config": {"draft_vocab_size": 30}}]):
        run = prepare(target, tokenizer, data_file, tmp_path / str(number), **BRIEF, **options)
        ids.append(run.trainer.model.draft_token_ids.tolist())
    assert ids[0] == ids[1] != list(range(30))
    run = prepare(target, tokenizer, data_file, tmp_path / "mask", config={"mask_token_id": 7}, **BRIEF)
    assert run.trainer.model.config.mask_token_id == 7


def test_a_checkpoint_is_as_large_as_was_promised(target_folder, data_file, tmp_path):
    target, tokenizer = load_target(str(target_folder))
    fields = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "report_to": [], "use_cpu": True}
    trainer = train(target, tokenizer, data_file, tmp_path, num_eval_prompts=0, eval_strategy="steps", **fields)
    files = [file for file in (tmp_path / "checkpoint-2").iterdir() if file.suffix != ".py"]  # of any size the same
    size = sum(file.stat().st_size for file in files)
    promised = run_bytes(trainer.model.num_parameters(), 2)
    assert promised["checkpoint"] <= size <= 1.1 * promised["checkpoint"] + 2**16
    assert (tmp_path / "best" / "config.json").exists()  # by the simulated τ, where none is generated
