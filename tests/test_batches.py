"""Batches: every sequence of `target.generate(**batch, assistant_model=drafter)` is what it would be alone."""

import contextlib
import copy

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.streamers import BaseStreamer

from longspark_hf.rows_longspark import RaggedLayer, TargetRows

from .targets import (
    CACHE,
    MORE_TARGETS,
    TARGETS,
    VOCAB_SIZE,
    build,
    cache_of,
    interrupted,
    left_on,
    random_drafter,
    scripted_drafter,
)


NEW = 40
LENGTHS = [20, 9, 33, 1, 27, 14, 40, 5]
KINDS = {"oracle": None, "mixed": [3, 0, 7, 1, 5, 2, 6, 4]}


def make_batch(size, seed=7):
    """Prompts of different length, padded on the left; ids, mask and the prompts alone."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(2, 90, (length,), generator=generator) for length in LENGTHS[:size]]
    longest = max(map(len, prompts))
    ids, mask = torch.zeros(size, longest, dtype=torch.long), torch.zeros(size, longest, dtype=torch.long)
    for row, seen, prompt in zip(ids, mask, prompts):
        row[longest - len(prompt) :] = prompt
        seen[longest - len(prompt) :] = 1
    return {"input_ids": ids, "attention_mask": mask}, prompts


def alone(target, prompts, **options):
    """The new tokens of every prompt, generated plainly and alone."""
    outputs = [target.generate(p[None], do_sample=False, **({"max_new_tokens": NEW} | options)) for p in prompts]
    return [output[0, len(prompt) :] for output, prompt in zip(outputs, prompts)]


def make_drafter(kind, target, prompts, new_tokens):
    if kind == "random":
        return random_drafter(target)
    scripts = [torch.cat([prompt, new]) for prompt, new in zip(prompts, new_tokens)]
    return scripted_drafter(target, scripts, KINDS[kind])


def generate(target, batch, drafter=None, **options):
    return target.generate(**batch, assistant_model=drafter, **({"do_sample": False, "max_new_tokens": NEW} | options))


@pytest.fixture(scope="module")
def answers(built):
    """Prompts, batch and lone answers of eight sequences by target name."""
    made = {}

    def get(name, size):
        if name not in made:
            made[name] = alone(built(name), make_batch(8)[1])
        batch, prompts = make_batch(size)
        return batch, prompts, made[name][:size]

    return get


@pytest.mark.parametrize("kind", ["oracle", "random", "mixed"])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", TARGETS)
def test_every_sequence_is_what_it_is_alone(built, answers, name, size, kind):
    target = built(name)
    batch, prompts, expected = answers(name, size)
    drafter = make_drafter(kind, target, prompts, expected)
    output = generate(target, batch, drafter)
    assert torch.equal(output, torch.cat([batch["input_ids"], torch.stack(expected)], dim=1))
    if kind == "oracle":
        assert drafter.stats.mean_acceptance_length > 6
    assert left_on(target) == []


@pytest.mark.parametrize("name", MORE_TARGETS)
def test_other_architectures_in_batches(built, name):
    target = built(name)
    batch, prompts = make_batch(3)
    expected = alone(target, prompts)
    output = generate(target, batch, make_drafter("mixed", target, prompts, expected))
    assert torch.equal(output[:, batch["input_ids"].shape[1] :], torch.stack(expected))


@pytest.mark.parametrize("kind", ["oracle", "random", "mixed"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window-crossed"])
def test_sequences_end_one_by_one(built, answers, name, kind):
    target = built(name)
    batch, prompts, truth = answers(name, 8)
    eos = [int(truth[0][5]), int(truth[1][30]), int(truth[4][0])]
    expected = alone(target, prompts, eos_token_id=eos)
    lengths = [len(new) for new in expected]
    assert len(set(lengths)) >= 3 and 1 in lengths
    output = generate(
        target,
        batch,
        make_drafter(kind, target, prompts, truth),
        eos_token_id=eos,
        return_dict_in_generate=True,
    )
    plain = generate(target, batch, eos_token_id=eos, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain.sequences)
    for row, new in zip(output.sequences[:, batch["input_ids"].shape[1] :], expected):
        assert torch.equal(row[: len(new)], new) and bool((row[len(new) :] == 0).all())
    assert cache_of(output).get_seq_length() == cache_of(plain).get_seq_length()


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window-crossed"])
def test_the_cache_afterwards_holds_the_rows_of_plain_generation(built, answers, name):
    target = built(name)
    batch, prompts, truth = answers(name, 3)
    outputs = [
        generate(target, batch, drafter, return_dict_in_generate=True)
        for drafter in (None, make_drafter("mixed", target, prompts, truth))
    ]
    padding = torch.cat([batch["attention_mask"], torch.ones(3, NEW - 1)], dim=1) == 0
    for plain, ours in zip(cache_of(outputs[0]).layers, cache_of(outputs[1]).layers):
        assert type(plain) is type(ours) and plain.get_seq_length() == ours.get_seq_length()
        hidden = padding[:, None, -plain.keys.shape[2] :, None]
        for one, other in ((plain.keys, ours.keys), (plain.values, ours.values)):
            torch.testing.assert_close(one.masked_fill(hidden, 0), other.masked_fill(hidden, 0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_batch_goes_on_from_its_cache(built, answers, name):
    target = built(name)
    batch, prompts, truth = answers(name, 3)
    more = torch.randint(2, 90, (3, 6), generator=torch.Generator().manual_seed(3))
    results = []
    for drafter in (None, make_drafter("mixed", target, prompts, truth)):
        first = generate(target, batch, drafter, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, more], dim=1)
        mask = torch.cat([batch["attention_mask"], torch.ones(3, NEW + 6, dtype=torch.long)], dim=1)
        drafter = drafter and random_drafter(target)
        results.append(
            generate(target, {"input_ids": ids, "attention_mask": mask}, drafter, **{CACHE: cache_of(first)})
        )
    assert torch.equal(*results)


class StopAt(StoppingCriteria):
    """Fires for a sequence whose newest token is one of `ids`."""

    def __init__(self, ids):
        self.ids = torch.tensor(ids)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.ids)


class Counting(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        self.ended += 1


def rules(kind, token, length):
    """A stopping rule that fires at `token`, or after `length` tokens."""
    return {
        "eos-list": {"eos_token_id": [95, int(token)]},
        "custom": {"stopping_criteria": StoppingCriteriaList([StopAt([int(token)])])},
        "custom-and-eos": {
            "eos_token_id": 95,
            "stopping_criteria": StoppingCriteriaList([StopAt([int(token)])]),
        },
        "max-length": {"max_new_tokens": length},
        "max-time": {"max_time": 0.0, "eos_token_id": 95},
        "stop-string": {"stop_strings": [f"t{int(token):03d}"], "tokenizer": words(), "eos_token_id": 95},
    }[kind]


def words():
    """A tokenizer of one word for each id."""
    # transformers looks at how a tokenizer joins tokens to this word.
    vocabulary = {"abcdef" if i == 95 else f"t{i:03d}": i for i in range(VOCAB_SIZE)}
    model = WordLevel(vocabulary, unk_token="t000")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("position", range(1, 9))  # in the first block, and the first of the next
@pytest.mark.parametrize("kind", ["eos-list", "custom", "custom-and-eos", "max-length", "stop-string"])
def test_every_stopping_rule_fires_where_plain_generation_stops(qwen3, answers, kind, position, size):
    batch, prompts, truth = answers("qwen3", 4)
    batch = {name: value[:size] for name, value in batch.items()}
    options = rules(kind, truth[0][position], position) | {"return_dict_in_generate": True}
    results = []
    for drafter in (None, make_drafter("oracle", qwen3, prompts, truth), make_drafter("mixed", qwen3, prompts, truth)):
        streamer = Counting()
        output = generate(qwen3, batch, drafter, streamer=streamer, **options)
        flat = [token for put in streamer.tokens[1:] for token in torch.tensor(put).flatten().tolist()]
        results.append((output.sequences.tolist(), cache_of(output).get_seq_length(), flat, streamer.ended))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("size", [1, 4])
def test_a_time_limit_is_looked_at_from_the_first_token_on(qwen3, answers, size):
    batch, prompts, truth = answers("qwen3", 4)
    batch = {name: value[:size] for name, value in batch.items()}
    output = generate(qwen3, batch, make_drafter("oracle", qwen3, prompts, truth), **rules("max-time", 0, 0))
    assert output.shape[1] == batch["input_ids"].shape[1] + 1


def test_dict_output_has_the_shapes_of_plain_generation(qwen3, answers):
    batch, prompts, truth = answers("qwen3", 3)
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    plain = generate(qwen3, batch, **options)
    ours = generate(qwen3, batch, make_drafter("mixed", qwen3, prompts, truth), **options)
    assert len(plain.scores) == len(ours.scores) and len(plain.hidden_states) == len(ours.hidden_states)
    for one, other in zip(plain.scores + plain.logits, ours.scores + ours.logits):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    for step, (one, other) in enumerate(zip(plain.hidden_states, ours.hidden_states)):
        for mine, theirs in zip(one, other, strict=True):
            assert mine.shape == theirs.shape
            if step:
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}])
def test_processors_see_each_sequence_as_in_plain_generation(qwen3, answers, options):
    batch, prompts, truth = answers("qwen3", 4)
    options = options | {"eos_token_id": int(truth[0][3])}
    plain = generate(qwen3, batch, **options)
    assert torch.equal(generate(qwen3, batch, make_drafter("mixed", qwen3, prompts, truth), **options), plain)


def test_several_return_sequences_are_a_batch(qwen3, prompt):
    drafter = random_drafter(qwen3)
    output = qwen3.generate(
        prompt, assistant_model=drafter, do_sample=True, num_return_sequences=3, max_new_tokens=NEW
    )
    assert output.shape == (3, prompt.shape[1] + NEW)
    assert len({tuple(row.tolist()) for row in output}) == 3


def soft_target():
    """A target of 7 tokens whose distributions are far from one-sided, so that a wrong q would show."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=7,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.25,
        eos_token_id=None,
    )
    target = LlamaForCausalLM(config).eval()
    target.generation_config.pad_token_id = 0
    return target


