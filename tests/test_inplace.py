"""The cache that appends in place: the rows of a stock one, without copying them in every forward."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from longspark_hf import InPlaceCache
from longspark_hf.inplace_longspark import InPlaceLayer

from .targets import CACHE, FULL_ATTENTION, TARGETS, cache_of, random_drafter


STEPS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 9)),
    st.tuples(st.just("crop"), st.integers(-5, 0)),
    st.tuples(st.just("select"), st.permutations([0, 1])),
    st.sampled_from([("copy", None), ("reset", None), ("foreign", None)]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=25), st.booleans())
def test_it_holds_what_a_stock_layer_holds(steps, in_inference_mode):
    ours, stock = InPlaceLayer(), DynamicLayer()
    for number, (what, argument) in enumerate(steps):
        with torch.inference_mode(in_inference_mode and number % 2 == 0):
            if what == "update":
                new = [torch.randn(2, 3, argument, 4) for _ in range(2)]
                for mine, theirs in zip(ours.update(*new), stock.update(*new), strict=True):
                    assert torch.equal(mine, theirs)
            elif what == "crop" and -argument < stock.get_seq_length():
                ours.crop(argument), stock.crop(argument)
            elif what == "select":
                ours.batch_select_indices(torch.tensor(argument)), stock.batch_select_indices(torch.tensor(argument))
            elif what == "reset":
                ours.reset(), stock.reset()
            elif what == "copy" and not in_inference_mode:
                before, ours = ours, copy.deepcopy(ours)
                if before.get_seq_length():
                    before.update(torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 1, 4))
            elif what == "foreign" and stock.get_seq_length():
                ours.keys = stock.keys = torch.randn_like(stock.keys)
        assert ours.get_seq_length() == stock.get_seq_length()
        assert ours.get_mask_sizes(3) == stock.get_mask_sizes(3)
        if stock.get_seq_length():
            assert torch.equal(ours.keys, stock.keys) and torch.equal(ours.values, stock.values)


def test_rows_are_written_where_they_stay_and_little_is_spare():
    layer = InPlaceLayer()
    layer.update(torch.randn(1, 2, 2000, 4), torch.randn(1, 2, 2000, 4))
    places = set()
    for _ in range(200):
        layer.update(torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4))
        layer.crop(-7)
        places.add(layer.keys.data_ptr())
        assert layer.keys.untyped_storage().nbytes() <= 9 / 8 * layer.keys.nbytes
    assert len(places) <= 3


def test_gradients_flow_through_rows_handed_out_before():
    layer = InPlaceLayer()
    rows = [torch.randn(1, 1, 3, 2, requires_grad=True) for _ in range(3)]
    total = sum((layer.update(row, row)[0] ** 2).sum() for row in rows)
    total.backward()
    assert torch.allclose(rows[0].grad, 6 * rows[0].detach())  # squared in three sums


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("made_with", ["config", "nothing"])
def test_plain_generate_takes_it(built, prompt, name, made_with):
    target = built(name)
    expected = target.generate(prompt, do_sample=False, max_new_tokens=40)
    cache = InPlaceCache(target.config) if made_with == "config" else InPlaceCache()
    assert torch.equal(target.generate(prompt, do_sample=False, max_new_tokens=40, **{CACHE: cache}), expected)
    assert made_with == "config" or all(type(layer) is InPlaceLayer for layer in cache.layers)


@pytest.mark.parametrize("name", FULL_ATTENTION)
@pytest.mark.parametrize("cache_class", [InPlaceCache, DynamicCache])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_drafter_takes_it_and_hands_back_what_it_found(built, prompt, name, cache_class, batch_size):
    target = built(name)
    batch = {"input_ids": prompt.expand(batch_size, -1), "do_sample": False, "max_new_tokens": 40}
    plain = target.generate(**batch, return_dict_in_generate=True)
    cache = cache_class(config=target.config)
    kinds = [type(layer) for layer in cache.layers]
    layers = list(cache.layers)
    ours = target.generate(**batch, assistant_model=random_drafter(target), **{CACHE: cache})
    assert torch.equal(ours, plain.sequences)
    assert [type(layer) for layer in cache.layers] == kinds
    assert all(mine is before for mine, before in zip(cache.layers, layers, strict=True))
    for mine, theirs in zip(cache.layers, cache_of(plain).layers, strict=True):
        assert mine.keys.shape == theirs.keys.shape
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
    # And it goes on.
    longer = torch.cat([ours, ours[:, :3]], dim=1)
    following = {"do_sample": False, "max_new_tokens": 8}
    expected = target.generate(longer, **following, **{CACHE: cache_of(plain)})
    assert torch.equal(target.generate(longer, **following, **{CACHE: cache}), expected)


def test_stock_layers_come_back_after_an_error(qwen3, prompt):
    def fail(ids, scores):
        if ids.shape[1] > 30:
            raise RuntimeError("criterion")
        return torch.zeros(1, dtype=torch.bool)

    for cache in (DynamicCache(), DynamicCache(config=qwen3.config)):
        with pytest.raises(RuntimeError, match="criterion"):
            qwen3.generate(
                prompt,
                assistant_model=random_drafter(qwen3),
                stopping_criteria=[fail],
                do_sample=False,
                max_new_tokens=40,
                **{CACHE: cache},
            )
        assert {type(layer) for layer in cache.layers} == {DynamicLayer}
        assert cache.layer_class_to_replicate in (None, DynamicLayer)
        assert not any("_buffers" in vars(layer) for layer in cache.layers)


def test_our_loop_does_not_copy_the_rows_it_finds(qwen3, prompt, monkeypatch):
    copied = []
    original = torch.cat

    def counting(tensors, *args, **kwargs):
        output = original(tensors, *args, **kwargs)
        if output.ndim == 4 and output.shape[2] > 400:  # the prompt itself is rotated by `cat`
            copied.append(output.shape)
        return output

    long = prompt.repeat(1, 20)
    monkeypatch.setattr(torch, "cat", counting)
    qwen3.generate(long, assistant_model=random_drafter(qwen3), do_sample=False, max_new_tokens=20)
    assert not copied
    qwen3.generate(long, do_sample=False, max_new_tokens=2)
    assert copied  # the stock cache does
