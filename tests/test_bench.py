"""`longspark bench`: fair counts, resumable runs, tasks, errors."""

import json
import statistics
import time

import huggingface_hub
import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from longspark_hf import LongSparkDrafter
from longspark_hf.evaluation import tasks as task_module
from longspark_hf.evaluation.answering import Answerer
from longspark_hf.evaluation.bench import Bench, BenchSettings, make_bench
from longspark_hf.evaluation.bench_rows import make_rows, warning
from longspark_hf.evaluation.targets import scale_rope
from longspark_hf.evaluation.tasks import HUB_TASKS, Document, HubTask, Task, first_ids, load_tasks, next_ids

from .targets import left_on, scripted_drafter
from .test_cli import assert_bad_input, byte_tokenizer, longspark, tiny_config


PROMPT = "What is two and three?"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(initializer_range=0.15)).eval()
    model.config._name_or_path = "tiny"
    return model


@pytest.fixture(scope="module")
def script(target, tokenizer):
    """`PROMPT` and the greedy answer to it."""
    prompt = torch.tensor([first_ids(tokenizer, PROMPT)])
    mask = torch.ones_like(prompt)
    return target.generate(prompt, attention_mask=mask, max_new_tokens=40, do_sample=False)[0]


@pytest.fixture
def target_folder(target, tokenizer, tmp_path):
    target.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def scripted(target, script):
    """Drafters that know the greedy answer to `PROMPT`, wrong from the slots on that `wrong_at` names in turn."""
    return lambda *wrong_at: scripted_drafter(target, script, list(wrong_at), mask_token_id=271)


def bench(target, tokenizer, drafter, max_new_tokens, turns=(PROMPT,), output=None, progress=print, **settings):
    tasks = [Task("asked", [list(turns)], max_new_tokens)]
    settings = {"methods": ("longspark",), "repeats": 1} | settings
    return Bench(target, tokenizer, drafter, "scripted", tasks, BenchSettings(**settings), output, progress=progress)


def rows_of(measured):
    measured.run()
    return {row["method"]: row for row in measured.result()["rows"]}


@pytest.mark.parametrize(
    "wrong_at, new_tokens, tau, accepted",
    [
        ([7], 1 + 8 * 3, 8.0, [1, 1, 1, 1, 1, 1, 1]),
        ([3], 1 + 4 * 5, 4.0, [1, 1, 1, 0, 0, 0, 0]),
        ([7, 0], 1 + 9 * 2, 4.5, [0.5] * 7),
        ([0], 9, 1.0, [0] * 7),
    ],
)
def test_a_drafter_of_known_acceptance_gets_exactly_that_reported(
    target, tokenizer, scripted, wrong_at, new_tokens, tau, accepted
):
    rows = rows_of(bench(target, tokenizer, scripted(*wrong_at), new_tokens, repeats=2))

    row = rows["longspark"]
    assert row["tau"] == tau
    assert row["accepted_by_position"] == accepted
    assert row["new_tokens"] == rows["plain"]["new_tokens"] == new_tokens
    assert row["identical"] is True and row["first_difference"] is None
    assert row["model_tpot_ms"] == (row["draft_ms_per_round"] + row["verify_ms_per_round"]) / tau
    assert row["model_tpot_ms"] < row["tpot_ms"]  # the loop around draft and verification is left out
    assert rows["plain"]["tau"] is None and rows["plain"]["speedup"] == 1.0


def test_a_capped_draft_reports_as_many_positions(target, tokenizer, scripted):
    drafter = scripted(7)
    row = rows_of(bench(target, tokenizer, drafter, 1 + 3 * 4, num_assistant_tokens=2))["longspark"]
    assert (row["tau"], row["accepted_by_position"]) == (3.0, [1, 1])