def test_sampling_in_a_batch_is_lossless():
    target, vocabulary, size, calls = soft_target(), 7, 3, 4
    drafter = random_drafter(target, mask_token_id=0, window_size=4, block_size=3, initializer_range=0.5)
    prompts = [torch.tensor([1, 4, 2, 5]), torch.tensor([3]), torch.tensor([6, 2])]
    copies = 1500
    ids = torch.stack([torch.cat([torch.zeros(4 - len(p), dtype=torch.long), p]) for p in prompts])
    mask = torch.stack([torch.arange(4) >= 4 - len(p) for p in prompts]).long()
    options = {"do_sample": True, "temperature": 0.8, "top_k": 5, "max_new_tokens": 4}
    counts = torch.zeros(size, vocabulary**2)
    for _ in range(calls):
        output = target.generate(
            ids.repeat_interleave(copies, 0), attention_mask=mask.repeat_interleave(copies, 0),
            assistant_model=drafter, **options,
        )[:, 4:]  # fmt: skip
        pairs = (output[:, 1] * vocabulary + output[:, 2]).view(size, copies)
        for row, found in zip(counts, pairs):
            row += torch.bincount(found, minlength=vocabulary**2)
    assert 1.0 < drafter.stats.mean_acceptance_length < 3.9
    for prompt, row in zip(prompts, counts):
        expected = torch.zeros(vocabulary**2)
        first = processed(target, prompt[None])[0]
        for a, p in enumerate(first.tolist()):
            two = processed(target, torch.cat([prompt, torch.tensor([a])])[None])[0]
            for b, q in enumerate(two.tolist()):
                three = processed(target, torch.cat([prompt, torch.tensor([a, b])])[None])[0]
                expected[b * vocabulary : (b + 1) * vocabulary] += p * q * three
        expected = expected / expected.sum() * row.sum()
        likely = expected > 5
        observed = torch.cat([row[likely], row[~likely].sum()[None]]).double()
        wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]).double()
        assert wanted[-1] > 0 or observed[-1] == 0
        observed, wanted = observed[wanted > 0], wanted[wanted > 0]
        assert chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue > 1e-4


