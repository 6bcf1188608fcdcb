"""The drafter's state: whatever the order and size of the updates, it is a function of the committed rows alone."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspark_hf import LongSparkCache, LongSparkConfig
from longspark_hf.cache_longspark import ROWS_PER_STEP, LongSparkCacheLayer, fold_rows


HEAD_DIM = 8


def make_layer(kv_heads=2, groups=2, summary=3, window=16, dtype=torch.float32, seed=0, window_dtype=None):
    queries = torch.randn(kv_heads * groups, summary, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    return LongSparkCacheLayer(queries.to(dtype), window, window_dtype)


def make_rows(batch_size, num_rows, kv_heads=2, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, kv_heads, num_rows, HEAD_DIM)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))


def recomputed(queries, keys, values):
    """Summary of one sequence from all its rows at once, in float64: the definition."""
    groups = queries.shape[0] // keys.shape[0]
    keys, values = (rows.double().repeat_interleave(groups, dim=0) for rows in (keys, values))  # (h, t, d)
    scores = torch.einsum("hrd,htd->hrt", queries.double(), keys) * queries.shape[-1] ** -0.5
    return torch.einsum("hrt,htd->hrd", scores.softmax(dim=-1), values), scores.logsumexp(dim=-1)


def check_state(layer, committed, atol=1e-5):
    """`committed` holds one `(keys, values)` per sequence, each `(g, rows, d)`."""
    for index, (keys, values) in enumerate(committed):
        num_rows = keys.shape[1]
        assert int(layer.num_rows[index]) == num_rows
        mask = layer.window_mask()[index]
        assert mask.sum() == min(num_rows, layer.window_size)
        if num_rows == 0:
            assert (layer.summary_lse[index] == -torch.inf).all() and (layer.summary_values[index] == 0).all()
            continue

        expected_values, expected_lse = recomputed(layer.summary_queries, keys, values)
        assert (layer.summary_values[index].double() - expected_values).abs().max() <= atol
        assert (layer.summary_lse[index].double() - expected_lse).abs().max() <= atol

        recent = torch.arange(max(0, num_rows - layer.window_size), num_rows)
        slots = recent % layer.window_size
        assert mask[slots].all()
        assert torch.equal(layer.keys[index][:, slots], keys[:, recent].to(layer.keys.dtype))
        assert torch.equal(layer.values[index][:, slots], values[:, recent].to(layer.values.dtype))


@st.composite
def histories(draw):
    """Shapes of a state, and the sizes of a prompt's chunks and of the rounds after it."""
    block = draw(st.integers(1, 8))
    return {
        "kv_heads": draw(st.sampled_from([1, 2, 3])),
        "groups": draw(st.sampled_from([1, 2, 4, 5])),
        "summary": draw(st.sampled_from([1, 3, 16])),
        "window": draw(st.sampled_from([1, 2, 7, 16, 64])),
        "batch_size": draw(st.integers(1, 3)),
        "chunks": draw(st.lists(st.integers(1, 90), min_size=1, max_size=5)),
        "block": block,
        "rounds": draw(st.lists(st.lists(st.integers(1, block + 1), min_size=3, max_size=3), max_size=20)),
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=60, deadline=None)
@given(histories())
def test_state_after_many_rounds_is_that_of_all_committed_rows(history):
    kv_heads, batch_size = history["kv_heads"], history["batch_size"]
    layer = make_layer(kv_heads, history["groups"], history["summary"], history["window"], seed=history["seed"])
    steps = history["chunks"] + [accepted[0] for accepted in history["rounds"]]
    keys, values = make_rows(batch_size, sum(steps), kv_heads, seed=history["seed"])

    for k, v in zip(keys.split(steps, dim=2), values.split(steps, dim=2)):
        layer.update(k, v)

    check_state(layer, list(zip(keys, values)))