def test_tokens_are_counted_alike_when_an_answer_ends_inside_a_block(target, tokenizer, scripted, monkeypatch):
    drafter = scripted(7)
    answer = drafter.scripts[0][len(first_ids(tokenizer, PROMPT)) :].tolist()
    end = next(place for place in range(10, 30) if place % 8 not in (0, 7) and answer[place] not in answer[:place])
    monkeypatch.setattr(target.generation_config, "eos_token_id", answer[end])
    methods = ("prompt_lookup", "longspark", "zero_acceptance")

    rows = rows_of(bench(target, tokenizer, drafter, 60, methods=methods))

    assert {row["new_tokens"] for row in rows.values()} == {end + 1}
    assert all(row["identical"] for row in rows.values())
    assert rows["longspark"]["tau"] == end / -(-end // 8)
    assert rows["zero_acceptance"]["rounds"] == end


def test_numbers_are_the_drafters_own(target, tokenizer, scripted):
    drafter = scripted(2)
    answer = Answerer(target, tokenizer, drafter).answer("longspark", [PROMPT], 24)

    stats = drafter.stats
    assert sum(answer.rounds) == stats.rounds and answer.decode_tokens == stats.tokens
    assert answer.state_bytes == stats.state_bytes > 0
    # Measured from outside against from inside.
    assert answer.draft_seconds == pytest.approx(stats.draft_seconds, rel=0.3, abs=0.05)
    assert answer.verify_seconds <= stats.verify_seconds
    assert left_on(target) == []


def test_the_drafters_prefill_is_counted(target, tokenizer, scripted):
    drafter = scripted(7)
    new_cache = drafter.new_cache

    def slow():
        time.sleep(0.3)
        return new_cache()

    drafter.new_cache = slow
    rows = rows_of(bench(target, tokenizer, drafter, 9))

    assert rows["longspark"]["prefill_ms"] > 300 > rows["plain"]["prefill_ms"]
    assert rows["longspark"]["tokens_per_second"] < 9 / 0.3
    assert rows["longspark"]["speedup"] < 1 and rows["longspark"]["tpot_ms"] < 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_zero_acceptance_gives_the_break_even(target, tokenizer, scripted, temperature):
    drafter = scripted(7)
    measured = bench(
        target, tokenizer, drafter, 12, methods=("longspark", "zero_acceptance"), temperatures=(temperature,)
    )
    rows = rows_of(measured)

    zero = rows["zero_acceptance"]
    assert zero["tau"] == pytest.approx(1.0, abs=0.2) and zero["draft_ms_per_round"] > 0
    plain, run = (next(r for r in measured.runs if r["method"] == m) for m in ("plain", "zero_acceptance"))
    round_seconds = (run["seconds"] - run["prefill_seconds"]) / sum(run["rounds"])
    plain_seconds = (plain["seconds"] - plain["prefill_seconds"]) / plain["decode_tokens"]
    assert (
        rows["longspark"]["break_even_tau"] == zero["break_even_tau"] == pytest.approx(round_seconds / plain_seconds)
    )
    assert "draft" not in vars(drafter)
    if temperature == 0:
        assert zero["identical"] is True and zero["tau"] == 1.0
        assert rows["longspark"]["tau"] > 5  # the same drafter, accepted


def test_one_line_warns_of_a_drafter_below_its_break_even():
    row = {"task": "gsm8k", "method": "longspark", "temperature": 0.0, "tau": 1.5, "break_even_tau": 2.25}
    line = warning([row, row | {"temperature": 1.0}, row | {"task": "mbpp", "tau": 3.0}])
    assert "gsm8k at T = 0 (1.50, break-even 2.25)" in line and "gsm8k at T = 1" in line and "mbpp" not in line
    assert "\n" not in line
    assert warning([row | {"tau": 2.3}, row | {"method": "plain"}, row | {"break_even_tau": None}]) is None


def test_speedup_is_the_median_of_ratios_with_its_spread_over_repeats():
    def run(prompt, repeat, method, seconds):
        numbers = {"prefill_seconds": 1.0, "decode_tokens": 9, "new_tokens": 10, "prompt_tokens": 5, "rounds": [9]}
        parts = {"draft_seconds": 1.0, "verify_seconds": 1.0, "state_bytes": 4, "peak_memory_bytes": None}
        key = {"task": "a", "prompt": prompt, "temperature": 1.0, "repeat": repeat, "method": method, "turns": 1}
        return key | numbers | parts | {"seconds": seconds, "output": ""}

    seconds = {0: (5.0, 5.0, 8.0), 1: (4.0, 2.5, 4.0), 2: (10.0, 5.0, 5.0)}  # by prompt, over repeats; plain takes 10
    runs = [run(p, r, "plain", 10.0) for p in seconds for r in range(3)]
    runs += [run(p, r, "longspark", own) for p, repeats in seconds.items() for r, own in enumerate(repeats)]

    row = make_rows(runs, {"longspark": 7})[1]

    assert row["speedup"] == statistics.median([2.0, 2.5, 2.0])
    assert (row["speedup_low"], row["speedup_high"]) == (2.0, 2.0)
    assert row["tokens_per_second"] == 90 / sum(map(sum, seconds.values()))
    assert row["tpot_ms"] == pytest.approx(1e3 * (sum(map(sum, seconds.values())) - 9) / 81)
    assert row["decode_speedup"] == pytest.approx(statistics.median([9 / 4, 3.0, 9 / 4]))
    assert row["identical"] is None


def test_dflash_reports_costs_only(target, tokenizer, scripted):
    pytest.importorskip("transformers.models.muse_glimmer_assistant")
    drafter = scripted(7)
    rows = rows_of(bench(target, tokenizer, drafter, 12, methods=("dflash", "prompt_lookup"), temperatures=(0.0, 1.0)))

    row = rows["dflash"]
    assert row["tau"] is row["speedup"] is row["accepted_by_position"] is row["tokens_per_second"] is None
    assert row["draft_ms_per_round"] > 0 and row["break_even_tau"] > 0
    assert row["state_bytes"] > 3 * 2 * 2 * 8 * 4 * len(first_ids(tokenizer, PROMPT))
    assert rows["prompt_lookup"]["tau"] >= 1 and rows["prompt_lookup"]["state_bytes"] == 0


def test_turns_reuse_the_cache_and_the_state_of_the_turn_before(target, tokenizer, scripted):
    drafter = scripted(7)
    passes = []
    hook = target.model.register_forward_hook(lambda module, args, output: passes.append(output[0].shape[1]))
    measured = bench(
        target, tokenizer, drafter, 12, (PROMPT, "And four?"), methods=("longspark", "prompt_lookup"), repeats=1
    )
    answerer = Answerer(target, tokenizer, drafter)
    longest = {}
    for method in ("plain", "longspark", "prompt_lookup"):
        passes.clear()
        answer = answerer.answer(method, [PROMPT, "And four?"], 12)
        longest[method] = sorted(passes)[-2:]
    hook.remove()

    first, second = len(first_ids(tokenizer, PROMPT)), len(first_ids(tokenizer, "\n\nAnd four?"))
    assert longest["plain"] == longest["longspark"] == [second + 1, first]
    assert longest["prompt_lookup"][-1] >= first + 12 + second
    assert answer.prompt_tokens == first + second
    rows = rows_of(measured)
    assert all(row["identical"] and row["new_tokens"] == 24 for row in rows.values())
    assert any("filled cache" in note for note in measured.result()["notes"])


def test_where_a_greedy_answer_differs_is_reported(target, tokenizer, scripted):
    measured = bench(target, tokenizer, scripted(7), 12)
    rows_of(measured)
    plain = measured._plain_ids["asked", 0]
    answerer = Answerer(target, tokenizer, measured.drafter)
    other = answerer.answer("plain", [PROMPT], 12)
    other.ids = [plain[0][:5] + [(plain[0][5] + 1) % 256] + plain[0][6:]]

    difference = measured._difference(answerer, measured.tasks[0], 0, "longspark", other)

    assert (difference["turn"], difference["token"]) == (0, 5)
    assert difference["top_two_margin"] > 0


def test_a_stopped_measurement_is_kept_and_gone_on_with(target, tokenizer, scripted, tmp_path):
    path, drafter = tmp_path / "deep" / "bench.json", scripted(3)
    calls = []

    def stop(message):
        calls.append(message)
        if message.startswith("4 of"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(target, tokenizer, drafter, 9, output=path, repeats=3, progress=stop).run()
    kept = json.loads(path.read_text())
    assert len(kept["runs"]) == 3 and kept["complete"] is False and len(kept["rows"]) == 2

    bench(target, tokenizer, drafter, 9, output=path, repeats=3, progress=calls.append).run()
    done = json.loads(path.read_text())
    assert done["runs"][:3] == kept["runs"] and len(done["runs"]) == 6 and done["complete"] is True
    assert done["kind"] == "bench" and done["provenance"] == kept["provenance"]
    assert any(message.startswith("1 of 3") for message in calls)
    assert [p.name for p in path.parent.iterdir()] == ["bench.json"]

    again = bench(target, tokenizer, drafter, 9, output=path, repeats=3, progress=calls.append)
    again.run()
    assert again.runs == done["runs"]


def test_results_of_other_settings_are_refused_and_kept(target, tokenizer, scripted, tmp_path):
    path, drafter = tmp_path / "bench.json", scripted(3)
    bench(target, tokenizer, drafter, 9, output=path).run()
    before = path.read_text()

    with pytest.raises(ValueError, match="repeats was 1, now 2"):
        bench(target, tokenizer, drafter, 9, output=path, repeats=2)
    with pytest.raises(ValueError, match=r"other settings \(tasks\)"):
        bench(target, tokenizer, drafter, 9, ("Another question",), output=path)
    assert path.read_text() == before
    path.write_text("[]")
    with pytest.raises(ValueError, match="no result of `longspark bench`"):
        bench(target, tokenizer, drafter, 9, output=path)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"methods": ("plian",)}, "Unknown method 'plian'"),
        ({"temperatures": (-1.0,)}, "at least 0, got -1.0"),
        ({"concurrency": 8}, "--concurrency 8.*only 1"),
        ({"num_assistant_tokens": 0}, "at least 1, got 0"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BenchSettings(**settings)


def test_prompts_beyond_the_context_are_refused_before_anything_runs(target, tokenizer, scripted):
    drafter = scripted(7)
    with pytest.raises(ValueError, match="'asked', prompt 1: 22 prompt tokens and 1 x 1003 .*--max-new-tokens 1002"):
        bench(target, tokenizer, drafter, 1003)
    with pytest.raises(ValueError, match="a shorter task"):
        bench(target, tokenizer, drafter, 12, ("x" * 1023,))


# Tasks


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no prompts"),
        ('{"turns": ["a"]}\n{"turns": \n', "line 2: not valid JSON"),
        ('{"prompt": "a"}', 'line 1: "turns" must be a list'),
        ('{"turns": []}', 'line 1: "turns" must be a list'),
        ('{"turns": ["a", 3]}', 'line 1: every one of "turns"'),
    ],
)
def test_a_bad_prompt_file_is_named_with_line_and_reason(tokenizer, tmp_path, text, message):
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"own.jsonl.*{message}"):
        load_tasks([str(path)], tokenizer)