def processed(target, ids):
    """The distribution after `ids` at temperature 0.8 and top-k 5."""
    with torch.no_grad():
        logits = target(ids).logits[:, -1] / 0.8
    kept = logits.topk(5, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values).softmax(dim=-1)


class Boom(StoppingCriteria):
    def __init__(self, after, error):
        self.left, self.error = after, error

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("after", [0, 3, 30, 60])
def test_nothing_is_left_after_an_interrupted_batch(qwen3, answers, after, error):
    batch, prompts, truth = answers("qwen3", 3)
    streamer = Counting()
    with pytest.raises(type(error)):
        generate(
            qwen3,
            batch,
            make_drafter("mixed", qwen3, prompts, truth),
            stopping_criteria=StoppingCriteriaList([Boom(after, error)]),
            streamer=streamer,
        )
    assert streamer.ended == 1, "whoever reads from the streamer would wait for ever"
    assert left_on(qwen3) == []
    assert torch.equal(generate(qwen3, batch)[:, -NEW:], torch.stack(truth))


def test_what_cannot_progress_at_its_own_pace_is_refused(qwen3, answers):
    batch, _, _ = answers("qwen3", 2)
    drafter = random_drafter(qwen3)
    cache = StaticCache(config=qwen3.config, max_cache_len=128)
    with pytest.raises(ValueError, match="DynamicCache"):
        generate(qwen3, batch, drafter, **{CACHE: cache})
    with pytest.raises(ValueError, match="one sequence at a time"):
        generate(qwen3, batch, drafter, assistant_ensemble_weight=0.5)
    assert left_on(qwen3) == []


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_prefill_in_chunks_gives_the_same(built, answers, name, size):
    target = built(name)
    batch, prompts, truth = answers(name, 3)
    batch = {key: value[:size] for key, value in batch.items()}
    drafter = make_drafter("mixed", target, prompts, truth)
    whole = generate(target, batch, drafter)
    assert torch.equal(generate(target, batch, drafter, prefill_chunk_size=7), whole)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window-crossed"])
