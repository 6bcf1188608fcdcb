"""The context sweep: what is measured, that it is counted right, and that a stop loses nothing."""

import json

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig
from typer.testing import CliRunner

from longspark_hf import LongSparkConfig
from longspark_hf.cli import app
from longspark_hf.compat import cache_argument
from longspark_hf.evaluation import gpu, sweep
from longspark_hf.evaluation.findings import PAPER, break_even, finding_lines, findings
from longspark_hf.evaluation.methods import (
    COMMITTED_ROWS,
    DFLASH_BLOCK_SIZE,
    METHODS,
    HeldInPlaceLayer,
    dflash_drafter,
    held_caches,
    make_drafters,
    make_method,
)
from longspark_hf.evaluation.shapes import SHAPES, parameter_bytes, random_target, row_bytes, shape_config


CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
DRAFTER = {"mask_token_id": 299, "window_size": 16, "num_summary_queries": 4, "markov_rank": 8}


@pytest.fixture(scope="module")
def target():
    return random_target(LlamaConfig(**SIZES), CPU, torch.float32)


@pytest.fixture
def shape(tmp_path):
    folder = tmp_path / "tiny-llama"
    LlamaConfig(**SIZES).save_pretrained(folder)
    return folder


def method(name, target, contexts):
    config = LongSparkConfig.from_target(target.config, **DRAFTER)
    return make_method(make_drafters(target, config, [name])[name], target, contexts)