def test_own_prompts_are_drawn_by_seed(tokenizer, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"question {i}", "and?"]}) + "\n" for i in range(20)))

    (task,) = load_tasks([str(path)], tokenizer, num_prompts=5, max_new_tokens=7, seed=1)

    assert task.name == "own" and task.max_new_tokens == 7 and len(task.conversations) == 5
    assert task == load_tasks([str(path)], tokenizer, num_prompts=5, max_new_tokens=7, seed=1)[0]
    assert task != load_tasks([str(path)], tokenizer, num_prompts=5, max_new_tokens=7, seed=2)[0]
    assert len(load_tasks([str(path)], tokenizer, num_prompts=50)[0].conversations) == 20
    with pytest.raises(ValueError, match="'own' is asked for twice"):
        load_tasks([str(path), str(path)], tokenizer)


def test_unknown_tasks_name_what_there_is(tokenizer):
    with pytest.raises(ValueError, match="Unknown task 'gsm9k'.*gsm8k.*stdlib-1k to stdlib-128k"):
        load_tasks(["gsm9k"], tokenizer)
    with pytest.raises(ValueError, match="stdlib-256k"):
        load_tasks(["stdlib-256k"], tokenizer)
    with pytest.raises(ValueError, match="missing.jsonl"):
        load_tasks(["missing.jsonl"], tokenizer)