@pytest.mark.parametrize("size", [1, 3])
def test_the_views_after_a_prefill_in_chunks_are_those_of_a_single_pass(built, monkeypatch, name, size):
    target, drafter, states = built(name), random_drafter(built(name)), []
    draft = drafter.draft

    def watching(anchor_ids, position_ids, cache, *args, **kwargs):
        states.append(copy.deepcopy(cache))
        return draft(anchor_ids, position_ids, cache, *args, **kwargs)

    monkeypatch.setattr(drafter, "draft", watching)
    batch, firsts = make_batch(size)[0], []
    for options in ({}, {"prefill_chunk_size": 7}):
        states.clear()
        generate(target, batch, drafter, max_new_tokens=3, **options)
        firsts.append(states[0])
    torch.testing.assert_close(firsts[0].boundary, firsts[1].boundary)
    for whole, chunks in zip(firsts[0].layers, firsts[1].layers, strict=True):
        tensors = {key: value for key, value in vars(whole).items() if torch.is_tensor(value)}
        assert len(tensors) > 4
        for key, value in tensors.items():
            torch.testing.assert_close(vars(chunks)[key], value, msg=lambda text, key=key: f"{key}: {text}")


def test_eager_attention_takes_batches_too(answers):
    batch, prompts, truth = answers("gemma3", 3)
    target = build("gemma3")
    target.set_attn_implementation("eager")
    output = generate(target, batch, make_drafter("mixed", target, prompts, truth))
    assert torch.equal(output[:, -NEW:], torch.stack(truth))
    assert VOCAB_SIZE == target.config.vocab_size


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window-crossed"])
def test_a_batch_goes_on_after_some_sequences_ended(built, answers, name):
    target = built(name)
    batch, prompts, truth = answers(name, 4)
    eos = int(truth[0][5])
    more = torch.randint(2, 90, (4, 6), generator=torch.Generator().manual_seed(3))
    results = []
    for drafter in (None, make_drafter("mixed", target, prompts, truth)):
        first = generate(target, batch, drafter, eos_token_id=eos, return_dict_in_generate=True)
        new = first.sequences[:, batch["input_ids"].shape[1] :]
        mask = torch.cat([batch["attention_mask"], (new != 0).long(), torch.ones_like(more)], dim=1)
        again = {"input_ids": torch.cat([first.sequences, more], dim=1), "attention_mask": mask}
        results.append(generate(target, again, drafter and random_drafter(target), **{CACHE: cache_of(first)}))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["gemma3", "mistral-window-crossed"])
def test_a_users_cache_that_knows_nothing_of_windows(built, answers, name):
    target = built(name)
    batch, prompts, truth = answers(name, 3)
    output = generate(target, batch, make_drafter("mixed", target, prompts, truth), **{CACHE: DynamicCache()})
    assert torch.equal(output, generate(target, batch, **{CACHE: DynamicCache()}))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window-crossed"])
