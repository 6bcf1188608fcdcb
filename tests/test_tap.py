"""What the tap takes from the target equals a full recompute with hooks and cache reads of the test's own."""

import pytest
import torch
from transformers import DynamicCache

from .targets import CACHE, MORE_TARGETS, TARGETS, cache_of, random_drafter, scripted_drafter


@torch.no_grad()
def recompute(target, ids, layer_ids, first=0):
    """Boundary rows, and all key/value rows, of one plain pass over `ids`, read independently of the tap."""
    hidden, decoder = {}, target.get_decoder()
    layers = getattr(decoder, "layers", None) or decoder.h  # Falcon's name
    handles = [
        layers[i].register_forward_hook(
            lambda m, a, out, i=i: hidden.__setitem__(i, out[0] if isinstance(out, tuple) else out)
        )
        for i in layer_ids
    ]
    cache = DynamicCache()  # full layers, also where the target slides: every row stays
    mask = (torch.arange(ids.shape[1]) >= first).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    target(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
    [handle.remove() for handle in handles]
    norm = next(
        getattr(decoder, n) for n in ("norm", "final_layernorm", "final_layer_norm", "ln_f") if hasattr(decoder, n)
    )
    last = len(layers) - 1
    boundary = [norm(hidden[i]) if i == last else hidden[i] for i in layer_ids]
    rows = [(cache.layers[i].keys[:, :, first:], cache.layers[i].values[:, :, first:]) for i in layer_ids]
    return torch.stack([state[:, -1] for state in boundary], dim=1), rows


def assert_state_is(state, drafter, boundary, rows, tolerance=1e-4):
    torch.testing.assert_close(state.boundary, boundary, atol=tolerance, rtol=tolerance)
    for layer, queries, (keys, values) in zip(state.layers, drafter.summary_queries, rows, strict=True):
        length = keys.shape[2]
        slots = torch.arange(max(0, length - layer.window_size), length)
        torch.testing.assert_close(
            layer.keys[:, :, slots % layer.window_size], keys[:, :, slots], atol=tolerance, rtol=0
        )
        torch.testing.assert_close(
            layer.values[:, :, slots % layer.window_size], values[:, :, slots], atol=tolerance, rtol=0
        )
        assert int(layer.window_mask().sum()) == len(slots) and layer.get_seq_length() == length
        groups = queries.shape[0] // keys.shape[1]
        scores = queries @ keys.repeat_interleave(groups, dim=1).transpose(-1, -2) * queries.shape[-1] ** -0.5
        torch.testing.assert_close(layer.summary_lse, scores.logsumexp(-1), atol=tolerance, rtol=tolerance)
        summary = scores.softmax(-1) @ values.repeat_interleave(groups, dim=1)
        torch.testing.assert_close(layer.summary_values, summary, atol=tolerance, rtol=tolerance)


ALL = list(TARGETS) + [name for name in MORE_TARGETS if name != "gemma3-multimodal"]


@pytest.mark.parametrize("padding", [0, 9])
@pytest.mark.parametrize("name", ALL)
def test_the_prefill_fills_boundary_window_and_summary(built, name, padding):
    target = built(name)
    drafter = random_drafter(target)
    ids = torch.randint(2, 90, (1, 50 + padding))
    mask = (torch.arange(50 + padding) >= padding).long()[None]
    output = target.generate(
        ids,
        attention_mask=mask,
        assistant_model=drafter,
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
    )
    state = cache_of(output).longspark_state[0]
    assert_state_is(state, drafter, *recompute(target, ids, drafter.config.target_layer_ids, padding))


@pytest.mark.parametrize("accepted", range(8))
@pytest.mark.parametrize("name", TARGETS)
def test_rounds_of_every_acceptance_length_commit_the_right_rows(built, name, accepted):
    target = built(name)
    prompt = torch.randint(2, 90, (1, 30))
    options = {"do_sample": False, "max_new_tokens": 3 * (accepted + 1) + 1, "return_dict_in_generate": True}
    truth = target.generate(prompt, **options).sequences
    drafter = scripted_drafter(target, truth[0], wrong_at=[accepted])
    output = target.generate(prompt, assistant_model=drafter, **options)
    assert torch.equal(output.sequences, truth)
    assert drafter.stats.rounds == 3 and drafter.stats.tokens == 3 * (accepted + 1)
    assert drafter.stats.accepted_by_position == [3] * accepted + [0] * (7 - accepted)
    state = cache_of(output).longspark_state[0]
    # The last token of the output is not processed yet: it would be the next anchor.
    assert_state_is(state, drafter, *recompute(target, truth[:, :-1], drafter.config.target_layer_ids))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window-crossed"])
def test_the_last_rounds_tail_that_was_cut_is_not_committed(built, name):
    target = built(name)
    prompt = torch.randint(2, 90, (1, 30))
    truth = target.generate(prompt, do_sample=False, max_new_tokens=30)
    eos = int(truth[0, 34])
    drafter = scripted_drafter(target, truth[0])
    output = target.generate(
        prompt,
        assistant_model=drafter,
        do_sample=False,
        eos_token_id=eos,
        max_new_tokens=30,
        return_dict_in_generate=True,
    )
    state = cache_of(output).longspark_state[0]
    assert_state_is(state, drafter, *recompute(target, output.sequences[:, :-1], drafter.config.target_layer_ids))


def test_layers_are_read_in_the_order_of_the_config(qwen3):
    drafter = random_drafter(qwen3, target_layer_ids=[5, 1, 3])
    ids = torch.randint(2, 90, (1, 40))
    output = qwen3.generate(
        ids, assistant_model=drafter, max_new_tokens=1, do_sample=False, return_dict_in_generate=True
    )
    assert_state_is(cache_of(output).longspark_state[0], drafter, *recompute(qwen3, ids, [5, 1, 3]))