def longspark(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_bad_input(result, *hints):
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    for hint in hints:
        assert hint in line


def run_sweep(shape, output, **fields):
    fields = {"contexts": [40, 120], "repeats": 2, "device": "cpu"} | fields
    return sweep.run(sweep.Sweep(shape=str(shape), **fields), output)


@pytest.mark.parametrize("name", METHODS)
def test_every_repeat_of_a_draft_sees_the_same_context(name, target):
    drafting = method(name, target, [40, 3000])
    sizes = []
    for _ in range(3):
        drafting.draft(40)
        drafting.restore(40)
        drafting.draft(3000)
        drafting.restore(3000)
        sizes.append([drafting.state_bytes(40), drafting.state_bytes(3000)])
    assert sizes[0] == sizes[1] == sizes[2]


def test_only_the_growing_peer_grows(target):
    state = {}
    for name in METHODS:
        drafting = method(name, target, [3000, 6000])
        for context in (3000, 6000):
            drafting.draft(context)
            drafting.restore(context)
        state[name] = [drafting.state_bytes(3000), drafting.state_bytes(6000)]
    for name in ("longspark", "window", "dflash_sliding"):
        assert state[name][0] == state[name][1], name
    row = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, fp32
    rows = COMMITTED_ROWS + DFLASH_BLOCK_SIZE
    assert state["dflash"] == [row * (3000 + rows), row * (6000 + rows)]
    assert state["window"][0] < state["longspark"][0] < state["dflash_sliding"][0] < state["dflash"][0]


@pytest.mark.parametrize("sliding", [False, True], ids=["growing", "sliding"])
def test_synthetic_dflash_caches_stand_as_after_real_rounds(sliding, target):
    """The cache that `generate` leaves after some rounds has the shape of ours at that length."""
    config = LongSparkConfig.from_target(target.config, **DRAFTER)
    drafter = dflash_drafter(target, config, sliding)
    kept = []
    original, name = type(drafter).forward, cache_argument(drafter)

    def forward(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        layer = kwargs[name].layers[0]
        kept.append((layer.keys.shape[2], layer.get_seq_length(), kwargs["context_hidden_states"].shape[1]))
        return output

    drafter.forward = forward.__get__(drafter)
    length = 2100
    ids = torch.randint(1, 290, (1, length))
    mask = torch.ones_like(ids)
    arguments = {"speculation_type": "dflash", "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    target.generate(ids, attention_mask=mask, assistant_model=drafter, **arguments)
    real, seen, committed = kept[-1]

    drafting = make_method(drafter, target, [seen - DFLASH_BLOCK_SIZE - committed])
    (context,) = drafting.generators
    drafting.draft(context)
    held, now, new = kept[-1]
    assert (held - new, now - new) == (real - committed, seen - committed)


@pytest.mark.parametrize("kind", ["stock", "in_place"])
def test_verification_leaves_the_synthetic_rows_alone(target, kind):
    caches = {context: held_caches(target, [16, 64])[kind, context] for context in (16, 64)}
    ids = torch.tensor([[5, 6, 7]])
    before = caches[64].layers[0].keys.clone()
    name = cache_argument(target)
    with torch.no_grad():
        first, second = (target(ids, **{name: caches[64]}).logits for _ in range(2))
        shorter = target(ids, **{name: caches[16]}).logits
    assert caches[64].get_seq_length() == 64 and caches[16].get_seq_length() == 16
    assert torch.equal(first, second) and not torch.allclose(first, shorter)
    assert torch.equal(caches[64].layers[0].keys, before)


def test_a_timed_verification_attends_over_the_rows_of_its_context(shape, monkeypatch):
    contexts, seen, update = [40, 120], [], HeldInPlaceLayer.update
    settings = sweep.Sweep(contexts, str(shape), methods=["longspark"], device="cpu")
    measurement = sweep.Measurement(settings)
    monkeypatch.setattr(
        HeldInPlaceLayer, "update", lambda self, *a, **k: seen.append(len(self.keys[0, 0])) or update(self, *a, **k)
    )
    for context in contexts:
        measurement._verify("in_place", context, 5)
    assert seen == [40] * 3 + [120] * 3


def test_stock_and_in_place_verification_compute_the_same(target):
    caches = held_caches(target, [40])
    name, ids = cache_argument(target), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        stock, ours = (target(ids, **{name: caches[kind, 40]}).logits for kind in ("stock", "in_place"))
    assert torch.equal(stock, ours)


def test_result_has_a_row_for_each_method_and_context(shape, tmp_path):
    result = run_sweep(shape, tmp_path / "sweep.json")

    assert json.loads((tmp_path / "sweep.json").read_text()) == json.loads(json.dumps(result))
    assert result["kind"] == "sweep" and result["passes"] == 2
    assert [(row["method"], row["context"]) for row in result["rows"]] == [(m, c) for m in METHODS for c in (40, 120)]
    assert {"command", "date", "torch", "transformers", "dtype", "device"} <= set(result["provenance"])
    config = shape_config(str(shape))
    target_bytes, per_row = parameter_bytes(config, torch.float32), row_bytes(config, torch.float32)
    for row in result["rows"]:
        assert row["draft_ms_low"] <= row["draft_ms"] <= row["draft_ms_high"]
        assert row["verify_ms"] > 0 and row["plain_ms"] > 0 and row["plain_in_place_ms"] > 0
        rest = row["total_bytes"] - target_bytes - per_row * row["context"] - row["state_bytes"]
        assert rest > 0  # the drafter's weights
    assert not list(tmp_path.glob("*.passes*"))


def test_stopped_sweep_keeps_its_passes_and_goes_on(shape, tmp_path, monkeypatch):
    output, one_pass, calls = tmp_path / "sweep.json", sweep.Measurement.one_pass, []

    def stopped(self):
        calls.append(1)
        if len(calls) == 4:  # warm-up and two passes are done
            raise KeyboardInterrupt
        return one_pass(self)

    monkeypatch.setattr(sweep.Measurement, "one_pass", stopped)
    arguments = ["sweep", "--shape", shape, "--repeats", 4, "--device", "cpu", "--output", output, "--contexts"]
    result = longspark(*arguments, "40,120")

    assert result.exit_code == 130, result.output
    assert "same command goes on" in result.stderr
    assert json.loads(output.read_text())["passes"] == 2
    assert_bad_input(longspark(*arguments, "40"), "contexts", "other settings")

    calls.clear()
    result = longspark(*arguments, "40,120", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["passes"] == 4
    assert len(calls) == 3  # warm-up and the two that were missing

    calls.clear()
    again = longspark(*arguments, "40,120", "--json")
    assert again.exit_code == 0 and again.stdout == result.stdout and not calls  # it is done already


def test_prefill_of_every_method_is_measured_where_asked_for(shape, tmp_path):
    result = run_sweep(shape, tmp_path / "sweep.json", prefill_to=40, repeats=1)
    assert [row["method"] for row in result["prefill"]] == ["plain", *METHODS]
    assert all(row["context"] == 40 and row["second_token_ms"] > 0 for row in result["prefill"])


def test_command_prints_rows_beside_the_papers_figure(shape, tmp_path):
    arguments = ("--shape", shape, "--layers", 2, "--contexts", "40,80", "--repeats", 1, "--device", "cpu")
    result = longspark("sweep", *arguments, "--output", tmp_path / "sweep.json")

    assert result.exit_code == 0, result.output
    for text in (*METHODS.values(), "Figure 1", "13.8", "406", "ONLY 2 of its 3 layers", "random weights"):
        assert text in " ".join(result.stdout.split()), text


def test_findings_are_ratios_to_the_growing_peer():
    def row(method, context, draft_ms, state_bytes):
        return {"method": method, "context": context, "draft_ms": draft_ms, "state_bytes": state_bytes}

    rows = [row("longspark", 100, 2.0, 10), row("longspark", 200, 2.1, 10)]
    rows += [row("dflash", 100, 4.0, 100), row("dflash", 200, 8.4, 200), row("dflash_sliding", 100, 3.0, 50)]
    rows += [row("dflash_sliding", 200, 3.0, 50)]
    found = findings(rows)
    assert found["draft_faster"] == {"100": 2.0, "200": 4.0}
    assert found["state_smaller"] == {"100": 10.0, "200": 20.0}
    assert found["flat"] == {"longspark": 1.05, "dflash": 2.1, "dflash_sliding": 1.0}
    assert len(finding_lines({"findings": found, "rows": rows})) == 4
    row = {"draft_ms": 10, "verify_ms": 20, "plain_ms": 15, "plain_in_place_ms": 12}
    assert (break_even(row), break_even(row, "plain_in_place_ms")) == (2.0, 2.5)


def test_papers_state_is_what_the_qwen3_8b_shape_implies():
    config = LongSparkConfig.from_target(SHAPES["qwen3-8b"], mask_token_id=0)
    assert round(config.state_bytes() / 2**20, 1) == PAPER["longspark"]["state_mib"][131072]


def test_bad_input_is_one_line(shape, tmp_path):
    out = ("--output", tmp_path / "x.json", "--device", "cpu")
    assert_bad_input(longspark("sweep", "--contexts", "1k", *out), "--contexts", "1k")
    assert_bad_input(longspark("sweep", "--contexts", "0,8", *out), "--contexts")
    assert_bad_input(longspark("sweep", "--methods", "dspark", *out), "dspark", "dflash_sliding")
    assert_bad_input(longspark("sweep", "--shape", tmp_path / "missing", *out), "missing", "qwen3-8b")
    assert_bad_input(longspark("sweep", "--shape", shape, "--layers", 9, *out), "--layers", "1 to 3")
    assert_bad_input(longspark("sweep", "--shape", shape, "--contexts", 10**11, *out), "GiB", "--contexts")
    assert_bad_input(longspark("sweep", "--shape", shape, "--output", tmp_path, "--device", "cpu"), "folder")
    assert_bad_input(longspark("sweep", "--shape", shape, "--drafter", shape, *out), "not a LongSpark drafter")
    Gemma2Config(**SIZES, head_dim=8).save_pretrained(tmp_path / "gemma2")
    assert_bad_input(longspark("sweep", "--shape", tmp_path / "gemma2", *out), "full attention", "sliding_attention")
    assert longspark("sweep").exit_code == 2


def test_gpu_script_writes_sweep_bench_and_page(shape, tmp_path, capsys):
    """On a CPU here; on a GPU the same calls run with a larger shape."""
    arguments = [
        "--shape",
        shape,
        "--device",
        "cpu",
        "--output-dir",
        tmp_path / "out",
        "--contexts",
        40,
        "--repeats",
        1,
    ]
    gpu.main([str(a) for a in [*arguments, "--tasks", "stdlib-1k", "--max-new-tokens", 4, "--minutes", 5]])

    written = capsys.readouterr().out.split()
    for name in ("sweep.json", "bench.json"):
        assert str(tmp_path / "out" / name) in written
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["kind"] == "sweep"
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["kind"] == "bench"


def test_gpu_script_ends_when_its_time_is_up(shape, tmp_path, capsys):
    gpu.main([str(a) for a in ["--shape", shape, "--device", "cpu", "--output-dir", tmp_path, "--minutes", 0]])

    assert "out of time" in capsys.readouterr().err
    with pytest.raises(gpu.OutOfTime):
        gpu.until(0.0)("too late")


def test_gpu_script_tells_bad_input_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--device", "cpu", "--target", str(tmp_path / "missing")])
    assert "missing" in capsys.readouterr().err.splitlines()[-1]


def test_sweep_leaves_out_what_does_not_fit():
    fitting = gpu.fitting_sweep(contexts=[64, 10**11], device="cpu", layers=2, drafter=None)
    assert fitting.contexts == [64]


def test_a_finished_result_is_never_overwritten(tmp_path):
    output = tmp_path / "sweep.json"
    output.write_text('{"rows": []}')
    result = longspark("sweep", "--output", output, "--contexts", "64", "--repeats", "1", "--layers", "1")
    assert_bad_input(result, "holds no unfinished sweep")
    assert output.read_text() == '{"rows": []}'