def test_a_users_cache_is_good_after_an_error(built, answers, name, size):
    target = built(name)
    batch, prompts, truth = answers(name, 3)
    batch = {key: value[:size] for key, value in batch.items()}
    said = torch.stack(truth[:size])[:, :15]
    ids = torch.cat([batch["input_ids"], said], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(said)], dim=1)
    for kind, after in (("mixed", 4), ("oracle", 9), ("random", 11)):
        cache = DynamicCache(config=target.config)
        with pytest.raises(RuntimeError, match="boom"):
            drafter = make_drafter(kind, target, prompts, truth)
            stop = StoppingCriteriaList([Boom(after * size, RuntimeError("boom"))])
            generate(target, batch, drafter, stopping_criteria=stop, **{CACHE: cache})
        output = generate(target, {"input_ids": ids, "attention_mask": mask}, max_new_tokens=8, **{CACHE: cache})
        assert torch.equal(output[:, ids.shape[1] :], torch.stack(truth[:size])[:, 15:23])


@pytest.mark.parametrize("line", range(1, 20))
def test_an_interrupt_on_the_way_into_rows_leaves_the_cache(qwen3, line):
    cache = DynamicCache(config=qwen3.config)
    qwen3(torch.randint(2, 90, (2, 9)), **{CACHE: cache})
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    with contextlib.suppress(KeyboardInterrupt), interrupted(TargetRows.__enter__, line) as stop:
        with TargetRows(qwen3, cache):
            stop()
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert type(layer) is DynamicLayer
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


