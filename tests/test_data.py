"""Training data: what a target is asked and answers, what is kept of it, and that a kill costs nothing."""

import dataclasses
import functools
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from longspark_hf.cli import app
from longspark_hf.evaluation.targets import device_and_dtype
from longspark_hf.training.corpus import load_training_data
from longspark_hf.training.data import Sample, read_samples, response_end, tokenize
from longspark_hf.training.documents import document_prompts, read_documents
from longspark_hf.training.journal import ResumableJsonl
from longspark_hf.training.prompts import Prompt, open_template, read_prompts
from longspark_hf.training.samples import SynthesisSettings, repetition
from longspark_hf.training.sampling import RowTemperatures, continue_batch
from longspark_hf.training.synthesize import synthesize


CHATML = (
    "{% if messages[0].role != 'system' %}<s>system\nBe brief.</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}(no thinking)\n{% endif %}{% endif %}"
)
SHORT = SynthesisSettings(max_new_tokens=12, max_prompt_tokens=40, max_repetition=1.0)
BRIEF = dataclasses.replace(SHORT, max_new_tokens=6, max_prompt_tokens=20, prompt_temperature=0.4, prompt_top_k=3)
ASKED = [
    Prompt.of(text) for text in ("hello there", "a", "what is the longest of these?", "sum 1 and 2", "why", "f(x)")
]


