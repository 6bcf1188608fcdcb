"""The cache that appends in place: the rows of a stock one, without copying them in every forward."""

import contextlib
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from longspark_hf import InPlaceCache
from longspark_hf.inplace_longspark import InPlaceLayer, appending_in_place

from .targets import CACHE, FULL_ATTENTION, TARGETS, cache_of, interrupted, random_drafter


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
        with torch.no_grad(), torch.inference_mode(in_inference_mode and number % 2 == 0):
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


@torch.no_grad()
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


def held_and_needed(layer):
    """Bytes that a layer keeps alive, and those of its rows."""
    tensors = [layer.keys, layer.values, *(t for pair in layer._buffers.values() for t in pair)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()), layer.keys.nbytes + layer.values.nbytes


@pytest.mark.parametrize("change", ["crop", "select", "reorder", "repeat"])
@torch.no_grad()
def test_memory_that_is_no_longer_needed_is_given_back(change):
    layer = InPlaceLayer()
    layer.update(torch.randn(8, 2, 2000, 4), torch.randn(8, 2, 2000, 4))
    if change == "crop":
        layer.crop(-1500)
        layer.update(torch.randn(8, 2, 1, 4), torch.randn(8, 2, 1, 4))
    elif change == "select":
        layer.batch_select_indices(torch.tensor([0]))
    elif change == "reorder":
        layer.reorder_cache(torch.arange(8))
    else:
        layer.batch_repeat_interleave(2)
    held, needed = held_and_needed(layer)
    assert held <= 9 / 8 * needed


@torch.no_grad()
def test_another_dtype_is_promoted_as_a_stock_layer_does():
    for first, then in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        ours, stock = InPlaceLayer(), DynamicLayer()
        for dtype in (first, then):
            rows = torch.randn(1, 2, 5, 4).to(dtype)
            for mine, theirs in zip(ours.update(rows, rows), stock.update(rows, rows), strict=True):
                assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.parametrize("with_drafter", [False, True])
@pytest.mark.parametrize("cache_class", [DynamicCache, InPlaceCache])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_turn_in_another_precision_goes_on(qwen3, prompt, with_drafter, cache_class, batch_size):
    prompt = prompt.expand(batch_size, -1)
    drafter = {"assistant_model": random_drafter(qwen3)} if with_drafter else {}
    for first in (True, False):
        cache, options = cache_class(config=qwen3.config), {"do_sample": False, "max_new_tokens": 12}
        with torch.autocast("cpu", torch.bfloat16, enabled=first):
            answer = qwen3.generate(prompt, **options, **drafter, **{CACHE: cache})
        longer = torch.cat([answer, prompt[:, :5]], dim=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=not first):
            after = qwen3.generate(longer, **options, **drafter, **{CACHE: cache})
        assert after.shape[1] == longer.shape[1] + 12


@torch.no_grad()
def test_rows_of_another_batch_size_are_refused_as_by_a_stock_layer():
    ours, stock = InPlaceLayer(), DynamicLayer()
    for layer in (ours, stock):
        layer.update(torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4))
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            layer.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
        assert layer.get_seq_length() == 5


def test_gradients_flow_through_queries_alone():
    queries = torch.randn(1, 1, 3, 2, requires_grad=True)
    layer = InPlaceLayer()
    layer.update(torch.randn(1, 1, 40, 2), torch.randn(1, 1, 40, 2))
    total = 0
    for _ in range(3):
        rows = torch.randn(1, 1, 3, 2)
        keys, _ = layer.update(rows, rows)
        total = total + (queries @ keys.transpose(-1, -2)).sum()
    total.backward()
    assert queries.grad is not None


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


@pytest.mark.parametrize("line", range(1, 25))
def test_an_interrupt_while_layers_are_adopted_leaves_stock_ones(qwen3, line):
    cache = DynamicCache(config=qwen3.config)
    with contextlib.suppress(KeyboardInterrupt), interrupted(appending_in_place, line) as stop:
        with appending_in_place(cache):
            stop()
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
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