@pytest.mark.parametrize("name", ["math500", "gsm8k", "longspec-32k"])
def test_a_dataset_that_cannot_be_had_says_what_works_without(tokenizer, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(ValueError, match=f"'{name}'.*stdlib-1k") as error:
        load_tasks([name], tokenizer)
    assert HUB_TASKS[name].dataset in str(error.value)


def test_code_spans_have_the_length_of_their_name(tokenizer):
    for name, tokens in (("stdlib-1k", 1024), ("stdlib-6k", 6144)):
        (task,) = load_tasks([name], tokenizer, num_prompts=2)
        assert len({turns[0] for turns in task.conversations}) == 2
        for turns in task.conversations:
            assert abs(len(first_ids(tokenizer, turns[0])) - tokens) <= 8
            assert "```python" in turns[0]


def test_templates_fill_rows_of_the_datasets(monkeypatch, tokenizer):
    rows = {
        "gsm8k": {"question": "1 {+} 1?"},
        "alpaca": {"instruction": "Add.", "input": "1, 1"},
        "livecodebench": {"question_content": "Add.", "starter_code": ""},
        "mt-bench": {"prompt": ["Add.", "Again."]},
        "humaneval": {"prompt": "def f():"},
    }
    monkeypatch.setattr(task_module, "_rows", lambda name, task: [rows[name]])
    asked = {task.name: task.conversations for task in load_tasks(list(rows), tokenizer)}

    assert asked["gsm8k"] == [["1 {+} 1?\nPlease reason step by step, and put your final answer within \\boxed{}."]]
    assert asked["alpaca"] == [["Add.\n\nInput:\n1, 1"]]
    assert "# YOUR CODE HERE" in asked["livecodebench"][0][0]
    assert asked["mt-bench"] == [["Add.", "Again."]]
    assert asked["humaneval"][0][0].endswith("```python\ndef f():\n```")
    monkeypatch.setattr(task_module, "_rows", lambda name, task: [{"renamed": 1}])
    with pytest.raises(ValueError, match="openai/gsm8k of the task 'gsm8k' has changed"):
        load_tasks(["gsm8k"], tokenizer)


def test_an_issue_stands_behind_its_repository(monkeypatch, tokenizer):
    texts = [f"You will be given<code>{letter * 700}</code>end" for letter in "ab"]
    rows = [{"repo": "r", "text": text, "problem_statement": f"broken {i}"} for i, text in enumerate(texts)]
    task = HubTask("issues", HUB_TASKS["issue-128k"].read, context_tokens=1000)
    monkeypatch.setitem(task_module.HUB_TASKS, "issue-128k", task)
    monkeypatch.setattr(task_module, "_rows", lambda name, task: rows)

    (found,) = load_tasks(["issue-128k"], tokenizer)

    for (prompt,) in found.conversations:
        assert len(first_ids(tokenizer, prompt)) == 1000
        own = "a" if "broken 0" in prompt else "b"
        assert prompt.startswith("<code>\n" + own * 700) and prompt.count("ab".replace(own, "")) > 100
    assert len(found.conversations) == 2


def test_documents_too_short_are_left_out(tokenizer):
    documents = [Document("short", "a", "z"), Document("l" * 500, "a", "z")]
    assert task_module._cut(documents, tokenizer, 100, None) == [["a" + "l" * 98 + "z"]]


def test_a_further_turn_keeps_the_tokens_before_it():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = first_ids(tokenizer, "hi")
    assert tokenizer.decode(ids) == "<u>hi;<a>"
    cut_off, ended = (ids + tokenizer("yes" + end, add_special_tokens=False).input_ids for end in ("", ";"))
    for answered in (cut_off, ended):
        assert tokenizer.decode(next_ids(tokenizer, answered, "so?")) == "<u>hi;<a>yes;<u>so?;<a>"
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="changes answers"):
        next_ids(tokenizer, ids, "so?")