@settings(max_examples=60, deadline=None)
@given(histories(), st.data())
def test_padding_and_rejected_rows_leave_no_trace_in_a_ragged_batch(history, data):
    kv_heads, batch_size, block = history["kv_heads"], history["batch_size"], history["block"]
    layer = make_layer(kv_heads, history["groups"], history["summary"], history["window"], seed=history["seed"])
    prompt = sum(history["chunks"])
    padding = [data.draw(st.integers(0, prompt), label="left padding") for _ in range(batch_size)]

    # Every sequence: a left-padded prompt in chunks, then verify blocks of which it keeps a prefix of its own length.
    masks = [torch.arange(prompt)[None] >= torch.tensor(padding)[:, None]]
    masks += [torch.arange(block + 1)[None] < torch.tensor(kept[:batch_size])[:, None] for kept in history["rounds"]]
    steps = history["chunks"] + [block + 1] * len(history["rounds"])
    mask = torch.cat(masks, dim=1)
    keys, values = make_rows(batch_size, sum(steps), kv_heads, seed=history["seed"])
    for k, v, m in zip(keys.split(steps, dim=2), values.split(steps, dim=2), mask.split(steps, dim=1)):
        layer.update(k, v, m)

    check_state(layer, [(keys[b][:, mask[b]], values[b][:, mask[b]]) for b in range(batch_size)])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.lists(st.booleans(), min_size=40, max_size=40))
def test_any_mask_selects_the_rows_that_count(seed, num_rows, flags):
    layer = make_layer(window=7)
    mask = torch.tensor([flags[:num_rows], flags[::-1][:num_rows]])
    keys, values = make_rows(2, num_rows, seed=seed)

    layer.update(keys, values, mask)

    check_state(layer, [(keys[b][:, mask[b]], values[b][:, mask[b]]) for b in range(2)])


def test_prompt_longer_than_one_folding_step_is_folded_whole():
    layer = make_layer(kv_heads=1, groups=1, window=5)
    keys, values = make_rows(1, 2 * ROWS_PER_STEP + 3, kv_heads=1)

    layer.update(keys, values)

    check_state(layer, [(keys[0], values[0])])


def test_double_precision_stays_double_precision():
    layer = make_layer(dtype=torch.float64)
    keys, values = make_rows(2, 100, dtype=torch.float64)

    for k, v in zip(keys.split(9, dim=2), values.split(9, dim=2)):
        layer.update(k, v)

    assert {t.dtype for t in (layer.keys, layer.values, layer.summary_values, layer.summary_lse)} == {torch.float64}
    check_state(layer, list(zip(keys, values)), atol=1e-12)


