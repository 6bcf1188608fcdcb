"""Attention of a verification pass: what `sdpa` computes, by folding the query heads that share keys and values."""

import threading

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from longspark_hf import attention_longspark
from longspark_hf.attention_longspark import GROUPED, MOST_QUERIES, grouped_attention, grouped_attention_forward

from .targets import TARGETS, left_on, random_drafter


class Layer(torch.nn.Module):
    """What `sdpa` reads of an attention layer."""

    is_causal = True

    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups = groups


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
    expected, _ = sdpa_attention_forward(Layer(groups), query, key, value, mask, scaling=0.3)
    with grouped_attention(qwen3):
        output, weights = grouped_attention_forward(Layer(groups), query, key, value, mask, scaling=0.3)
    assert weights is None and output.is_contiguous()
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


def test_what_is_no_short_pass_is_left_to_sdpa(qwen3, monkeypatch):
    asked = []
    monkeypatch.setattr(attention_longspark, "sdpa_attention_forward", lambda *a, **k: asked.append(k) or (None, None))
    key = value = torch.randn(1, 2, 40, 16)
    mask = masks(1, 4, 40)["causal"]
    with grouped_attention(qwen3):
        for num_new, options in {
            1: {},
            MOST_QUERIES + 1: {},
            4: {"attention_mask": None},
            5: {"attention_mask": torch.zeros(1, 1, 5, 40)},
            6: {"dropout": 0.1},
            7: {"position_bias": torch.zeros(1, 4, 7, 40)},
        }.items():
            arguments = {"attention_mask": masks(1, num_new, 40)["causal"]} | options
            grouped_attention_forward(Layer(2), torch.randn(1, 4, num_new, 16), key, value, **arguments)
    assert len(asked) == 6
    grouped_attention_forward(Layer(2), torch.randn(1, 4, 4, 16), key, value, mask)  # outside of a call of ours
    assert len(asked) == 7


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


def test_another_attention_is_left_alone(built, prompt):
    target = built("qwen3")
    target.set_attn_implementation("eager")
    try:
        with grouped_attention(target):
            assert target.config._attn_implementation == "eager"
        assert target.config._attn_implementation == "eager"
    finally:
        target.set_attn_implementation("sdpa")


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
            assert qwen3.config._attn_implementation == GROUPED
            thread = threading.Thread(target=torch.no_grad()(verify))
            thread.start()
            thread.join()
    assert torch.equal(outputs[0], outputs[1])


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
    go_on.set()
    thread.join()
    assert qwen3.config._attn_implementation == "sdpa"
