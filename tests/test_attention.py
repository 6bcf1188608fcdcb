"""Attention of a verification pass: what `sdpa` computes, by folding the query heads that share keys and values."""

import contextlib
import threading

import pytest
import torch
from transformers import AttentionInterface
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longspark_hf import attention_longspark
from longspark_hf.attention_longspark import MOST_QUERIES, grouped_attention
from longspark_hf.patching_longspark import patched

from .targets import TARGETS, another_copy, build, interrupted, left_on, random_drafter


class Layer(torch.nn.Module):
    """What `sdpa` reads of an attention layer, and whose it is."""

    is_causal = True

    def __init__(self, target, groups):
        super().__init__()
        self.config, self.num_key_value_groups = target.config, groups


def attention(*args, **kwargs):
    """As an attention layer calls it."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


def masks(batch_size, num_new, length):
    """Causal, with padding, and with a window."""
    columns, queries = torch.arange(length), torch.arange(length - num_new, length)[:, None]
    causal = (columns <= queries).expand(batch_size, 1, -1, -1)
    padding = columns >= torch.arange(batch_size)[:, None, None, None]
    return {"causal": causal, "padded": causal & padding, "window": causal & (columns > queries - 9)}


@pytest.mark.parametrize("kind", ["causal", "padded", "window"])
@pytest.mark.parametrize("num_new", [2, 8, MOST_QUERIES])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("value_dim", [16, 12])
def test_it_computes_what_sdpa_does(qwen3, kind, num_new, groups, value_dim):
    batch_size, length = 3, 70
    query = torch.randn(batch_size, num_new, 2 * groups, 16).transpose(1, 2)
    # As a cache that appends in place hands them out: views of something longer.
    key = torch.randn(batch_size, 2, length + 5, 16)[:, :, :length]
    value = torch.randn(batch_size, 2, length + 5, value_dim)[:, :, :length]
    mask = masks(batch_size, num_new, length)[kind]
    expected, _ = sdpa_attention_forward(Layer(qwen3, groups), query, key, value, mask, scaling=0.3)
    with grouped_attention(qwen3):
        output, weights = attention(Layer(qwen3, groups), query, key, value, mask, scaling=0.3)
    assert weights is None and output.is_contiguous()
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


def test_what_is_no_short_pass_is_left_to_sdpa(qwen3, built, monkeypatch):
    folded = []
    monkeypatch.setattr(attention_longspark, "folded_attention", lambda *a, **k: folded.append(a))
    key = value = torch.randn(1, 2, 40, 16)
    layer = Layer(qwen3, 2)

    def ask(layer, num_new, options):
        arguments = {"attention_mask": masks(1, num_new, 40)["causal"]} | options
        attention(layer, torch.randn(1, 4, num_new, 16), key, value, **arguments)

    with grouped_attention(qwen3):
        for num_new, options in {
            1: {},
            MOST_QUERIES + 1: {},
            4: {"attention_mask": None},
            5: {"attention_mask": torch.zeros(1, 1, 5, 40)},
            6: {"dropout": 0.1},
            7: {"position_bias": torch.zeros(1, 4, 7, 40)},
        }.items():
            ask(layer, num_new, options)
        ask(Layer(built("llama"), 2), 4, {})  # another target
        assert not folded
        ask(layer, 4, {})
        assert len(folded) == 1
    ask(layer, 4, {})  # outside of a call of ours
    assert len(folded) == 1


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_verification_passes_copy_no_keys_for_query_heads(built, prompt, monkeypatch, name, batch_size):
    target = built(name)
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counting(query, key, *args, **kwargs):
        seen.append((query.shape[1], key.shape[1], query.shape[2]))
        return original(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    batch = prompt.expand(batch_size, -1).clone()
    target.generate(batch, assistant_model=random_drafter(target), do_sample=False, max_new_tokens=12)
    config = target.config
    groups = config.num_attention_heads // config.num_key_value_heads
    verified = [s for s in seen if s[2] == 8 * groups and s[:2] == (config.num_key_value_heads,) * 2]
    assert len(verified) >= config.num_hidden_layers
    assert left_on(target) == [] and config._attn_implementation == "sdpa"


def grouped_passes(monkeypatch, target):
    """Whether passes of 8 tokens have as many query heads as key heads, as they come."""
    seen, original = [], torch.nn.functional.scaled_dot_product_attention
    groups = target.config.num_attention_heads // target.config.num_key_value_heads

    def watching(query, key, *args, **kwargs):
        if query.shape[2] in (8, 8 * groups):
            seen.append(query.shape[1] == target.config.num_key_value_heads)
        return original(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watching)
    return seen


def test_a_call_within_a_call_leaves_the_outer_one_grouped(qwen3, prompt, monkeypatch):
    class Nested(BaseStreamer):
        def __init__(self):
            self.left = 1

        def put(self, value):
            if self.left and len(seen):
                self.left = 0
                qwen3.generate(prompt, assistant_model=random_drafter(qwen3), do_sample=False, max_new_tokens=2)
                seen.clear()

        def end(self):
            pass

    seen = grouped_passes(monkeypatch, qwen3)
    options = {"assistant_model": random_drafter(qwen3), "do_sample": False, "max_new_tokens": 40}
    qwen3.generate(prompt, streamer=Nested(), **options)
    assert seen and all(seen)
    assert left_on(qwen3) == []


def test_another_copy_of_the_module_takes_nothing_away(qwen3, prompt, monkeypatch):
    other = another_copy(monkeypatch, attention_longspark)
    seen = grouped_passes(monkeypatch, qwen3)
    with other.grouped_attention(qwen3):
        qwen3.generate(prompt, assistant_model=random_drafter(qwen3), do_sample=False, max_new_tokens=12)
        layer, query = Layer(qwen3, 2), torch.randn(1, 4, 8, 16)
        attention(layer, query, torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16), masks(1, 8, 40)["causal"])
    assert seen and all(seen)
    assert left_on(qwen3) == []


def test_the_configs_of_a_target_are_not_touched(built, prompt):
    target = build("gemma3-multimodal")
    target.config.vision_config._attn_implementation = "eager"
    names = []

    class Watching(BaseStreamer):
        def put(self, value):
            config = target.config
            names.append([c._attn_implementation for c in (config, config.get_text_config(), config.vision_config)])

        def end(self):
            pass

    target.generate(
        prompt, assistant_model=random_drafter(target), streamer=Watching(), do_sample=False, max_new_tokens=8
    )
    assert len(names) > 1 and all(name == names[0] for name in names)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_target_that_asks_for_the_name_of_its_attention_says_the_same(prompt, batch_size):
    target = build("falcon")
    batch = torch.cat([prompt.roll(shift, dims=1) for shift in range(batch_size)])
    plain = target.generate(batch, do_sample=False, max_new_tokens=40)
    ours = target.generate(batch, assistant_model=random_drafter(target), do_sample=False, max_new_tokens=40)
    assert torch.equal(ours, plain)


def test_another_function_registered_for_sdpa_is_asked(qwen3, prompt):
    asked = []

    def own(*args, **kwargs):
        asked.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sdpa", own)
    try:
        qwen3.generate(prompt, assistant_model=random_drafter(qwen3), do_sample=False, max_new_tokens=8)
        assert asked and ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def test_another_thread_keeps_its_plain_attention(qwen3, prompt):
    inputs = prompt.repeat(1, 3)
    outputs = []

    def verify():
        cached = qwen3(inputs[:, :40], use_cache=True)
        cache = cached.get("cache", cached.get("past_key_values"))
        name = "cache" if "cache" in cached else "past_key_values"
        outputs.append(qwen3(inputs[:, 40:48], **{name: cache}).logits)

    with torch.no_grad():
        verify()
        with grouped_attention(qwen3):
            assert left_on(qwen3) == ["sdpa"]
            thread = threading.Thread(target=torch.no_grad()(verify))
            thread.start()
            thread.join()
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("line", range(1, 20))
def test_an_interrupt_on_the_way_in_leaves_nothing(qwen3, line):
    with contextlib.suppress(KeyboardInterrupt), interrupted(patched, line) as stop:
        with grouped_attention(qwen3):
            stop()
    assert left_on(qwen3) == []


def test_two_calls_at_once_leave_the_target_as_it_was(qwen3):
    inside, go_on = threading.Event(), threading.Event()

    def other():
        with grouped_attention(qwen3):
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=other)
    with grouped_attention(qwen3):
        thread.start()
        inside.wait(10)
        assert left_on(qwen3) == ["sdpa"]
    assert left_on(qwen3) == ["sdpa"]  # the other call goes on
    go_on.set()
    thread.join()
    assert left_on(qwen3) == []
