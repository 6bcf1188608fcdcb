"""`target.generate(..., assistant_model=drafter)` at batch 1 gives what plain `generate` gives, whatever is asked of it."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DynamicCache,
    EosTokenCriteria,
    Gemma3TextConfig,
    Glm4Config,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from longspark_hf import LongSparkConfig, LongSparkDrafter, install, uninstall

from .targets import (
    CACHE,
    FULL_ATTENTION,
    MORE_TARGETS,
    TARGETS,
    VOCAB_SIZE,
    build,
    cache_of,
    left_on,
    random_drafter,
    scripted_drafter,
    tiny,
)


NEW = 24
needs_static_rollback = pytest.mark.skipif(
    not StaticLayer.is_croppable, reason="static caches cannot be rolled back before transformers 5.24"
)
STOCK = 1 - 1e-9  # an `assistant_ensemble_weight` that changes nothing but the loop
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


def generate(target, input_ids=None, drafter=None, **kwargs):
    return target.generate(input_ids, assistant_model=drafter, **(GREEDY | kwargs))


def make_drafter(kind, target, truth):
    if kind == "random":
        return random_drafter(target)
    wrong_at = {"oracle": None, "adversary": [0], "mixed": [3, 0, 7, 1, 5, 2, 6, 4]}[kind]
    return scripted_drafter(target, truth[0], wrong_at)


@pytest.fixture(scope="module")
def plain_200(built):
    """Plain greedy generation of 200 tokens by target name, each made once."""
    made, prompt = {}, torch.randint(2, 90, (1, 20), generator=torch.Generator().manual_seed(7))

    def get(name):
        if name not in made:
            made[name] = generate(built(name), prompt, max_new_tokens=200, return_dict_in_generate=True)
        return made[name]

    return get


@pytest.mark.parametrize("kind", ["random", "oracle", "adversary", "mixed"])
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_output_and_cache_length_are_the_targets(built, plain_200, prompt, name, kind):
    target, plain = built(name), plain_200(name)
    drafter = make_drafter(kind, target, plain.sequences)
    assisted = generate(target, prompt, drafter, max_new_tokens=200, return_dict_in_generate=True)
    assert torch.equal(assisted.sequences, plain.sequences)
    assert cache_of(assisted).get_seq_length() == cache_of(plain).get_seq_length()
    assert drafter.stats.tokens == 199
    if kind == "oracle":
        assert drafter.stats.rounds == 25 and drafter.stats.accepted_by_position[0] == 25
    if kind == "adversary":
        assert drafter.stats.mean_acceptance_length == 1.0
    assert left_on(target) == []


@needs_static_rollback
@pytest.mark.parametrize("kind", ["random", "oracle", "adversary", "mixed"])
@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_greedy_output_is_the_targets_on_a_static_cache(built, plain_200, prompt, name, kind):
    target, plain = built(name), plain_200(name).sequences
    drafter = make_drafter(kind, target, plain)
    length = prompt.shape[1] + 200
    output = generate(
        target, prompt, drafter, max_new_tokens=200, cache_implementation="static", return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain)
    assert int(cache_of(output).get_seq_length()) == length - 1


@pytest.mark.parametrize(
    "without", [("window_size",), ("num_summary_queries",), ("window_size", "num_summary_queries")]
)
def test_a_drafter_without_some_of_its_views_leaves_the_output_alone(qwen3, prompt, without):
    plain = generate(qwen3, prompt)
    drafter = random_drafter(qwen3, **dict.fromkeys(without, 0))
    cache = DynamicCache(config=qwen3.config)
    assert torch.equal(generate(qwen3, prompt, drafter, **{CACHE: cache}), plain)
    longer = torch.cat([plain, prompt], dim=1)
    assert torch.equal(generate(qwen3, longer, drafter, **{CACHE: cache}), generate(qwen3, longer))
    assert drafter.stats.state_bytes == drafter.config.state_bytes(torch.float32)


@pytest.mark.parametrize("name", MORE_TARGETS)
def test_other_architectures_pass_through_the_same_accessors(built, prompt, name):
    target = built(name)
    plain = generate(target, prompt)
    for kind in ("random", "mixed"):
        assert torch.equal(generate(target, prompt, make_drafter(kind, target, plain)), plain)
    assert left_on(target) == []


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7, 8, 9, 10, 16, 17])
def test_every_output_length_is_exact_to_the_token(qwen3, prompt, max_new_tokens):
    truth = generate(qwen3, prompt)
    for kind in ("oracle", "adversary"):
        drafter = make_drafter(kind, qwen3, truth)
        output = generate(qwen3, prompt, drafter, max_new_tokens=max_new_tokens)
        assert torch.equal(output, truth[:, : prompt.shape[1] + max_new_tokens])
        assert drafter.stats.tokens == max_new_tokens - 1


@pytest.mark.parametrize("position", range(1, 12))
def test_eos_at_any_place_in_a_block_ends_the_output_there(qwen3, prompt, position):
    truth = generate(qwen3, prompt)
    eos = int(truth[0, prompt.shape[1] + position])
    plain = generate(qwen3, prompt, eos_token_id=eos, return_dict_in_generate=True)
    for kind in ("oracle", "mixed"):
        drafter = make_drafter(kind, qwen3, truth)
        output = generate(qwen3, prompt, drafter, eos_token_id=eos, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain.sequences)
        assert cache_of(output).get_seq_length() == cache_of(plain).get_seq_length()
        assert drafter.stats.tokens == plain.sequences.shape[1] - prompt.shape[1] - 1


PROCESSORS = {
    "min_new_tokens": {"min_new_tokens": 20},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5], [6, 7], [40]]},
    "suppress": {"suppress_tokens": list(range(10, 50))},
    "forced_eos": {"forced_eos_token_id": 3},
    "prefix": {"prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) * 7 + k) % 90 for k in range(5)]},
}


@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("kind", ["random", "oracle"])
def test_logits_processors_act_as_in_plain_generation(qwen3, prompt, kind, options):
    eos = int(generate(qwen3, prompt)[0, prompt.shape[1] + 4])
    options = options | {"eos_token_id": eos}
    plain = generate(qwen3, prompt, **options)
    drafter = make_drafter(kind, qwen3, plain)
    assert torch.equal(generate(qwen3, prompt, drafter, **options), plain)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", ["random", "oracle"])
def test_a_constraint_is_never_asked_about_what_cannot_be(qwen3, prompt, kind, do_sample):
    answer = [5, 9, 33, 17, 8, 40, 4]

    def allowed(_batch, ids):
        said = ids[prompt.shape[1] :].tolist()
        if said != answer[: len(said)] or len(said) == len(answer):
            raise KeyError(f"asked after {said}")
        return [answer[len(said)]]

    options = {"prefix_allowed_tokens_fn": allowed, "eos_token_id": 4, "do_sample": do_sample}
    truth = torch.cat([prompt, torch.tensor([answer])], dim=1)
    assert torch.equal(generate(qwen3, prompt, make_drafter(kind, qwen3, truth), **options), truth)


@pytest.mark.parametrize("options", [{"eta_cutoff": 1e-3}, {"epsilon_cutoff": 1e-3}, {"typical_p": 0.9}])
def test_processors_never_see_a_draft_that_has_no_token_left(qwen3, prompt, options):
    drafter = random_drafter(qwen3)
    drafter.set_draft_vocabulary(torch.arange(50, 97))
    output = generate(qwen3, prompt, drafter, do_sample=True, suppress_tokens=list(range(50, 97)), **options)
    assert output.shape[1] == prompt.shape[1] + NEW and bool((output[:, prompt.shape[1] :] < 50).all())
    drafter = random_drafter(qwen3)
    drafter.markov_head.w2.weight.data[:] = torch.nan
    generate(qwen3, prompt, drafter, do_sample=True, **options)
    assert drafter.stats.mean_acceptance_length == 1.0


class StopAfter(StoppingCriteria):
    """Fires when the last token is one of `ids`."""

    def __init__(self, ids):
        self.ids = torch.tensor(ids)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.ids)


@pytest.mark.parametrize("position", range(1, 12))
@pytest.mark.parametrize("kind", ["oracle", "mixed"])
def test_custom_stopping_criteria_stop_at_the_same_token(qwen3, prompt, kind, position):
    truth = generate(qwen3, prompt)
    criteria = StoppingCriteriaList([StopAfter([int(truth[0, prompt.shape[1] + position])])])
    plain = generate(qwen3, prompt, stopping_criteria=criteria, return_dict_in_generate=True)
    drafter = make_drafter(kind, qwen3, truth)
    output = generate(qwen3, prompt, drafter, stopping_criteria=criteria, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain.sequences)
    assert cache_of(output).get_seq_length() == cache_of(plain).get_seq_length()


@pytest.mark.parametrize("kind", ["random", "oracle", "mixed"])
def test_length_and_eos_criteria_of_the_user_stop_as_in_plain_generation(qwen3, prompt, kind):
    truth = generate(qwen3, prompt)
    for criterion in (MaxLengthCriteria(26), EosTokenCriteria(int(truth[0, 23])), EosTokenCriteria([3, 4])):
        criteria = StoppingCriteriaList([criterion])
        plain = generate(qwen3, prompt, stopping_criteria=criteria)
        assert torch.equal(
            generate(qwen3, prompt, make_drafter(kind, qwen3, truth), stopping_criteria=criteria), plain
        )


class StopAtCall(StoppingCriteria):
    """Counts the tokens it was shown, and keeps what it saw."""

    def __init__(self, calls):
        self.calls, self.shown = calls, []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(int(input_ids[0, -1]))
        return torch.full((input_ids.shape[0],), len(self.shown) >= self.calls)


@pytest.mark.parametrize("kind", ["random", "oracle", "mixed", "adversary"])
@pytest.mark.parametrize("calls", [1, 2, 9, 10])
def test_criteria_that_count_see_every_committed_token_once(qwen3, prompt, kind, calls):
    truth, criterion = generate(qwen3, prompt), StopAtCall(calls)
    output = generate(
        qwen3, prompt, make_drafter(kind, qwen3, truth), stopping_criteria=StoppingCriteriaList([criterion])
    )
    assert torch.equal(output, truth[:, : prompt.shape[1] + calls])
    assert criterion.shown == truth[0, prompt.shape[1] :][:calls].tolist()


class StopWhenSure(StoppingCriteria):
    """Reads the scores of the newest token."""

    def __init__(self, threshold):
        self.threshold = threshold

    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].amax(dim=-1) > self.threshold


def test_criteria_that_read_scores_get_those_of_plain_generation(qwen3, prompt):
    options = {"return_dict_in_generate": True, "output_scores": True}
    sure = sorted(float(score.amax()) for score in generate(qwen3, prompt, **options).scores[3:])[-3]
    options["stopping_criteria"] = StoppingCriteriaList([StopWhenSure(sure + 1e-3)])
    plain = generate(qwen3, prompt, **options).sequences
    assert prompt.shape[1] < plain.shape[1] < prompt.shape[1] + NEW
    assert torch.equal(generate(qwen3, prompt, random_drafter(qwen3), **options).sequences, plain)


class Uncopyable(StopAtCall):
    def __deepcopy__(self, memo):
        raise TypeError("not me")


def test_criteria_that_cannot_be_copied_are_served_too(qwen3, prompt):
    truth = generate(qwen3, prompt)
    drafter = make_drafter("oracle", qwen3, truth)
    output = generate(qwen3, prompt, drafter, stopping_criteria=StoppingCriteriaList([Uncopyable(10)]))
    assert torch.equal(output, truth[:, : prompt.shape[1] + 10])
    assert drafter.stats.mean_acceptance_length > 4


class Recorder(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


def test_streamers_receive_every_token_once(qwen3, prompt):
    truth = generate(qwen3, prompt)
    recorder = Recorder()
    generate(qwen3, prompt, make_drafter("mixed", qwen3, truth), streamer=recorder)
    assert recorder.tokens == truth[0].tolist() and recorder.ended == 1


@pytest.mark.parametrize("kind", ["random", "mixed"])
def test_dict_output_has_plain_scores_logits_and_hidden_states(qwen3, prompt, kind):
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "repetition_penalty": 1.3,
        "max_new_tokens": 20,
    }
    plain = generate(qwen3, prompt, **options)
    output = generate(qwen3, prompt, make_drafter(kind, qwen3, plain.sequences), **options)
    for field in ("scores", "logits"):
        assert len(output[field]) == len(plain[field]) == 20
        for ours, theirs in zip(output[field], plain[field], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert len(output.hidden_states) == len(plain.hidden_states)
    for ours, theirs in zip(output.hidden_states, plain.hidden_states, strict=True):
        for layer_ours, layer_theirs in zip(ours, theirs, strict=True):
            torch.testing.assert_close(layer_ours, layer_theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_left_padding_changes_nothing(built, prompt, name):
    target = built(name)
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(29) >= 9).long()[None]
    plain = generate(target, padded, attention_mask=mask, return_dict_in_generate=True)
    for kind in ("random", "mixed"):
        # Positions do not count padding, so a script by position starts at the first real token.
        drafter = make_drafter(kind, target, plain.sequences[:, 9:])
        output = generate(target, padded, drafter, attention_mask=mask, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain.sequences)
        assert cache_of(output).get_seq_length() == cache_of(plain).get_seq_length()
        state, _, rows = cache_of(output).longspark_state
        assert rows == 9 + 20 + NEW - 1 and state.get_seq_length() == rows - 9


@pytest.mark.parametrize("name", TARGETS)
def test_a_prompt_of_one_token(built, name):
    target, prompt = built(name), torch.tensor([[5]])
    plain = generate(target, prompt)
    for kind in ("random", "mixed"):
        assert torch.equal(generate(target, prompt, make_drafter(kind, target, plain)), plain)


def test_inputs_embeds_in_place_of_ids(qwen3, prompt):
    embeds = qwen3.get_input_embeddings()(prompt)
    plain = generate(qwen3, inputs_embeds=embeds)
    truth = torch.cat([prompt, plain], dim=1)
    for kind in ("random", "mixed"):
        drafter = make_drafter(kind, qwen3, truth)
        assert torch.equal(generate(qwen3, inputs_embeds=embeds, drafter=drafter), plain)
        assert drafter.stats.tokens == NEW - 1


@needs_static_rollback
def test_inputs_embeds_on_a_static_cache(qwen3, prompt):
    embeds = qwen3.get_input_embeddings()(prompt)
    plain = generate(qwen3, inputs_embeds=embeds)
    for kind in ("random", "mixed"):
        drafter = make_drafter(kind, qwen3, torch.cat([prompt, plain], dim=1))
        static = generate(qwen3, inputs_embeds=embeds, drafter=drafter, cache_implementation="static")
        assert torch.equal(static, plain)


def test_padded_inputs_embeds(qwen3, prompt):
    padded = {
        "inputs_embeds": qwen3.get_input_embeddings()(prompt).detach(),
        "attention_mask": (torch.arange(20) >= 4).long()[None],
    }
    plain = generate(qwen3, **padded)
    assert torch.equal(generate(qwen3, drafter=random_drafter(qwen3), **padded), plain)
    with pytest.raises(ValueError, match="drop the padded"):  # by the loop of transformers, which would cut the mask
        generate(qwen3, drafter=random_drafter(qwen3), assistant_ensemble_weight=STOCK, **padded)
    assert left_on(qwen3) == []


@pytest.mark.parametrize("position", [1, 4, 8])
@pytest.mark.parametrize("kind", ["random", "oracle", "mixed"])
def test_the_loop_of_transformers_serves_what_ours_does_not(qwen3, prompt, kind, position):
    truth = generate(qwen3, prompt)
    drafter, token = make_drafter(kind, qwen3, truth), int(truth[0, prompt.shape[1] + position])
    for rule in (
        {},
        {"eos_token_id": token},
        {"stopping_criteria": StoppingCriteriaList([StopAfter([token])])},
        {"repetition_penalty": 1.2},
    ):
        plain = generate(qwen3, prompt, return_dict_in_generate=True, **rule)
        output = generate(
            qwen3, prompt, drafter, return_dict_in_generate=True, assistant_ensemble_weight=STOCK, **rule
        )
        assert torch.equal(output.sequences, plain.sequences)
        assert cache_of(output).get_seq_length() == cache_of(plain).get_seq_length()
    assert drafter.stats.rounds > 0 and left_on(qwen3) == []


@pytest.mark.parametrize("num_assistant_tokens", [0, 1, 3, 7, 50])
def test_num_assistant_tokens_caps_the_draft_of_this_call(qwen3, prompt, num_assistant_tokens):
    truth = generate(qwen3, prompt)
    drafter = make_drafter("oracle", qwen3, truth)
    output = generate(qwen3, prompt, drafter, num_assistant_tokens=num_assistant_tokens)
    assert torch.equal(output, truth)
    per_round = min(num_assistant_tokens, 7) + 1
    assert drafter.stats.rounds == -(-(NEW - 1) // per_round)
    generate(qwen3, prompt, drafter)
    assert drafter.stats.rounds == 3


def test_a_drafter_in_another_dtype_changes_nothing(qwen3, prompt):
    truth = generate(qwen3, prompt)
    drafter = random_drafter(qwen3).to(torch.bfloat16)
    output = generate(qwen3, prompt, drafter, return_dict_in_generate=True)
    assert torch.equal(output.sequences, truth)
    state = cache_of(output).longspark_state[0]
    assert state.layers[0].keys.dtype == torch.bfloat16 and state.layers[0].summary_lse.dtype == torch.float32
    assert drafter.stats.state_bytes == drafter.config.state_bytes(torch.bfloat16)


def test_sampling_is_reproducible_by_seed(qwen3, prompt):
    drafter = random_drafter(qwen3)
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(generate(qwen3, prompt, drafter, do_sample=True, temperature=0.9, top_k=20, top_p=0.9))
    assert torch.equal(*outputs)


def test_a_sampled_oracle_is_accepted_only_as_often_as_the_target_agrees(qwen3, prompt):
    truth = generate(qwen3, prompt)
    drafter = make_drafter("oracle", qwen3, truth)
    output = generate(qwen3, prompt, drafter, do_sample=True, temperature=1e-4)
    assert torch.equal(output, truth) and drafter.stats.rounds == 3


# Filled caches


def chat(target, drafter, turns, **kwargs):
    """Several turns on one cache, every call given the whole conversation; the conversation after each turn."""
    cache, ids, after = DynamicCache(config=target.config.get_text_config()), torch.empty(1, 0, dtype=torch.long), []
    for turn in turns:
        ids = torch.cat([ids, turn], dim=1)
        ids = generate(target, ids, drafter, **{CACHE: cache}, **kwargs)
        after.append((ids, cache.get_seq_length()))
    return after


def turns():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 90, (1, length), generator=generator) for length in (30, 1, 12)]


@pytest.mark.parametrize("kind", ["random", "mixed"])
@pytest.mark.parametrize("name", TARGETS)
def test_a_chat_on_one_cache_equals_plain_turn_by_turn(built, name, kind):
    target = built(name)
    plain = chat(target, None, turns())
    drafter = make_drafter(kind, target, plain[-1][0])
    for ours, theirs in zip(chat(target, drafter, turns()), plain, strict=True):
        assert torch.equal(ours[0], theirs[0]) and ours[1] == theirs[1]
    assert left_on(target) == []


def count_rows(target):
    """A list that collects how many rows each pass of the target processes, and the handle to stop it."""
    rows = []
    handle = (
        target.get_decoder()
        .layers[0]
        .register_forward_hook(lambda m, a, out: rows.append((out[0] if isinstance(out, tuple) else out).shape[1]))
    )
    return rows, handle


def test_later_turns_process_new_tokens_only(qwen3):
    drafter = random_drafter(qwen3)
    rows, handle = count_rows(qwen3)
    chat(qwen3, drafter, turns(), max_new_tokens=1)
    handle.remove()
    # Turn 1: 30; its answer (1 token, not yet processed) and the next turn's tokens come in turns 2 and 3.
    assert rows == [30, 2, 13]


def test_the_state_of_the_last_turn_is_continued(qwen3, monkeypatch):
    drafter = random_drafter(qwen3)
    absorbed = []
    import longspark_hf.tap_longspark as tap

    original = tap.fold_rows if hasattr(tap, "fold_rows") else None
    assert original is None  # folding happens in the cache layer; count rows there
    from longspark_hf.cache_longspark import LongSparkCacheLayer

    update = LongSparkCacheLayer.update
    monkeypatch.setattr(
        LongSparkCacheLayer,
        "update",
        lambda self, keys, *args: (absorbed.append(keys.shape[2]), update(self, keys, *args))[1],
    )
    after = chat(qwen3, drafter, turns())
    layers = drafter.config.num_hidden_layers
    assert sum(absorbed) == after[-1][1] * layers  # every row once, none folded again in a later turn


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_only_the_new_tokens_with_a_full_mask(built, prompt, name):
    target, results = built(name), []
    for drafter in (None, random_drafter(target)):
        cache = DynamicCache(config=target.config)
        ids = generate(target, prompt, drafter, **{CACHE: cache})
        new = torch.cat([ids[:, cache.get_seq_length() :], torch.tensor([[11, 12, 13, 14]])], dim=1)
        mask = torch.ones(1, cache.get_seq_length() + new.shape[1], dtype=torch.long)
        results.append(generate(target, new, drafter, **{CACHE: cache}, attention_mask=mask))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_only_the_new_tokens_behind_a_padded_prompt(built, prompt, name):
    target, results = built(name), []
    padding = (torch.arange(prompt.shape[1]) >= 4).long()[None]
    for drafter in (None, random_drafter(target)):
        cache = DynamicCache(config=target.config)
        ids = generate(target, prompt, drafter, **{CACHE: cache}, attention_mask=padding)
        new = torch.cat([ids[:, cache.get_seq_length() :], torch.tensor([[11, 12, 13, 14]])], dim=1)
        more = cache.get_seq_length() + new.shape[1] - padding.shape[1]
        mask = torch.cat([padding, padding.new_ones(1, more)], dim=1)
        results.append(generate(target, new, drafter, **{CACHE: cache}, attention_mask=mask))
    assert torch.equal(*results)
    with pytest.raises(ValueError, match="ids of the whole conversation"):  # by the loop of transformers
        mask = torch.cat([mask, mask.new_ones(1, cache.get_seq_length() + 1 - mask.shape[1])], dim=1)
        generate(
            target,
            torch.tensor([[11]]),
            drafter,
            **{CACHE: cache},
            attention_mask=mask,
            assistant_ensemble_weight=STOCK,
        )


@pytest.mark.parametrize("kind", ["random", "mixed"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window-crossed"])
@torch.no_grad()
def test_many_questions_on_a_deep_copied_document_cache(built, name, kind):
    target = built(name)
    document = torch.randint(2, 90, (1, 60), generator=torch.Generator().manual_seed(2))
    cache = DynamicCache(config=target.config)
    target(document, **{CACHE: cache}) if kind == "random" else None
    if kind == "mixed":
        generate(target, document, random_drafter(target), **{CACHE: cache}, max_new_tokens=1)
    for question in ([[7, 8, 9]], [[20]], [[33, 34]]):
        ids = torch.cat([document, torch.tensor(question)], dim=1)
        plain = generate(target, ids)
        drafter = make_drafter(kind, target, plain)
        copied = copy.deepcopy(cache)
        assert torch.equal(generate(target, ids, drafter, **{CACHE: copied}), plain)
        assert cache.get_seq_length() == 60


@torch.no_grad()
def test_a_state_of_the_first_layer_only_is_not_trusted(qwen3):
    drafter = random_drafter(qwen3, target_layer_ids=[0])
    cache, ids = DynamicCache(config=qwen3.config), torch.randint(2, 90, (1, 80))
    generate(qwen3, ids, drafter, **{CACHE: cache}, max_new_tokens=1)
    cache.crop(-80)
    other = torch.cat([torch.randint(2, 90, (1, 20)), ids[:, 20:]], dim=1)  # the same recent keys, another beginning
    qwen3(other, **{CACHE: cache})
    more = torch.cat([other, torch.tensor([[4]])], dim=1)
    generate(qwen3, more, drafter, **{CACHE: cache}, max_new_tokens=1)
    reference = generate(qwen3, more, drafter, max_new_tokens=1, return_dict_in_generate=True)
    ours, theirs = cache.longspark_state[0].layers[0], cache_of(reference).longspark_state[0].layers[0]
    torch.testing.assert_close(ours.summary_values, theirs.summary_values, atol=1e-5, rtol=1e-5)


def test_a_cropped_and_refilled_cache_gets_a_fresh_state(qwen3, prompt):
    drafter = random_drafter(qwen3)
    cache = DynamicCache(config=qwen3.config)
    ids = generate(qwen3, prompt, drafter, **{CACHE: cache})
    cache.crop(-15)
    other = torch.cat([ids[:, :-16], torch.randint(2, 90, (1, 15))], dim=1)
    qwen3(other[:, -15:], **{CACHE: cache})  # same length as before, another content
    other = torch.cat([other, torch.tensor([[9]])], dim=1)
    output = generate(qwen3, other, drafter, **{CACHE: cache}, return_dict_in_generate=True)
    reference = generate(qwen3, other, drafter, return_dict_in_generate=True)
    assert torch.equal(output.sequences, reference.sequences)
    for ours, theirs in zip(
        cache_of(output).longspark_state[0].layers, cache_of(reference).longspark_state[0].layers, strict=True
    ):
        torch.testing.assert_close(ours.summary_values, theirs.summary_values, atol=1e-5, rtol=1e-5)


def test_a_turn_in_inference_mode_can_be_continued_outside(qwen3, prompt):
    drafter = random_drafter(qwen3)
    cache = DynamicCache(config=qwen3.config)
    with torch.inference_mode():
        ids = generate(qwen3, prompt, drafter, **{CACHE: cache})
    ids = torch.cat([ids.clone(), torch.tensor([[4, 5]])], dim=1)
    plain = generate(qwen3, ids)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(generate(qwen3, ids, drafter, **{CACHE: copy.deepcopy(cache)}), plain)


@needs_static_rollback
def test_a_static_cache_of_the_user(qwen3, prompt):
    plain = generate(qwen3, prompt)
    more = torch.cat([plain, torch.tensor([[4, 5]])], dim=1)
    plain_more = generate(qwen3, more)
    drafter = make_drafter("mixed", qwen3, plain_more)
    cache = StaticCache(config=qwen3.config, max_cache_len=128)
    assert torch.equal(generate(qwen3, prompt, drafter, **{CACHE: cache}), plain)
    assert torch.equal(generate(qwen3, more, drafter, **{CACHE: cache}), plain_more)


def test_a_prompt_that_is_cached_whole_is_refused(qwen3, prompt):
    cache = DynamicCache(config=qwen3.config)
    qwen3(prompt, **{CACHE: cache})
    with pytest.raises(ValueError, match="already holds 20 tokens"):
        generate(qwen3, prompt, random_drafter(qwen3), **{CACHE: cache})
    assert cache.get_seq_length() == 20 and left_on(qwen3) == []


def test_a_users_sliding_cache_stays_small_in_later_plain_calls(built, prompt):
    target = built("mistral-window-crossed")
    cache = DynamicCache(config=target.config)
    ids = generate(target, prompt, random_drafter(target), **{CACHE: cache})
    generate(target, torch.cat([ids, torch.tensor([[5, 6]])], dim=1), **{CACHE: cache})
    assert all(layer.keys.shape[2] < 24 and not layer.record_past for layer in cache.layers)


# Isolation


class Interrupt(StoppingCriteria):
    def __init__(self, error, after):
        self.error, self.after, self.calls = error, after, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls > self.after:
            raise self.error
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("after", [0, 3, 12])
def test_nothing_is_left_after_an_interrupted_call(qwen3, prompt, error, after):
    plain = generate(qwen3, prompt)
    drafter = random_drafter(qwen3)
    generate(qwen3, prompt, drafter)
    stats = drafter.stats
    cache = DynamicCache(config=qwen3.config)
    with pytest.raises(type(error)):
        criteria = StoppingCriteriaList([Interrupt(error, after)])
        generate(qwen3, prompt, drafter, stopping_criteria=criteria, **{CACHE: cache})
    assert left_on(qwen3) == [] and "update" not in vars(cache) and not hasattr(cache, "longspark_state")
    assert drafter.stats is stats
    assert torch.equal(generate(qwen3, prompt), plain)
    assert torch.equal(generate(qwen3, prompt, drafter), plain)


def test_an_error_inside_the_target_or_the_draft_leaves_nothing(qwen3, prompt):
    plain = generate(qwen3, prompt)
    drafter = random_drafter(qwen3)
    for module in (qwen3.get_decoder().layers[3], drafter.layers[2], qwen3.lm_head):
        calls = []

        def fail(*_, calls=calls):
            calls.append(1)
            if len(calls) > 4:
                raise RuntimeError("boom")

        handle = module.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="boom"):
            generate(qwen3, prompt, drafter)
        handle.remove()
        assert left_on(qwen3) == []
    assert torch.equal(generate(qwen3, prompt), plain)


class GenerateInside(LogitsProcessor):
    """Calls `generate` on the same target from within a processor."""

    def __init__(self, target, prompt, drafter):
        self.target, self.prompt, self.drafter, self.outputs = target, prompt, drafter, []

    def __call__(self, input_ids, scores):
        if len(self.outputs) < 3:
            self.outputs.append(None)
            self.outputs[-1] = generate(self.target, self.prompt, self.drafter, max_new_tokens=12)
        return scores


@pytest.mark.parametrize("same_drafter", [True, False])
def test_calls_nested_in_a_call_do_not_mix(qwen3, prompt, same_drafter):
    other_prompt = prompt.flip(1)
    plain, other = generate(qwen3, prompt), generate(qwen3, other_prompt, max_new_tokens=12)
    drafter = random_drafter(qwen3)
    inner = drafter if same_drafter else random_drafter(qwen3, seed=9)
    processor = GenerateInside(qwen3, other_prompt, inner)
    output = generate(
        qwen3, prompt, drafter, logits_processor=LogitsProcessorList([processor]), return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain)
    assert all(torch.equal(found, other) for found in processor.outputs) and len(processor.outputs) == 3
    reference = generate(qwen3, prompt, drafter, return_dict_in_generate=True)
    ours, theirs = (cache_of(o).longspark_state[0] for o in (output, reference))
    torch.testing.assert_close(ours.boundary, theirs.boundary)
    torch.testing.assert_close(ours.layers[4].summary_values, theirs.layers[4].summary_values)
    assert left_on(qwen3) == []


def test_threads_on_one_target_do_not_mix(qwen3):
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 90, (1, length), generator=generator) for length in (5, 20, 47)]
    plain = [generate(qwen3, p) for p in prompts]
    shared = random_drafter(qwen3)
    drafters = [shared, shared, random_drafter(qwen3, seed=2)]
    results = [None] * 3

    def work(i):
        results[i] = generate(qwen3, prompts[i], drafters[i], return_dict_in_generate=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for i in range(3):
        assert torch.equal(results[i].sequences, plain[i])
        alone = generate(qwen3, prompts[i], drafters[i], return_dict_in_generate=True)
        ours, theirs = (cache_of(o).longspark_state[0] for o in (results[i], alone))
        torch.testing.assert_close(ours.layers[2].summary_values, theirs.layers[2].summary_values)
        torch.testing.assert_close(ours.boundary, theirs.boundary)
    assert left_on(qwen3) == []


def test_repeated_calls_leave_no_memory_behind(qwen3, prompt):
    drafter = random_drafter(qwen3)
    output = generate(qwen3, prompt, drafter, return_dict_in_generate=True)
    cache, state = weakref.ref(cache_of(output)), weakref.ref(cache_of(output).longspark_state[0])
    del output
    gc.collect()
    assert cache() is None and state() is None
    assert not any("target" in name for name, _ in drafter.named_modules())


# The seam


def test_the_seam_is_installed_once_and_can_be_removed(qwen3, prompt):
    wrapped = GenerationMixin._assisted_decoding
    install()
    assert GenerationMixin._assisted_decoding is wrapped
    try:
        uninstall()
        assert not hasattr(GenerationMixin._assisted_decoding, "_longspark_seam")
        assert GenerationMixin._assisted_decoding is wrapped.__wrapped__
    finally:
        install()
    assert torch.equal(generate(qwen3, prompt, random_drafter(qwen3)), generate(qwen3, prompt))


def test_other_ways_to_generate_are_untouched(qwen3, prompt, caplog):
    assistant = build("llama", seed=4)
    plain = generate(qwen3, prompt)
    assert torch.equal(generate(qwen3, prompt, assistant), plain)
    assert torch.equal(qwen3.generate(prompt, prompt_lookup_num_tokens=3, **GREEDY), plain)
    drafter = random_drafter(qwen3)
    beams = generate(qwen3, prompt, num_beams=3)
    assert torch.equal(generate(qwen3, prompt, drafter, num_beams=3), beams)
    assert drafter.stats is None


# Bad input


@pytest.mark.parametrize(
    "name, overrides, message",
    [
        ("llama", {}, "head_dim 12 "),
        ("mistral-window-crossed", {}, "key/value heads 1 "),
        ("llama-one-layer", {}, "target layers 1 "),
        ("qwen3", {"vocab_size": 96, "mask_token_id": 3}, "vocab"),
    ],
)
def test_a_drafter_for_another_target_is_refused(qwen3, built, prompt, name, overrides, message):
    drafter = random_drafter(built(name), **overrides)
    with pytest.raises(ValueError, match=message):
        generate(qwen3, prompt, drafter)
    with pytest.raises(ValueError, match=message):
        drafter.check_target(qwen3)
    assert left_on(qwen3) == []


def test_partial_rotary_must_agree(built, prompt):
    target = built("phi")
    wrong = random_drafter(target, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    with pytest.raises(ValueError, match="rotates 6 of 12"):
        generate(target, prompt, wrong)


def test_encoder_decoders_are_refused():
    config = T5Config(
        vocab_size=VOCAB_SIZE, d_model=48, d_kv=12, num_heads=4, num_layers=2, d_ff=32, decoder_start_token_id=0
    )
    target = T5ForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="encoder-decoder"):
        target.generate(torch.tensor([[4, 5]]), assistant_model=random_drafter(build("qwen3")), max_new_tokens=4)


def test_a_call_without_a_cache_is_refused(qwen3, prompt):
    with pytest.raises((ValueError, RuntimeError), match="cache"):
        generate(qwen3, prompt, random_drafter(qwen3), use_cache=False)
    assert left_on(qwen3) == []


def rope_target(**rope):
    config = copy.deepcopy(TARGETS["llama"])
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    torch.manual_seed(0)
    from transformers import LlamaForCausalLM

    target = LlamaForCausalLM(config).eval()
    target.generation_config.eos_token_id = None
    return target


def test_targets_that_attend_in_both_directions_are_refused(prompt):
    config = tiny(Gemma3TextConfig, head_dim=16, sliding_window=24, use_bidirectional_attention=True)
    target = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="both directions"):
        target.generate(prompt, assistant_model=random_drafter(target), max_new_tokens=4)


def test_dynamic_rotary_scaling_is_refused(prompt):
    target = rope_target(rope_type="dynamic", factor=2.0)
    with pytest.raises(ValueError, match="`dynamic`"):
        generate(target, prompt, random_drafter(target))


def test_longrope_is_refused_only_where_the_run_crosses_its_original_length(prompt):
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "factor": 2.0}
    target = rope_target(rope_type="longrope", original_max_position_embeddings=64, **factors)
    drafter = random_drafter(target)
    with pytest.raises(ValueError, match="`longrope`"):
        generate(target, prompt, drafter, max_new_tokens=60)
    cache = DynamicCache(config=target.config)  # 50 cached rows and 3 new ones cross it as well
    with torch.no_grad():
        target(torch.randint(2, 90, (1, 50)), **{CACHE: cache})
    with pytest.raises(ValueError, match="from 53 to 77"):
        generate(target, prompt[:, :3], drafter, **{CACHE: cache}, attention_mask=torch.ones(1, 53, dtype=torch.long))
    for ids, count in ((prompt, 44), (prompt.repeat(1, 4), 24)):
        plain = generate(target, ids, max_new_tokens=count)
        before = target.model.rotary_emb.inv_freq.clone()
        output = generate(target, ids, make_drafter("mixed", target, plain), max_new_tokens=count)
        assert torch.equal(output, plain)
        assert torch.equal(target.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("config_class", [CohereConfig, Glm4Config])
def test_interleaved_rotary_is_refused(config_class, prompt):
    target = AutoModelForCausalLM.from_config(tiny(config_class, head_dim=12))
    with pytest.raises(ValueError, match="interleaved"):
        generate(target, prompt, random_drafter(target))


def test_guidance_keeps_state_and_is_refused(qwen3, prompt):
    with pytest.raises(ValueError, match="ClassifierFreeGuidance"):
        generate(qwen3, prompt, random_drafter(qwen3), guidance_scale=1.5)
    assert left_on(qwen3) == []


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@torch.no_grad()
def test_a_refused_call_leaves_the_users_cache_as_it_was(built, name):
    target = built(name)
    drafter, cache = random_drafter(target), DynamicCache(config=target.config)
    ids = generate(target, torch.randint(2, 90, (1, 40)), drafter, **{CACHE: cache})
    length = cache.get_seq_length()
    for options in ({"guidance_scale": 1.5}, {"input_ids": ids[:, :length]}):
        with pytest.raises(ValueError):
            generate(target, options.pop("input_ids", ids), drafter, **{CACHE: cache}, **options)
        assert cache.get_seq_length() == length and hasattr(cache, "longspark_state")


def test_a_head_wider_than_the_vocabulary_is_refused(prompt):
    target = build("qwen3")
    drafter = random_drafter(target)
    target.lm_head = torch.nn.Linear(48, 128, bias=False)
    with pytest.raises(ValueError, match="128 rows"):
        generate(target, prompt, drafter)


def test_a_quantized_cache_is_refused_by_name_before_the_prefill(qwen3, prompt):
    class OneWayLayer(DynamicLayer):
        is_croppable = False

    cache = Cache(layers=[OneWayLayer() for _ in range(6)])
    with pytest.raises(ValueError, match="OneWayLayer"):
        generate(qwen3, prompt, random_drafter(qwen3), **{CACHE: cache})
    assert cache.get_seq_length() == 0


def test_outputs_that_cannot_be_given_are_refused(qwen3, prompt):
    drafter = random_drafter(qwen3)
    embeds = qwen3.get_input_embeddings()(prompt).detach()
    options = {"return_dict_in_generate": True, "output_hidden_states": True, "inputs_embeds": embeds}
    plain, ours = generate(qwen3, **options), generate(qwen3, drafter=drafter, **options)
    for one, other in zip(plain.hidden_states, ours.hidden_states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="inputs_embeds"):  # the loop of transformers gives none for the prompt
        generate(qwen3, drafter=drafter, assistant_ensemble_weight=STOCK, **options)
    with pytest.raises(ValueError, match="eager"):
        generate(qwen3, prompt, drafter, return_dict_in_generate=True, output_attentions=True)


def test_a_layer_without_rows_of_its_own_is_named(qwen3, prompt):
    class SharedRows(DynamicCache):
        pass

    drafter = random_drafter(qwen3)
    attention = qwen3.get_decoder().layers[2].self_attn
    layer_idx, attention.layer_idx = attention.layer_idx, 1  # as in models whose layers share a cache entry
    try:
        with pytest.raises(ValueError, match=r"Target layers \[2\] wrote no"):
            generate(qwen3, prompt, random_drafter(qwen3, target_layer_ids=[0, 2]))
    finally:
        attention.layer_idx = layer_idx
    assert left_on(qwen3) == [] and drafter.stats is None


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_draft_logits_never_stop_a_generation(qwen3, prompt, value, do_sample, caplog):
    drafter = random_drafter(qwen3)
    drafter.markov_head.w2.weight.data[3, 0] = value
    options = {"do_sample": do_sample, "temperature": 1e-5} if do_sample else {}
    plain = generate(qwen3, prompt)
    import logging

    from transformers.utils import logging as hf_logging

    hf_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        output = generate(qwen3, prompt, drafter, **options)
    hf_logging.disable_propagation()
    assert torch.equal(output, plain)
    assert drafter.stats.mean_acceptance_length == 1.0
    assert sum("not finite" in record.message for record in caplog.records) == 1


def test_a_drafter_needs_a_mask_token(qwen3):
    with pytest.raises(ValueError, match="mask_token_id"):
        LongSparkConfig.from_target(qwen3.config)
    with pytest.raises(ValueError, match="mask_token_id"):
        LongSparkDrafter(LongSparkConfig())


def test_a_newer_seam_takes_the_place_of_an_older_one(qwen3, prompt):
    for name in ("_assisted_decoding", "_get_candidate_generator", "_validate_generation_mode"):
        getattr(GenerationMixin, name)._longspark_seam = True  # as the first version marked it
    install()
    try:
        method = GenerationMixin._assisted_decoding
        assert method._longspark_seam > 1 and not hasattr(method.__wrapped__, "_longspark_seam")
        assert torch.equal(generate(qwen3, prompt, random_drafter(qwen3)), generate(qwen3, prompt))
    finally:
        uninstall()
        install()