@pytest.mark.parametrize("fails", ["arrange", "second buffer"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_no_memory_in_the_target_cache_leaves_a_good_one(built, answers, name, fails, monkeypatch):
    target = built(name)
    batch, prompts, truth = answers(name, 3)
    cache, drafter = DynamicCache(config=target.config), make_drafter("mixed", target, prompts, truth)
    if fails == "arrange":
        # One sequence ends early and steps aside; on the way out it cannot be put back.
        stop, original = [], RaggedLayer.arrange

        def arrange(layer, swaps):
            if swaps and stop:
                raise torch.OutOfMemoryError("no memory")
            return original(layer, swaps)

        monkeypatch.setattr(RaggedLayer, "arrange", arrange)
        monkeypatch.setattr(TargetRows, "_restore_order", swapping(TargetRows._restore_order, stop))
    else:
        # A layer makes new buffers that begin later, and there is memory for one of them only.
        grow, new_zeros, made = RaggedLayer._grow, torch.Tensor.new_zeros, []

        def growing(layer, start, *args):
            made.append(0 if start > layer.first or name == "qwen3" else -9)
            return grow(layer, start, *args)

        def making(tensor, *args, **kwargs):
            made[-1] += 1
            if made[-1] == 2:
                raise torch.OutOfMemoryError("no memory")
            return new_zeros(tensor, *args, **kwargs)

        monkeypatch.setattr(RaggedLayer, "_grow", growing)
        monkeypatch.setattr(torch.Tensor, "new_zeros", making)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        ends = {"eos_token_id": int(truth[0][4])} if fails == "arrange" else {}
        generate(target, batch, drafter, max_new_tokens=NEW, **ends, **{CACHE: cache})
    monkeypatch.undo()
    assert {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    if cache.get_seq_length():  # what is there is what plain `generate` has: the longest prompt has no padding
        alone = torch.cat([prompts[2], truth[2]])[None, : cache.get_seq_length()]
        plain = DynamicCache(config=target.config)
        target(alone, **{CACHE: plain})
        for layer, expected in zip(cache.layers, plain.layers, strict=True):
            held = min(layer.keys.shape[2], expected.keys.shape[2])
            torch.testing.assert_close(layer.keys[2:, :, -held:], expected.keys[:, :, -held:], atol=1e-4, rtol=1e-4)
    # One token more than the cache still holds: a plain call goes on from there.
    known = max(int(cache.get_seq_length()) + 1 - batch["input_ids"].shape[1], 0)
    said = torch.stack(truth)[:, :known]
    ids = torch.cat([batch["input_ids"], said], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(said)], dim=1)
    output = generate(target, {"input_ids": ids, "attention_mask": mask}, max_new_tokens=4, **{CACHE: cache})
    assert torch.equal(output[:, ids.shape[1] :], torch.stack(truth)[:, known : known + 4])


def swapping(restore, stop):
    """A [`TargetRows._restore_order`] that says when it begins."""

    def restoring(rows):
        stop.append(1)
        return restore(rows)

    return restoring


def test_an_interrupt_in_the_prefill_of_a_filled_sliding_cache(built):
    target = built("gemma3")
    ids = torch.randint(2, 90, (1, 60))
    cache = DynamicCache(config=target.config)
    generate(target, {"input_ids": ids[:, :50]}, max_new_tokens=1, **{CACHE: cache})

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = target.get_decoder().layers[4].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(target, {"input_ids": ids}, random_drafter(target), max_new_tokens=4, **{CACHE: cache})
    handle.remove()
    expected = generate(target, {"input_ids": ids}, max_new_tokens=8)
    assert torch.equal(generate(target, {"input_ids": ids}, max_new_tokens=8, **{CACHE: cache}), expected)


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_kept_of_a_pass_does_not_hold_the_whole_pass(qwen3, size):
    held = []

    class Watching(StoppingCriteria):
        def __call__(self, ids, scores, **_):
            held.append(max(row.untyped_storage().nbytes() for row in scores))
            return torch.zeros(len(ids), dtype=torch.bool)

    batch, _ = make_batch(size)
    criteria = StoppingCriteriaList([Watching()])
    options = {"stopping_criteria": criteria, "return_dict_in_generate": True, "output_scores": True}
    generate(qwen3, batch, random_drafter(qwen3), **options)
    assert set(held) == {4 * VOCAB_SIZE}


def test_positions_on_several_axes_keep_their_distance(built, answers, monkeypatch):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, eos_token_id=None, pad_token_id=0)
    target = Qwen2_5_VLForConditionalGeneration(config).eval()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    batch, prompts = make_batch(2)
    text_positions = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    batch["position_ids"] = torch.stack([text_positions, *[text_positions // 2] * 3])
    plain = generate(target, batch)
    assert torch.equal(generate(target, batch, random_drafter(target)), plain)


def test_constraints_know_their_place_in_the_batch(qwen3):
    batch, prompts = make_batch(3)
    columns = batch["input_ids"].shape[1]
    scripts = [[5, 9, 33, 17, 4], [8, 40, 4], [6, 7, 8, 9, 10, 4]]

    def allowed(place, ids):
        said = ids[columns:].tolist()
        if said[-1:] == [4] or 0 in said:
            return [0]
        return [scripts[place][len(said)]] if said == scripts[place][: len(said)] else []

    output = generate(qwen3, batch, random_drafter(qwen3), prefix_allowed_tokens_fn=allowed, eos_token_id=4)
    for row, script in zip(output[:, columns:].tolist(), scripts):
        assert row[: len(script)] == script and not any(row[len(script) :])


@pytest.mark.parametrize("size", [1, 3])
def test_odd_criteria_act_as_in_plain_generation(qwen3, answers, size):
    batch, prompts, truth = answers("qwen3", 3)
    batch = {name: value[:size] for name, value in batch.items()}
    length = batch["input_ids"].shape[1]
    for criterion in (lambda ids, scores, **_: torch.tensor([False]), MaxLengthCriteria(length - 1)):
        options = {"stopping_criteria": StoppingCriteriaList([criterion])}
        plain = generate(qwen3, batch, **options)
        assert torch.equal(generate(qwen3, batch, make_drafter("mixed", qwen3, prompts, truth), **options), plain)


def test_padded_embeddings_of_a_batch(qwen3, answers):
    batch, prompts, truth = answers("qwen3", 3)
    embeds = {
        "inputs_embeds": qwen3.get_input_embeddings()(batch["input_ids"]).detach(),
        "attention_mask": batch["attention_mask"],
    }
    output = generate(qwen3, embeds, make_drafter("mixed", qwen3, prompts, truth))
    assert torch.equal(output, torch.stack(truth))


def test_attentions_have_the_shapes_of_plain_generation():
    target = build("gemma3")
    target.set_attn_implementation("eager")
    batch, prompts = make_batch(1)
    options = {"output_attentions": True, "return_dict_in_generate": True}
    plain, ours = (generate(target, batch, drafter, **options) for drafter in (None, random_drafter(target)))
    for one, other in zip(plain.attentions, ours.attentions, strict=True):
        assert [layer.shape for layer in one] == [layer.shape for layer in other]
        for mine, theirs in zip(one, other):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