# Rotary base


def test_ntk_scales_target_and_drafter_alike(target_folder, tmp_path):
    drafter = LongSparkDrafter(scripted_drafter_config(target_folder))
    drafter.save_pretrained(tmp_path / "drafter")
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"turns": ["x" * 1100]}))
    settings = BenchSettings(methods=("longspark",), repeats=1, ntk_alpha=4.0)

    measured = make_bench(str(target_folder), str(tmp_path / "drafter"), [str(prompts)], settings, None, 4)

    theta = 1e4 * 4 ** (8 / 6)
    assert measured.target.config.rope_parameters["rope_theta"] == pytest.approx(theta)
    assert measured.drafter.config.rope_parameters == measured.target.config.rope_parameters
    expected = theta ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(measured.target.model.rotary_emb.inv_freq, expected)
    assert rows_of(measured)["longspark"]["identical"] is True  # beyond 1024 positions, four times as many now


def scripted_drafter_config(target_folder):
    from longspark_hf import LongSparkConfig
    from longspark_hf.evaluation.targets import load_target_config

    config = load_target_config(str(target_folder))
    return LongSparkConfig.from_target(config, mask_token_id=271, window_size=16, markov_rank=8)


def test_rotary_bases_are_checked():
    config = tiny_config()
    assert scale_rope(config) == 1.0
    assert scale_rope(config, rope_theta=1e4 * 4 ** (8 / 6)) == pytest.approx(4.0)
    assert config.rope_parameters["rope_theta"] == 1e4 * 4 ** (8 / 6)
    with pytest.raises(ValueError, match="not both"):
        scale_rope(config, 1e5, 2.0)
    with pytest.raises(ValueError, match="positive number, got -1"):
        scale_rope(config, ntk_alpha=-1)


