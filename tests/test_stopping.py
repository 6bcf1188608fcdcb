"""Where a call ends, and who is told: rules that plain `generate` knows, streamers, interruptions."""

import threading

import pytest
import torch
from scipy.stats import binomtest
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.cache_utils import Cache
from transformers.generation import stopping_criteria

from longspark_hf import generation_longspark

from .targets import CACHE, left_on, random_drafter
from .test_batches import StopAt, answers, generate, make_drafter, soft_target, words  # noqa: F401
from .test_generation import rope_target


class Identity(LogitsProcessor):
    """Of a user: nobody can know that it takes any prefix."""

    def __call__(self, input_ids, scores):
        assert not (input_ids == 3).any()  # a prefix that cannot be
        return scores


def test_an_accepted_draft_that_ends_a_sequence_is_counted_as_one(qwen3, answers):  # noqa: F811
    batch, prompts, truth = answers("qwen3", 1)
    drafter = make_drafter("oracle", qwen3, prompts, truth)
    ends = truth[0].tolist()
    at = next(i for i in range(2, 7) if ends[i] not in ends[:i])  # in the middle of the first block
    generate(qwen3, batch, drafter, eos_token_id=ends[at])
    assert (drafter.stats.rounds, drafter.stats.tokens) == (1, at)
    assert drafter.stats.accepted_by_position == [1] * at + [0] * (7 - at)


@pytest.mark.parametrize("stops", ["eos", "criterion"])
@pytest.mark.parametrize("size, stock", [(1, False), (4, False), (1, True)])
def test_what_ends_a_sequence_is_sampled_as_often_as_the_target_says_it(monkeypatch, size, stock, stops):
    target, end, calls = soft_target(), 3, 300
    drafter = random_drafter(target, mask_token_id=0, window_size=4, block_size=3, initializer_range=0.5)
    if stock:
        monkeypatch.setattr(generation_longspark, "needs_stock_loop", lambda *args: "a test asks for it")
    prompt = torch.tensor([1, 4, 2, 5])
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 4}
    if stops == "eos":
        options |= {"eos_token_id": end, "logits_processor": LogitsProcessorList([Identity()])}
    else:
        options["stopping_criteria"] = StoppingCriteriaList([StopAt([end])])
    seconds, accepted = [], 0
    for _ in range(calls // size):
        output = target.generate(prompt.expand(size, -1).clone(), assistant_model=drafter, **options)
        seconds += [int(row[5]) for row in output if row[4] != end]
        accepted += drafter.stats.accepted_by_position[0]
    assert accepted > 40
    with torch.no_grad():
        first = target(prompt[None]).logits[0, -1].softmax(-1)
        follows = torch.cat([prompt.expand(7, -1), torch.arange(7)[:, None]], dim=1)
        then = target(follows).logits[:, -1].softmax(-1)[:, end]
    first[end] = 0
    wanted = float((first * then).sum() / first.sum())
    assert binomtest(seconds.count(end), len(seconds), wanted).pvalue > 1e-3


@pytest.mark.parametrize("size", [1, 3])
def test_a_longer_length_rule_takes_the_place_of_the_default(qwen3, answers, size):  # noqa: F811
    batch, prompts, truth = answers("qwen3", 3)
    batch = {name: value[:size] for name, value in batch.items()}
    options = {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(batch["input_ids"].shape[1] + 30)]),
        "max_new_tokens": 9,
    }
    plain = generate(qwen3, batch, **options)
    assert plain.shape[1] == batch["input_ids"].shape[1] + 30
    assert torch.equal(generate(qwen3, batch, make_drafter("mixed", qwen3, prompts, truth), **options), plain)


@pytest.mark.parametrize("tokens", [1, 3, 8, 12])
def test_a_time_limit_inside_a_block_ends_there(qwen3, prompt, monkeypatch, tokens):
    class Clock:
        """Time goes by with every look at it, so each token takes as long with drafts as without."""

        now = 0.0

        def time(self):
            self.now += 1.0
            return self.now

    truth = generate(qwen3, {"input_ids": prompt})[0, prompt.shape[1] :]
    for drafter in (None, make_drafter("oracle", qwen3, prompt, [truth])):
        monkeypatch.setattr(stopping_criteria, "time", Clock())
        output = generate(qwen3, {"input_ids": prompt}, drafter, max_time=tokens - 0.5)
        assert output.shape[1] == prompt.shape[1] + tokens


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_the_next_turn_processes_only_what_is_new(built, answers, name, size):  # noqa: F811
    target = built(name)
    batch, prompts, truth = answers(name, 3)
    batch = {key: value[:size] for key, value in batch.items()}
    more, passes = torch.randint(2, 90, (size, 6)), []
    hook = target.get_input_embeddings().register_forward_hook(lambda module, args, _: passes.append(args[0].shape[1]))
    outputs = []
    try:
        for drafter in (None, make_drafter("mixed", target, prompts, truth)):
            cache = DynamicCache(config=target.config)
            first = generate(target, batch, drafter, max_new_tokens=30, **{CACHE: cache})
            mask = torch.cat([batch["attention_mask"], torch.ones(size, 36, dtype=torch.long)], dim=1)
            turn = {"input_ids": torch.cat([first, more], dim=1), "attention_mask": mask}
            passes.clear()
            outputs.append(generate(target, turn, drafter, **{CACHE: cache}))
            assert passes[0] == 7  # the token that the first turn ended with, and the new ones
    finally:
        hook.remove()
    assert torch.equal(*outputs)