@pytest.mark.parametrize("rows, queries", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_summary_has_the_wider_precision_of_drafter_and_target(rows, queries):
    layer = make_layer(dtype=queries)
    keys, values = make_rows(1, 30, dtype=rows)

    layer.update(keys, values)

    assert layer.summary_values.dtype == layer.summary_lse.dtype == torch.float64
    check_state(layer, list(zip(keys, values)), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_are_folded_in_single_precision(dtype):
    layer = make_layer(dtype=dtype)
    keys, values = make_rows(2, 200, dtype=dtype)

    for k, v in zip(keys.split(3, dim=2), values.split(3, dim=2)):
        layer.update(k, v)

    assert layer.keys.dtype == layer.values.dtype == dtype
    assert layer.summary_values.dtype == layer.summary_lse.dtype == torch.float32
    check_state(layer, list(zip(keys, values)))


def test_rows_of_another_dtype_are_folded_before_the_window_rounds_them():
    layer = make_layer(dtype=torch.bfloat16, window_dtype=torch.bfloat16)
    keys, values = make_rows(1, 50)

    layer.update(keys, values)

    assert layer.keys.dtype == torch.bfloat16
    check_state(layer, list(zip(keys, values)))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sharp_scores_do_not_overflow(sign):
    layer = make_layer(window=4)
    keys, values = make_rows(1, 40)
    # Scores up to +-1e4, growing and shrinking in turn, so that every update moves the reference by a lot.
    scale = torch.linspace(0, 1, 40).mul(torch.pi * 6).cos() * 1e4 * sign
    direction = layer.summary_queries[0, 0] / layer.summary_queries[0, 0].square().sum() * HEAD_DIM**0.5
    keys = (scale[:, None] * direction).expand_as(keys).contiguous()

    for k, v in zip(keys.split(4, dim=2), values.split(4, dim=2)):
        layer.update(k, v)

    scores = torch.einsum("rd,td->rt", layer.summary_queries[0], keys[0, 0]) * HEAD_DIM**-0.5
    assert scores.abs().max() > 9e3
    assert layer.summary_values.isfinite().all() and layer.summary_lse.isfinite().all()
    expected_values, expected_lse = recomputed(layer.summary_queries, keys[0], values[0])
    # fp32 scores of 1e4 are exact to 1e-3, so their exponentials are too.
    torch.testing.assert_close(layer.summary_lse[0].double(), expected_lse, atol=5e-3, rtol=1e-6)
    torch.testing.assert_close(layer.summary_values[0].double(), expected_values, atol=2e-2, rtol=0.0)


def test_folding_is_differentiable_in_the_summary_queries():
    queries = torch.randn(4, 3, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    keys, values = make_rows(2, 11, dtype=torch.float64)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, :5] = False  # the first fold below sees no row of this sequence

    def summary(queries):
        state = torch.zeros(2, 4, 3, HEAD_DIM, dtype=torch.float64), torch.full((2, 4, 3), -torch.inf).double()
        for step in (slice(0, 4), slice(4, 11)):
            state = fold_rows(queries, keys[:, :, step], values[:, :, step], *state, mask[:, step])
        return state

    assert torch.autograd.gradcheck(summary, queries)


# --- size ---------------------------------------------------------------------------------------------------------


def shape_8b():
    """State shapes of the released 8B drafter, without its weights."""
    config = LongSparkConfig(mask_token_id=151669)
    queries = torch.randn(5, 32, 16, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    return config, LongSparkCache(config, queries, dtype=torch.bfloat16)


def absorb_8b(cache, start, end):
    for first in range(start, end, 4096):
        rows = torch.randn(1, 8, min(4096, end - first), 128, dtype=torch.bfloat16)
        cache.layers[0].update(rows, rows)
        for layer in cache.layers[1:]:  # one layer does the whole scan; the others show that the rest is as constant
            layer.update(rows[:, :, -8:], rows[:, :, -8:])
    cache.set_boundary(torch.randn(1, 5, 4096, dtype=torch.bfloat16))


def test_state_of_the_8b_shape_is_6604800_bytes_at_1k_and_at_128k_rows():
    config, cache = shape_8b()
    assert cache.nbytes == 0

    absorb_8b(cache, 0, 1024)
    at_1k, tensors = cache.nbytes, state_tensors(cache)
    absorb_8b(cache, 1024, 131072)

    assert cache.get_seq_length() == 131072
    assert at_1k == cache.nbytes == config.state_bytes() == 6_604_800
    # The format file's formula, section 3.3, and the figure we advertise.
    assert at_1k == 5 * 256 * 8 * 128 * 2 * 2 + 5 * 32 * 16 * 129 * 4 + 5 * 4096 * 2
    assert round(at_1k / 2**20, 1) == 6.3
    assert state_tensors(cache) == tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_config_foretells_the_state_size(dtype, batch_size):
    cache, config = make_cache(batch_size=batch_size, dtype=dtype)
    assert cache.nbytes == config.state_bytes(dtype, batch_size)


def make_cache(batch_size=1, num_rows=20, dtype=torch.float32, window=16):
    """A state of two draft layers, filled with random rows."""
    config = LongSparkConfig(
        vocab_size=32,
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        num_target_layers=2,
        window_size=window,
        num_summary_queries=3,
        mask_token_id=31,
    )
    queries = torch.randn(2, 4, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache = LongSparkCache(config, queries, dtype=dtype)
    for layer in range(2):
        cache.update(*make_rows(batch_size, num_rows, dtype=dtype, seed=layer), layer)
    cache.set_boundary(torch.randn(batch_size, 2, 24, dtype=dtype))
    return cache, config


def state_tensors(cache):
    """Where every tensor of a state lies, and its shape."""
    names = ("keys", "values", "summary_values", "summary_lse", "num_rows")
    tensors = [getattr(layer, name) for layer in cache.layers for name in names] + [cache.boundary]
    return [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]


def contents(cache):
    names = ("keys", "values", "summary_values", "summary_lse", "num_rows")
    return [getattr(layer, name).clone() for layer in cache.layers for name in names] + [cache.boundary.clone()]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=10))
def test_updates_allocate_nothing_that_stays(steps):
    cache, _ = make_cache(batch_size=2)
    tensors, size = state_tensors(cache), cache.nbytes

    for seed, num_rows in enumerate(steps):
        for layer in range(2):
            window_keys, window_values = cache.update(*make_rows(2, num_rows, seed=seed), layer)
            assert window_keys is cache.layers[layer].keys and window_values is cache.layers[layer].values
        cache.set_boundary(torch.randn(2, 2, 24))

    assert state_tensors(cache) == tensors and cache.nbytes == size
    assert cache.get_seq_length() == 20 + sum(steps)


def test_state_keeps_no_reference_to_the_targets_rows():
    cache, _ = make_cache()
    keys, values = make_rows(1, 8)
    boundary = torch.randn(1, 2, 24)
    cache.update(keys, values, 0)
    cache.set_boundary(boundary)
    before = contents(cache)

    for tensor in (keys, values, boundary):
        tensor.fill_(torch.nan)

    assert all(map(torch.equal, contents(cache), before))


def test_summary_queries_are_referred_to_and_not_counted():
    queries = torch.randn(2, 4, 3, HEAD_DIM)
    _, config = make_cache()
    cache = LongSparkCache(config, queries)
    assert [layer.summary_queries.data_ptr() for layer in cache.layers] == [q.data_ptr() for q in queries]
    assert cache.nbytes == 0


# --- the Cache interface ------------------------------------------------------------------------------------------


def test_get_seq_length_counts_committed_rows_of_the_longest_sequence():
    layer = make_layer(window=4)
    assert layer.get_seq_length() == 0
    mask = torch.tensor([[False, False, True], [False, True, True]])
    layer.update(*make_rows(2, 3), mask)
    assert layer.get_seq_length() == 2
    layer.update(*make_rows(2, 30))
    assert layer.get_seq_length() == 32
    assert layer.num_rows.tolist() == [31, 32]


def test_reset_forgets_everything_and_keeps_the_tensors():
    cache, _ = make_cache(batch_size=2)
    tensors = state_tensors(cache)

    cache.reset()

    assert state_tensors(cache) == tensors and cache.get_seq_length() == 0
    keys, values = make_rows(2, 5, seed=9)
    for index, layer in enumerate(cache.layers):
        check_state(layer, [(keys[b][:, :0], values[b][:, :0]) for b in range(2)])
        cache.update(keys, values, index)
        check_state(layer, list(zip(keys, values)))
    assert (cache.boundary == 0).all()


def test_reset_of_an_empty_state_is_allowed():
    _, config = make_cache()
    cache = LongSparkCache(config, torch.randn(2, 4, 3, HEAD_DIM))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0


def test_batch_select_indices_keeps_the_chosen_sequences():
    cache, _ = make_cache(batch_size=3)
    before = contents(cache)

    cache.batch_select_indices(torch.tensor([2, 0]))

    assert all(torch.equal(now, then[[2, 0]]) for now, then in zip(contents(cache), before))
    more = make_rows(2, 6, seed=5)
    rows = make_rows(3, 20, seed=0)
    cache.update(*more, 0)
    committed = [torch.cat([first[[2, 0]], second], dim=2) for first, second in zip(rows, more)]
    check_state(cache.layers[0], list(zip(*committed)))


def test_batch_repeat_interleave_repeats_every_sequence():
    cache, _ = make_cache(batch_size=2)
    before = contents(cache)

    cache.batch_repeat_interleave(3)

    assert all(torch.equal(now, then[[0, 0, 0, 1, 1, 1]]) for now, then in zip(contents(cache), before))
    more = make_rows(6, 4, seed=5)
    rows = make_rows(2, 20, seed=0)
    cache.update(*more, 0)
    committed = [torch.cat([first.repeat_interleave(3, 0), second], dim=2) for first, second in zip(rows, more)]
    check_state(cache.layers[0], list(zip(*committed)))


def test_deep_copy_is_independent():
    cache, _ = make_cache(batch_size=2)
    before = contents(cache)
    fork = copy.deepcopy(cache)
    assert all(map(torch.equal, contents(fork), before))

    for layer in range(2):
        fork.update(*make_rows(2, 7, seed=8), layer)
    fork.set_boundary(torch.zeros(2, 2, 24))
    fork.batch_select_indices(torch.tensor([1]))

    assert all(map(torch.equal, contents(cache), before))
    assert fork.get_seq_length() == 27 and cache.get_seq_length() == 20


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys, values, named",
    [
        pytest.param((3, 2, 4, 8), (3, 2, 4, 8), ["(3, 2, 4, 8)", "2 sequences"], id="batch size"),
        pytest.param((2, 1, 4, 8), (2, 1, 4, 8), ["(2, 1, 4, 8)", "2 heads"], id="key/value heads"),
        pytest.param((2, 2, 4, 6), (2, 2, 4, 6), ["(2, 2, 4, 6)", "heads of 8"], id="head_dim"),
        pytest.param((2, 2, 4, 8), (2, 2, 5, 8), ["(2, 2, 4, 8)", "(2, 2, 5, 8)"], id="as many values as keys"),
    ],
)
def test_rows_that_do_not_fit_a_filled_state_raise(keys, values, named):
    layer = make_layer()
    layer.update(*make_rows(2, 5))
    before = layer.summary_values.clone(), layer.keys.clone()

    with pytest.raises(ValueError) as error:
        layer.update(torch.randn(keys), torch.randn(values))

    assert all(name in str(error.value) for name in named), error.value
    assert torch.equal(layer.summary_values, before[0]) and torch.equal(layer.keys, before[1])
    assert layer.get_seq_length() == 5


@pytest.mark.parametrize(
    "keys, values, named",
    [
        pytest.param((1, 2, 4, 6), (1, 2, 4, 6), ["heads of 6", "heads of 8"], id="head_dim"),
        pytest.param((1, 3, 4, 8), (1, 3, 4, 8), ["3 heads", "4 query heads"], id="heads that do not divide"),
        pytest.param((1, 2, 4, 8), (1, 2, 4, 6), ["heads of 6", "of 8"], id="values of another head_dim"),
        pytest.param((1, 2, 4, 8), (1, 2, 3, 8), ["(1, 2, 4, 8)", "(1, 2, 3, 8)"], id="as many values as keys"),
    ],
)
def test_first_rows_that_do_not_fit_the_summary_queries_raise(keys, values, named):
    layer = make_layer()
    with pytest.raises(ValueError) as error:
        layer.update(torch.randn(keys), torch.randn(values))
    assert all(name in str(error.value) for name in named), error.value
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize("shape", [(2, 3), (2, 5), (3, 4)])
def test_row_mask_that_does_not_fit_its_rows_raises(shape):
    layer = make_layer()
    with pytest.raises(ValueError, match=rf"\({shape[0]}, {shape[1]}\)"):
        layer.update(*make_rows(2, 4), torch.ones(shape, dtype=torch.bool))