# The command


def test_bench_prints_one_table_of_at_most_100_columns_and_writes_json(target_folder, tmp_path):
    arguments = ("bench", "--target", target_folder, "--tasks", own_file(tmp_path), "--max-new-tokens", 6)
    arguments += ("--repeats", 2, "--output", tmp_path / "bench.json")

    result = longspark(*arguments)

    assert result.exit_code == 0, result.output
    assert "own, T = 0: 1 prompt of 22 tokens, 6 new tokens, 2 repeats" in result.stdout
    assert "longspark" in result.stdout and "NO" not in result.stdout and "untrained" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100 and "…" not in result.stdout
    assert [line for line in result.stderr.splitlines() if line.startswith("Warning: ")]
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["complete"] and found["provenance"]["dtype"] == "float32"
    again = longspark(*arguments, "--json")
    assert json.loads(again.stdout) == found
    written = longspark(*arguments, "--markdown").stdout
    assert "| longspark | " in written and "**own, T = 0" in written


def test_bench_refuses_bad_input_in_one_line(target_folder, tmp_path):
    logging.set_verbosity_error()
    assert_bad_input(longspark("bench", "--target", target_folder, "--tasks", "gsm9k"), "Unknown task 'gsm9k'")
    assert_bad_input(longspark("bench", "--target", target_folder, "--methods", "fast"), "Unknown method", "longspark")
    assert_bad_input(longspark("bench", "--target", target_folder, "--temperatures", "hot"), "--temperatures", "hot")
    assert_bad_input(longspark("bench", "--target", target_folder, "--concurrency", 2), "--concurrency 2")
    assert_bad_input(longspark("bench", "--target", target_folder), "'stdlib-1k', prompt 1", "1024 positions")
    assert_bad_input(longspark("bench", "--target", tmp_path / "missing"), "missing", "smollm2")


def test_a_stopped_command_shows_what_is_done(target_folder, tmp_path, monkeypatch):
    answer = Answerer.answer
    calls = []

    def stopping(self, method, *args, **kwargs):
        calls.append(method)
        if len(calls) == 5:  # two warm-ups and one repeat
            raise KeyboardInterrupt
        return answer(self, method, *args, **kwargs)

    monkeypatch.setattr(Answerer, "answer", stopping)
    output = tmp_path / "bench.json"
    result = longspark(
        *("bench", "--target", target_folder, "--tasks", own_file(tmp_path), "--max-new-tokens", 6),
        *("--methods", "longspark", "--output", output),
    )

    assert result.exit_code == 130
    assert "2 runs are done" in result.stderr and "the same command goes on" in result.stderr
    assert "own, T = 0" in result.stdout
    assert len(json.loads(output.read_text())["runs"]) == 2


def own_file(folder):
    path = folder / "own.jsonl"
    path.write_text(json.dumps({"turns": [PROMPT]}) + "\n")
    return path