def tiny_tokenizer(chat_template=CHATML):
    letters = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter.isascii() or letter in "ĠĊ"]
    vocab = {token: i for i, token in enumerate(["<pad>", "</s>", "<s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", additional_special_tokens=["<s>"]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_target():
    """A random target that writes printable characters and ends a text after some twenty of them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = [1, *range(4, 8)]
    return model


@pytest.fixture(scope="module")
def target():
    model = tiny_target()
    model.config._name_or_path = "tiny"
    return model


@pytest.fixture(scope="module")
def talkative():
    """A target whose texts rarely end before the limit."""
    model = tiny_target()
    model.generation_config.eos_token_id = 1
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_target().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_lines(path, *objects):
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))
    return path


def longspark(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_bad_input(result, *hints):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    for hint in hints:
        assert hint in line


# Answers


def test_samples_follow_the_contract(target, tokenizer, tmp_path):
    report = synthesize(target, tokenizer, tmp_path / "d.jsonl", ASKED * 2, SHORT, batch_size=4)

    samples = read_samples(tmp_path / "d.jsonl")
    assert len(samples) == report["kept"] > 0
    for line, sample in zip(lines(tmp_path / "d.jsonl"), samples):
        assert set(line) in ({"prompt", "response", "temperature"}, {"prompt", "response", "temperature", "complete"})
        assert sample.temperature in SHORT.temperatures
        assert tokenize([sample], tokenizer) is not None
    assert {s.complete for s in samples} == {True, False}
    assert report["kept_cut_off"] == sum(not s.complete for s in samples)
    assert report["dropped"]["duplicate prompt"] == len(ASKED)
    assert report["prompts"] == 2 * len(ASKED) == report["kept"] + sum(report["dropped"].values())
    assert json.loads((tmp_path / "d.jsonl.report.json").read_text()) == report


def test_greedy_responses_are_those_of_each_prompt_alone(target, tokenizer, tmp_path):
    greedy = SynthesisSettings(temperatures=(0.0,), max_new_tokens=12, max_repetition=1.0)
    synthesize(target, tokenizer, tmp_path / "d.jsonl", ASKED, greedy, batch_size=len(ASKED))

    made = {line["prompt"]: line["response"] for line in lines(tmp_path / "d.jsonl")}
    assert made
    for prompt, response in made.items():
        text = f"<s>system\nBe brief.</s>\n<s>user\n{prompt}</s>\n<s>assistant\n(no thinking)\n"
        inputs = tokenizer(text, return_tensors="pt")
        output = target.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        end = [i for i, token in enumerate(output.tolist()) if token in target.generation_config.eos_token_id]
        assert response == tokenizer.decode(output[: end[0] if end else None], skip_special_tokens=True).rstrip(
            "\ufffd"
        )


def test_every_row_has_its_own_temperature():
    scores = torch.randn(3, 50)
    shaped = RowTemperatures([0.0, 0.5, 1.0])(None, scores).softmax(-1)

    assert torch.equal(shaped[0], torch.nn.functional.one_hot(scores[0].argmax(), 50).float())
    assert torch.allclose(shaped[1], (scores[1] / 0.5).softmax(-1))
    assert torch.allclose(shaped[2], scores[2].softmax(-1))


def test_responses_are_drawn_from_the_targets_unfiltered_distribution(tokenizer):
    target = tiny_target()
    ids = tokenizer("<s>x")["input_ids"]
    with torch.no_grad():
        expected = (target(torch.tensor([ids])).logits[0, -1] / 0.7).softmax(-1)
    # What chat models ship in their generation config would cut all but one token.
    target.generation_config.update(top_k=1, top_p=0.1, min_p=0.9, repetition_penalty=5.0, temperature=9.0)
    torch.manual_seed(0)
    drawn = continue_batch(target, [ids] * 4000, [0.7] * 4000, 1, eos_ids=[], pad_id=0)

    counts = Counter(token for made in drawn for token in made.ids)
    rare = sum(p for p in expected.tolist() if p * 4000 < 5)
    for token, p in enumerate(expected.tolist()):
        if p * 4000 >= 5:
            assert abs(counts[token] - 4000 * p) < 5 * math.sqrt(4000 * p), token
    assert rare < 0.5


def test_messages_are_kept_and_an_answer_among_them_is_made_anew(talkative, tokenizer, tmp_path):
    system, user = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}
    old = {"role": "assistant", "content": "Old answer."}
    file = write_lines(
        tmp_path / "p.jsonl",
        {"messages": [system, user, old], "response": "Old.", "temperature": 5},
        {"prompt": "Hello?", "response": "Old."},
        {"messages": [user, old, user], "more": 1},
    )
    synthesize(talkative, tokenizer, tmp_path / "d.jsonl", read_prompts(file), SHORT)

    made = lines(tmp_path / "d.jsonl")
    assert [m.get("messages", m.get("prompt")) for m in made] == [[system, user], "Hello?", [user, old, user]]
    assert all("Old" not in m["response"] for m in made)


@pytest.mark.parametrize("thinking", [False, True])
def test_training_sees_the_prompt_that_was_answered(talkative, tokenizer, tmp_path, thinking):
    how = dataclasses.replace(SHORT, thinking=thinking)
    report = synthesize(talkative, tokenizer, tmp_path / "d.jsonl", ASKED[:1], how)
    (sample,) = read_samples(tmp_path / "d.jsonl")
    item = tokenize([sample], tokenizer)
    prompt = item["input_ids"][: item["response_mask"].index(True)]
    assert len(prompt) == report["prompt_tokens"]
    assert ("(no thinking)" in tokenizer.decode(prompt)) is not thinking


def test_a_base_model_without_a_chat_template_answers_prompts(target, tmp_path):
    tokenizer = tiny_tokenizer(chat_template=None)
    report = synthesize(target, tokenizer, tmp_path / "d.jsonl", ASKED, SHORT)
    assert report["kept"] > 0
    assert all(tokenize([sample], tokenizer) for sample in read_samples(tmp_path / "d.jsonl"))
    chat = [Prompt([{"role": "user", "content": "x"}], plain=False)]
    with pytest.raises(ValueError, match="no chat template"):
        synthesize(target, tokenizer, tmp_path / "chat.jsonl", chat, SHORT)


# Prompts of the target's own

TEMPLATES = [
    pytest.param(CHATML, "<s>system\nBe brief.</s>\n<s>user\n", "</s>\n", id="chatml"),
    pytest.param("{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}", "[INST]", " [/INST]", id="inst"),
    pytest.param("{% for m in messages %}Q: {{ m.content }}\n{% endfor %}A:", "Q:", "\nA:", id="text"),
]


@pytest.mark.parametrize("template, opening, closing", TEMPLATES)
def test_the_open_template_ends_where_the_users_text_begins(template, opening, closing):
    assert open_template(tiny_tokenizer(template)) == (opening, closing)


@pytest.mark.parametrize("template", [None, "hello", "{% for m in messages %}{{ m.content | length }}{% endfor %}"])
def test_a_template_that_cannot_be_opened_says_so(template):
    with pytest.raises(ValueError, match="chat template.*--prompts"):
        open_template(tiny_tokenizer(template))


def test_the_target_makes_up_prompts_and_answers_them(target, tokenizer, tmp_path):
    report = synthesize(target, tokenizer, tmp_path / "d.jsonl", 20, SHORT, batch_size=5)

    made = read_samples(tmp_path / "d.jsonl")
    assert report["prompts"] == 20 and report["kept"] == len(made) > 5
    assert len({s.messages[0]["content"] for s in made}) == len(made)
    assert set(report["dropped"]) <= {
        "prompt cut off", "empty prompt", "duplicate prompt", "empty response", "short response"
    }  # fmt: skip


def test_a_made_up_prompt_ends_with_the_templates_own_words(target, tmp_path):
    # "e" ends a user's text here; in no prompt may one be left.
    tokenizer = tiny_tokenizer("{% for m in messages %}Q:{{ m.content }}e{% endfor %}")
    target = tiny_target()
    target.generation_config.eos_token_id = None
    wide = SynthesisSettings(max_new_tokens=4, max_prompt_tokens=200, max_repetition=1.0)
    report = synthesize(target, tokenizer, tmp_path / "d.jsonl", 4, wide, batch_size=4)
    assert report["kept"] > 0
    assert all("e" not in sample.messages[0]["content"] for sample in read_samples(tmp_path / "d.jsonl"))


# Filters


def test_repetition_is_the_share_of_ngrams_seen_before():
    assert repetition([]) == repetition([1, 2, 3]) == repetition(range(100)) == 0
    assert repetition([1, 2, 3, 4] * 2) == 1 - 4 / 5
    assert repetition([7] * 103) == 0.99


def test_only_responses_that_repeat_themselves_are_dropped(talkative, tokenizer, tmp_path):
    texts, made = [Prompt.of(f"prompt {i}") for i in range(8)], {}
    for limit in (1.0, 0.1):
        limited = SynthesisSettings(temperatures=(0.0, 1.0), max_new_tokens=100, max_repetition=limit)
        report = synthesize(talkative, tokenizer, tmp_path / f"{limit}", texts, limited)
        made[limit] = lines(tmp_path / f"{limit}")
    within = [line for line in made[1.0] if repetition(tokenizer(line["response"])["input_ids"]) <= 0.1]
    assert made[0.1] == within
    assert report["dropped"] == {"repetitive response": 8 - len(within)} and 0 < len(within) < 8


def test_every_drop_has_a_reason(talkative, tmp_path):
    refusing = tiny_tokenizer("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML)
    system = Prompt([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], plain=False)
    asked = [Prompt.of("Twice"), Prompt.of(" twice\n"), Prompt.of(" "), system, Prompt.of("long" * 600)]

    report = synthesize(talkative, refusing, tmp_path / "d.jsonl", asked, SHORT)

    dropped = dict.fromkeys(
        ["duplicate prompt", "empty prompt", "prompt refused by the chat template", "prompt too long"], 1
    )
    assert report["kept"] == 1 and report["dropped"] == dropped


def test_responses_that_were_cut_off_can_be_dropped(target, tokenizer, tmp_path):
    asked = [Prompt.of(f"question {i}") for i in range(24)]
    keep = SynthesisSettings(max_new_tokens=12, max_repetition=1.0, min_new_tokens=5)
    drop = dataclasses.replace(keep, keep_cut=False)
    kept = synthesize(target, tokenizer, tmp_path / "keep.jsonl", asked, keep)
    dropped = synthesize(target, tokenizer, tmp_path / "drop.jsonl", asked, drop)

    assert dropped["dropped"]["response cut off"] == kept["kept_cut_off"] == kept["kept"] - dropped["kept"] > 0
    assert lines(tmp_path / "drop.jsonl") == [
        line for line in lines(tmp_path / "keep.jsonl") if "complete" not in line
    ]
    assert dropped["dropped"]["short response"] == kept["dropped"]["short response"] > 0


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"temperatures": ()}, "at least 0"),
        ({"temperatures": (1.0, float("nan"))}, "at least 0"),
        ({"temperatures": (-1.0,)}, "at least 0"),
        ({"min_new_tokens": 1}, "at least 2"),
        ({"min_new_tokens": 600}, "limit of 512"),
        ({"max_repetition": 1.5}, "between 0 and 1"),
        ({"prompt_temperature": 0.0}, "above 0"),
        ({"max_prompt_tokens": 0}, "at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        SynthesisSettings(**wrong)


def test_a_target_without_room_or_end_is_refused(target, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="2048 positions"):
        synthesize(target, tokenizer, tmp_path / "d.jsonl", ASKED, SynthesisSettings(max_new_tokens=2048))
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        synthesize(target, endless, tmp_path / "d.jsonl", ASKED, SHORT)


# Cut responses in training


def test_a_response_that_was_cut_off_has_no_end_token(tokenizer):
    message = [{"role": "user", "content": "q"}]
    whole, cut = (tokenize([Sample(message, "abc", complete=c)], tokenizer) for c in (True, False))
    assert whole["input_ids"] == cut["input_ids"] + [tokenizer.eos_token_id]
    assert sum(whole["response_mask"]) == sum(cut["response_mask"]) + 1 == 4


ENDED_BY_S = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RESPONSE_ENDS = [
    pytest.param(ENDED_BY_S, [1, 2], "<s>", id="end-of-turn"),  # Gemma's <end_of_turn>, where <eos> is another token
    pytest.param(ENDED_BY_S, [1], "</s>", id="end-of-turn-does-not-stop"),  # base models with a chat template
    pytest.param(ENDED_BY_S, None, "</s>", id="unknown"),
    pytest.param(CHATML, [5, 1], "</s>", id="eos"),
    pytest.param("{{ messages[0].content }}", [1, 2], "</s>", id="template-without-answers"),
    pytest.param("{{ raise_exception('no') }}", [1, 2], "</s>", id="template-that-refuses"),
    pytest.param(None, [1, 2], "</s>", id="no-template"),
]


@pytest.mark.parametrize("template, stops, end", RESPONSE_ENDS)
def test_a_response_ends_as_the_template_ends_it(template, stops, end):
    tokenizer = tiny_tokenizer(template)
    assert response_end(tokenizer, GenerationConfig(eos_token_id=stops)) == tokenizer.convert_tokens_to_ids(end)


def test_training_ends_every_turn_as_the_target_does(tmp_path):
    tokenizer = tiny_tokenizer(ENDED_BY_S)
    file = write_lines(tmp_path / "d.jsonl", *({"prompt": f"q{i}", "response": f"a{i}"} for i in range(4)))
    stops = GenerationConfig(eos_token_id=[1, 2])
    item = load_training_data(file, tokenizer, 99, stops, long_share=1.0).training.items[0]
    learned = [i for i, counts in zip(item["input_ids"], item["response_mask"]) if counts]
    assert sorted(tokenizer.decode(learned).split("<s>")) == ["", "a0", "a1", "a2"]
    assert tokenizer.decode(item["input_ids"]).count("<s>") == 6  # each turn of the user has one as well


REWRITTEN = "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}a:"
JOINED = [pytest.param(REWRITTEN, 8, id="rewrites-earlier-turns"), pytest.param(ENDED_BY_S, 1, id="continues")]


@pytest.mark.parametrize("template, conversations", JOINED)
def test_no_response_is_lost_in_long_conversations(tmp_path, template, conversations):
    lines = ({"prompt": f"q{i}", "response": "answer " + "x" * i} for i in range(9))
    file, tokenizer = write_lines(tmp_path / "d.jsonl", *lines), tiny_tokenizer(template)
    stops = GenerationConfig(eos_token_id=[1, 2])
    apart, joined = (load_training_data(file, tokenizer, 99, stops, long_share=share).training for share in (0, 1))
    assert joined.num_response_tokens() == apart.num_response_tokens()
    assert len(joined) == conversations and not joined.dropped


@pytest.mark.parametrize("name", ["complete", "thinking"])
def test_flags_must_be_true_or_false(tmp_path, name):
    file = write_lines(tmp_path / "d.jsonl", {"prompt": "a", "response": "b", name: "no"})
    with pytest.raises(ValueError, match=f'line 1: "{name}" must be true or false'):
        read_samples(file)


# Kills


@pytest.fixture(scope="module")
def uninterrupted(target, tokenizer, tmp_path_factory):
    """Files of whole runs: with given prompts and with made-up ones."""
    runs = {}
    for name, asked in (("given", ASKED * 2 + [Prompt.of(f"number {i}") for i in range(4)]), ("made-up", 11)):
        path = tmp_path_factory.mktemp(name) / "d.jsonl"
        report = synthesize(target, tokenizer, path, asked, BRIEF, batch_size=3)
        assert report["kept"] > 3 and report["dropped"]["duplicate prompt"] > 0
        runs[name] = asked, path, report
    return runs


@given(st.sampled_from(["given", "made-up"]), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=16, deadline=None, derandomize=True)
def test_a_run_cut_at_any_byte_ends_with_the_same_file(target, tokenizer, uninterrupted, which, share, journal_share):
    asked, whole, report = uninterrupted[which]
    content, journal = whole.read_bytes(), Path(f"{whole}.journal").read_bytes()
    begin = journal.index(b"\n") + 1  # no sample is written before the first line of the journal is
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.jsonl"
        path.write_bytes(content[: round(share * len(content))])
        Path(f"{path}.journal").write_bytes(journal[: begin + round(journal_share * (len(journal) - begin))])

        again = synthesize(target, tokenizer, path, asked, BRIEF, batch_size=3)

        assert path.read_bytes() == content
        finished = synthesize(target, tokenizer, path, asked, BRIEF)
        assert finished["seconds"] == again["seconds"]  # nothing was left to do
        for key in ("kept", "dropped", "generated_tokens", "kept_by_temperature", "prompts"):
            assert again[key] == report[key]


def test_a_killed_process_goes_on_where_it_was(folder, tmp_path):
    asked = write_lines(tmp_path / "p.jsonl", *({"prompt": f"question {i}"} for i in range(40)))
    options = [
        "--target",
        folder,
        "--prompts",
        asked,
        "--max-new-tokens",
        16,
        "--batch-size",
        2,
        "--max-repetition",
        1,
    ]
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    command = [sys.executable, "-m", "longspark_hf.cli", "data", "--output", killed, *options]
    process = subprocess.Popen(
        [str(part) for part in command], stderr=subprocess.PIPE, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    journal = Path(f"{killed}.journal")
    while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 4):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    process.stderr.close()
    before = killed.read_bytes()

    for path in (whole, killed):
        result = longspark("data", "--output", path, *options)
        assert result.exit_code == 0, result.output

    assert killed.read_bytes() == whole.read_bytes() != before
    assert killed.read_bytes().startswith(before[: before.rindex(b"\n") + 1])


def test_a_finished_run_is_left_alone(target, tokenizer, tmp_path):
    path = tmp_path / "d.jsonl"
    first = synthesize(target, tokenizer, path, ASKED, SHORT)
    with path.open("a") as file:
        file.write('{"prompt": "by hand", "response": "too"}\n')
    content, told = path.read_bytes(), []

    again = synthesize(target, tokenizer, path, ASKED, SHORT, progress=lambda *args: told.append(args))

    assert path.read_bytes() == content
    assert told == [(len(ASKED), len(ASKED), 0)]
    assert {k: v for k, v in again.items() if k != "made_with"} == {k: v for k, v in first.items() if k != "made_with"}


def stopped_after(batches, target, tokenizer, path, asked, **kwargs):
    """A run that is interrupted by Ctrl-C in its next batch."""

    def progress(done, total, tokens):
        if done > batches * kwargs["batch_size"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(target, tokenizer, path, asked, SHORT, progress=progress, **kwargs)


def test_the_batch_size_may_change_on_the_way(target, tokenizer, tmp_path):
    path, asked = tmp_path / "d.jsonl", [Prompt.of(f"question {i}") for i in range(12)]
    stopped_after(2, target, tokenizer, path, asked, batch_size=4)
    assert 0 < len(lines(path)) <= 8
    report = synthesize(target, tokenizer, path, asked, SHORT, batch_size=1)
    asked_for = [line["prompt"] for line in lines(path)]
    assert len(asked_for) == len(set(asked_for)) == report["kept"]
    assert report["prompts"] == 12


def test_other_settings_are_refused(target, tokenizer, tmp_path):
    path = tmp_path / "d.jsonl"
    stopped_after(1, target, tokenizer, path, ASKED, batch_size=2)
    content = path.read_bytes()
    with pytest.raises(ValueError, match="other settings: max_new_tokens was 12, now 13; seed was 0, now 5"):
        synthesize(target, tokenizer, path, ASKED, dataclasses.replace(SHORT, max_new_tokens=13, seed=5))
    with pytest.raises(ValueError, match="prompts was '6 prompts, .*now '5 prompts"):
        synthesize(target, tokenizer, path, ASKED[:5], SHORT)
    assert path.read_bytes() == content


def test_files_of_others_are_refused(target, tokenizer, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("precious\n")
    with pytest.raises(ValueError, match="exists, but not its journal"):
        synthesize(target, tokenizer, path, ASKED, SHORT)
    assert path.read_text() == "precious\n"

    path = tmp_path / "e.jsonl"
    stopped_after(1, target, tokenizer, path, ASKED, batch_size=4)
    path.write_bytes(path.read_bytes().replace(b"\n", b" ") + b"more\n")
    with pytest.raises(ValueError, match="changed by something else"):
        synthesize(target, tokenizer, path, ASKED, SHORT)

    journal = tmp_path / "f.jsonl.journal"
    journal.write_text("{}\nnonsense\n")
    with pytest.raises(ValueError, match="f.jsonl.journal is damaged"):
        synthesize(target, tokenizer, tmp_path / "f.jsonl", ASKED, SHORT)
    with pytest.raises(ValueError, match="Cannot write .*e.jsonl"):
        synthesize(target, tokenizer, path / "below", ASKED, SHORT)


def test_two_writers_of_one_file_are_noticed(tmp_path):
    with ResumableJsonl(tmp_path / "d.jsonl", {}) as one, ResumableJsonl(tmp_path / "d.jsonl", {}) as other:
        one.append([{"a": 1}], {"done": 1})
        with pytest.raises(ValueError, match="Something else writes to"):
            other.append([{"a": 1}], {"done": 1})


class FullTarget(LlamaForCausalLM):
    """A target for which memory runs out in batches of more than one."""

    def forward(self, input_ids=None, **kwargs):
        if len(input_ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(input_ids=input_ids, **kwargs)


def test_memory_running_out_says_what_to_change(tokenizer, tmp_path):
    target = FullTarget(tiny_target().config).eval()
    with pytest.raises(ValueError, match="batches of 2.*--batch-size"):
        synthesize(target, tokenizer, tmp_path / "d.jsonl", ASKED, SHORT, batch_size=2)
    assert synthesize(target, tokenizer, tmp_path / "d.jsonl", ASKED, SHORT, batch_size=1)["prompts"] == len(ASKED)


# Documents


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    words = [line.strip() for line in "sun moon river stone cloud tree bird wind salt iron lamp road".split()]
    rng = random.Random(0)
    for chapter in range(3):
        text = []
        for section in range(6):
            text.append(f"## Section {chapter} {section} on {rng.choice(words)}\n")
            text += [" ".join(rng.choices(words, k=30)).capitalize() + ".\n" for _ in range(4)]
        (folder / f"chapter{chapter}.md").write_text("\n".join(text))
    code = "".join(
        f"def task_{i}(x):\n    return x + {i}\n\n\nclass Kind{i}:\n    size = {i}\n\n\n" for i in range(60)
    )
    (folder / "code.py").write_text(code)
    (folder / ".git").mkdir()
    (folder / ".git" / "notes.txt").write_text("hidden " * 500)
    (folder / "latin.txt").write_bytes(b"caf\xe9" * 100)
    (folder / "data.bin").write_bytes(b"\0" * 100)
    return folder


def rendered_length(prompt, tokenizer):
    return len(tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True)["input_ids"])


def test_documents_are_packed_to_the_lengths_asked_for(library, tokenizer):
    documents = read_documents([library])
    assert [d.name for d in documents] == ["chapter0.md", "chapter1.md", "chapter2.md", "code.py"]

    prompts = document_prompts(documents, tokenizer, [600, 1500], num_prompts=30)

    lengths = [rendered_length(prompt, tokenizer) for prompt in prompts]
    assert len(prompts) == 30
    short, long = ([n for n in lengths if n <= limit] for limit in (600, 1500))
    assert min(lengths) > 400 and max(lengths) <= 1500
    assert len(short) >= 10 and sum(n > 1300 for n in long) >= 10
    assert prompts == document_prompts(documents, tokenizer, [600, 1500], num_prompts=30)
    assert prompts != document_prompts(documents, tokenizer, [600, 1500], num_prompts=30, seed=1)


def test_questions_are_about_something_named_once_and_early(library, tokenizer):
    prompts = document_prompts(read_documents([library]), tokenizer, [1600, 2400], num_prompts=40)
    kinds = Counter()
    for prompt in prompts:
        text, found, question = prompt.messages[0]["content"].partition("\n\n---\n\nThis is about the text above. ")
        assert found
        mark = question.split(question[min(i for i in map(question.find, "`'\"") if i >= 0)])[1]
        kind = "function" if f"def {mark}(" in text else "class" if f"class {mark}:" in text else "text"
        kinds[kind] += 1
        beginning = {"function": f"def {mark}(", "class": f"class {mark}:", "text": mark}[kind]
        assert text.count(beginning) == 1
        assert text.index(beginning) <= 0.6 * len(text)
    assert min(kinds[kind] for kind in ("function", "class", "text")) > 0


def test_without_a_number_documents_are_walked_through_once(library, tokenizer):
    (document,) = read_documents([library / "code.py"])
    prompts = document_prompts([document], tokenizer, [500])
    total = len(tokenizer(document.text)["input_ids"])
    assert total // 500 - 1 <= len(prompts) <= total // 500 + 1
    parts = [p.messages[0]["content"].partition("\n\n---")[0] for p in prompts]
    assert all(part.removeprefix("File: code.py\n\n") in document.text for part in parts)
    assert len(set(parts)) == len(parts)


def test_documents_that_will_not_do_are_refused(library, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="There is no document"):
        read_documents([tmp_path / "missing"])
    with pytest.raises(ValueError, match="Cannot read the document .*latin.txt"):
        read_documents([library / "latin.txt"])
    with pytest.raises(ValueError, match="looked for .md, .py"):
        read_documents([tmp_path])
    documents = read_documents([library])
    with pytest.raises(ValueError, match="fewer than a prompt of 1,000,000"):
        document_prompts(documents, tokenizer, [1_000_000])
    with pytest.raises(ValueError, match="1 to 1,000 tokens"):
        document_prompts(documents, tokenizer, [500, 1001], max_tokens=1000)
    (tmp_path / "numbers.txt").write_text("1 2 3\n" * 500)
    with pytest.raises(ValueError, match="nothing to ask about"):
        document_prompts(read_documents([tmp_path]), tokenizer, [500])


# Bad files

PROMPTS = [
    pytest.param('{"prompt": "a"', "not valid JSON", id="json"),
    pytest.param('"a"', "expected an object", id="text"),
    pytest.param('{"response": "b"}', "exactly one of", id="no-prompt"),
    pytest.param('{"prompt": 5}', "must be a text", id="number"),
    pytest.param('{"messages": [{"role": "assistant", "content": "x"}]}', "assistant messages only", id="assistant"),
    pytest.param('{"messages": [{"role": "user", "content": ["x"]}]}', '"content" of a message', id="content"),
    pytest.param('{"prompt": "a\\ud800"}', "surrogate pair at character 1", id="surrogate"),
]


@pytest.mark.parametrize("line, reason", PROMPTS)
def test_a_bad_prompt_is_named_with_its_line_and_reason(tmp_path, line, reason):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match="p.jsonl, line 3: .*" + reason):
        read_prompts(tmp_path / "p.jsonl")


def test_an_empty_prompt_file_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(tmp_path / "p.jsonl")


# The command


def test_a_disk_that_gets_full_ends_the_command_with_one_line(folder, tmp_path):
    asked = write_lines(tmp_path / "p.jsonl", *({"prompt": f"question {i}"} for i in range(40)))
    options = ["--target", folder, "--prompts", asked, "--output", tmp_path / "d.jsonl", "--max-new-tokens", 16]
    command = [sys.executable, "-m", "longspark_hf.cli", "data", "--batch-size", 2, "--max-repetition", 1, *options]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1500, 1500))  # written past, `EFBIG`
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, preexec_fn=limit)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert "Error: The disk or its quota is full (" in result.stderr


def test_the_command_prints_one_screen_or_json(folder, tmp_path):
    asked = write_lines(tmp_path / "p.jsonl", *(p.fields() for p in ASKED))
    arguments = ("data", "--target", folder, "--output", tmp_path / "d.jsonl", "--prompts", asked)
    arguments += ("--max-new-tokens", 12, "--num-samples", 5, "--temperatures", "1")

    result = longspark(*arguments)

    assert result.exit_code == 0, result.output
    assert "at temperature 1" in result.stdout and "cut off at 12 tokens" in result.stdout
    assert len(result.stdout.splitlines()) < 24
    report = json.loads(longspark(*arguments, "--json").stdout)
    assert report["prompts"] == 5 and report["kept"] == len(lines(tmp_path / "d.jsonl"))
    assert report["settings"]["target"] == str(folder)
    assert report["made_with"]["dtype"] == "float32"


def test_the_command_asks_about_documents_or_makes_up_prompts(folder, library, tmp_path):
    common = ("data", "--target", folder, "--max-new-tokens", 8, "--max-repetition", 1, "--json", "--device", "cpu")
    documents = ("--documents", library / "code.py", "--documents", library / "chapter0.md")
    result = longspark(
        *common, "--output", tmp_path / "long.jsonl", *documents, "--context-tokens", "400,900", "--num-samples", 4
    )
    assert result.exit_code == 0, result.output
    assert 4 * 400 * 0.6 < json.loads(result.stdout)["prompt_tokens"] / json.loads(result.stdout)["kept"] * 4 < 4 * 900

    result = longspark(*common, "--output", tmp_path / "own.jsonl", "--num-samples", 6, "--max-prompt-tokens", 30)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["prompts"] == 6


def test_the_command_names_what_is_wrong(folder, library, tmp_path):
    def run(*arguments, output=tmp_path / "d.jsonl"):
        return longspark("data", "--target", folder, "--output", output, *arguments)

    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"response": "a"}\n')
    assert_bad_input(run("--prompts", bad), "bad.jsonl, line 2", "exactly one of")
    assert_bad_input(run("--prompts", tmp_path / "missing.jsonl"), "missing.jsonl")
    assert_bad_input(run("--prompts", bad, "--documents", library), "not both")
    assert_bad_input(run("--temperatures", "0,hot"), "--temperatures", "0,hot")
    assert_bad_input(run("--documents", library, "--context-tokens", "1k"), "--context-tokens")
    assert_bad_input(run("--documents", library, "--context-tokens", "2000"), "--context-tokens", "1 to 1,536 tokens")
    assert_bad_input(run("--device", "nonsense"), "nonsense", "auto")
    assert_bad_input(run("--dtype", "int8"), "int8", "bfloat16")
    assert_bad_input(longspark("data", "--target", tmp_path / "none", "--output", tmp_path / "d.jsonl"), "none")
    assert longspark("data", "--target", folder).exit_code == 2
    assert not (tmp_path / "d.jsonl").exists()


def test_nothing_kept_exits_with_1(folder, tmp_path):
    asked = write_lines(tmp_path / "p.jsonl", {"prompt": " "})
    result = longspark("data", "--target", folder, "--output", tmp_path / "d.jsonl", "--prompts", asked)
    assert result.exit_code == 1
    assert "empty prompt" in result.stdout


def test_ctrl_c_says_how_to_go_on(folder, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("longspark_hf.training.synthesize.synthesize", interrupted)
    result = longspark("data", "--target", folder, "--output", tmp_path / "d.jsonl")
    assert result.exit_code == 130
    assert "d.jsonl. Run the same command again to go on" in result.stderr


def test_device_and_dtype_follow_the_machine():
    device, dtype = device_and_dtype("cpu")
    assert (device.type, dtype) == ("cpu", torch.float32)
    assert device_and_dtype("cpu", "bfloat16")[1] == torch.bfloat16
    expected = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    device, dtype = device_and_dtype()
    assert (device.type, dtype) == expected