def test_a_batch_may_end_where_the_rotary_embedding_would_change():
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0, 3.0, 2.0, 5.0, 6.0, 7.0]}
    target, limit = rope_target(rope_type="longrope", original_max_position_embeddings=64, **factors), 64
    ids = torch.randint(2, 90, (2, limit - 37), generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = generate(target, batch, max_new_tokens=37)
    # The first sequence arrives early; behind it, the drafts of the other one go on.
    drafter = make_drafter("oracle", target, list(ids), [plain[0, -37:], (plain[1, -37:] + 1) % 97])
    highest, forward = [], target.forward

    def watching(*args, position_ids, **kwargs):
        highest.append(int(position_ids.max()))
        return forward(*args, position_ids=position_ids, **kwargs)

    target.forward = watching
    assert torch.equal(generate(target, batch, drafter, max_new_tokens=37), plain)
    assert limit - 8 < max(highest) < limit


def streamed(target, streamer, **options):
    """What a reader in another thread gets, who would wait for ever if the streamer did not end."""
    texts = []
    reader = threading.Thread(target=lambda: texts.extend(streamer), daemon=True)
    reader.start()
    error = None
    try:
        target.generate(torch.tensor([[5, 7, 9]]), streamer=streamer, max_new_tokens=12, do_sample=False, **options)
    except Exception as caught:
        error = caught
    reader.join(timeout=20)
    assert not reader.is_alive() and left_on(target) == []
    return "".join(texts), error


def test_a_text_streamer_ends_with_the_text_and_with_every_error(qwen3, built, monkeypatch):
    texts = [
        streamed(qwen3, TextIteratorStreamer(words()), assistant_model=drafter)[0]
        for drafter in (None, random_drafter(qwen3))
    ]
    assert texts[0] == texts[1] != ""

    def fails(*args, **kwargs):
        raise RuntimeError("the draft pass fails")

    drafter = random_drafter(qwen3)
    monkeypatch.setattr(drafter, "draft", fails)
    text, error = streamed(qwen3, TextIteratorStreamer(words()), assistant_model=drafter)
    assert str(error) == "the draft pass fails" and texts[0].startswith(text)
    _, error = streamed(qwen3, TextIteratorStreamer(words()), assistant_model=random_drafter(built("gpt-neox")))
    assert isinstance(error, ValueError)  # a drafter of another target, refused


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window-crossed"])
def test_ctrl_c_while_the_cache_is_cropped_leaves_it_whole(built, prompt, monkeypatch, name):
    target, crops = built(name), []
    plain = target.generate(prompt, do_sample=False, max_new_tokens=30)
    crop = Cache.crop

    def interrupted_crop(cache, *args, **kwargs):
        crops.append(cache)
        if len(crops) == 2:
            cache.layers[0].crop(*args, **kwargs)
            raise KeyboardInterrupt
        return crop(cache, *args, **kwargs)

    monkeypatch.setattr(Cache, "crop", interrupted_crop)
    cache = DynamicCache(config=target.config)
    drafter = make_drafter("mixed", target, [prompt[0]], [plain[0, prompt.shape[1] :]])
    with pytest.raises(KeyboardInterrupt):
        target.generate(prompt, assistant_model=drafter, do_sample=False, max_new_tokens=30, **{CACHE: cache})
    lengths = {int(layer.get_seq_length()) for layer in cache.layers}
    assert len(lengths) == 1 and left_on(target) == []
    held = lengths.pop()
    assert prompt.shape[1] <= held < plain.shape[1]
    rest = plain.shape[1] - held - 1
    again = target.generate(plain[:, : held + 1], do_sample=False, max_new_tokens=rest, **{CACHE: cache})
    assert torch.equal(again, plain)
