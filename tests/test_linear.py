"""Products of a weight with a few rows: what `linear` computes, the other way round where that is faster."""

import functools
import threading

import pytest
import torch
from torch.nn import functional as F

from longspark_hf import linear_longspark
from longspark_hf.linear_longspark import LEAST_WEIGHT, MOST_ROWS, few_rows, pays, weight_first
from longspark_hf.patching_longspark import patched

from .targets import TARGETS, another_copy, build, interrupted, left_on, random_drafter, scripted_drafter


@pytest.fixture
def taken(monkeypatch):
    """Numbers of rows of products that were computed the other way round, on a machine where that always pays."""
    rows = []

    def counting(input, weight, bias=None):
        rows.append(input.numel() // input.shape[-1])
        return weight_first(input, weight, bias)

    monkeypatch.setattr(linear_longspark, "pays", lambda num_rows, num_threads: True)
    monkeypatch.setattr(linear_longspark, "weight_first", counting)
    return rows


@pytest.mark.parametrize("shape", [(2, 40), (1, 5, 40), (3, 2, 4, 40)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_what_linear_does_and_its_gradients(shape, bias):
    layer = torch.nn.Linear(40, 30, bias=bias).double()
    input = torch.randn(shape, dtype=torch.double, requires_grad=True)
    output, expected = weight_first(input, layer.weight, layer.bias), layer(input)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected)
    parameters = [input, *layer.parameters()]
    for found, wanted in zip(
        torch.autograd.grad(output.sin().sum(), parameters), torch.autograd.grad(expected.sin().sum(), parameters)
    ):
        torch.testing.assert_close(found, wanted)


def test_only_large_products_of_few_fp32_rows_within_a_pass_are_turned_round(taken):
    weight = torch.randn(LEAST_WEIGHT // 64, 64)

    def ask(num_rows, dtype=torch.float32, weight=weight):
        before = len(taken)
        output = F.linear(torch.randn(num_rows, 64, dtype=dtype), weight.to(dtype))
        assert output.shape == (num_rows, len(weight))
        return len(taken) - before

    assert not ask(5)  # outside of a pass
    with few_rows():
        assert [ask(n) for n in (0, 1, 2, MOST_ROWS, MOST_ROWS + 1)] == [0, 0, 1, 1, 0]
        assert not ask(5, weight=weight[:-1])
        assert not ask(5, weight=torch.randn(64, len(weight)).T)
        assert not ask(5, dtype=torch.bfloat16) and not ask(5, dtype=torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            assert not ask(5)
        torch.use_deterministic_algorithms(True)
        try:
            assert not ask(5)
        finally:
            torch.use_deterministic_algorithms(False)
        assert ask(5)
    assert not ask(5)


def test_what_linear_takes_or_refuses_beside_plain_tensors_stays_its_own(taken):
    weight = torch.randn(LEAST_WEIGHT // 64, 64)
    input, bias = torch.randn(5, 64), torch.randn(len(weight))
    with few_rows():
        assert F.linear(input, weight, bias).shape == (5, len(weight)) and taken == [5]
        torch.testing.assert_close(F.linear(input, weight.to_sparse_csr()), F.linear(input, weight))
        with pytest.raises(RuntimeError):
            F.linear(input, weight, bias.double())
        with pytest.raises(RuntimeError):
            F.linear(input[:, 1:], weight)
    assert taken == [5, 5]


def test_no_pass_is_kept_waiting_by_the_timing(qwen3, prompt, monkeypatch):
    timed, passes = [], []
    forward = qwen3.forward
    monkeypatch.setattr(qwen3, "forward", lambda *a, **k: passes.append(1) or forward(*a, **k))
    monkeypatch.setattr(linear_longspark, "LEAST_WEIGHT", 0)
    monkeypatch.setattr(linear_longspark, "pays", lambda num_rows, _: timed.append((num_rows, len(passes))))
    qwen3.generate(prompt.expand(3, -1), assistant_model=random_drafter(qwen3), do_sample=False, max_new_tokens=12)
    assert {rows for rows, _ in timed} == {rows for rows, seen in timed if seen == 0} == {2, 4, 8, 16}


def test_a_wrapper_of_somebody_else_around_it_stays(taken):
    stock = F.linear
    with few_rows():
        ours = F.linear
        F.linear = theirs = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    assert F.linear is theirs
    with few_rows():
        F.linear(torch.randn(5, 64), torch.randn(LEAST_WEIGHT // 64, 64))
    assert taken == [5] and F.linear is theirs
    F.linear = stock


@pytest.mark.parametrize("line", range(1, 8))
def test_ctrl_c_on_the_way_in_leaves_torch_as_it_was(line):
    stock = F.linear
    with pytest.raises(KeyboardInterrupt), interrupted(patched, line) as end:
        with few_rows():
            end()
            raise KeyboardInterrupt
    assert F.linear is stock


def test_a_weight_of_another_kind_is_its_own_business(taken):
    class Quantized(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    asked = []
    weight = torch.randn(LEAST_WEIGHT // 64, 64).as_subclass(Quantized)
    with few_rows():
        F.linear(torch.randn(5, 64), weight)
    assert not taken and torch._C._nn.linear in asked


def test_behind_a_pass_torch_is_as_it_was(taken):
    stock = F.linear
    with pytest.raises(KeyError), few_rows(), few_rows():
        raise KeyError
    assert F.linear is stock
    with few_rows():
        with few_rows():
            pass
        F.linear(torch.randn(5, 64), torch.randn(LEAST_WEIGHT // 64, 64))  # the outer one goes on
    assert taken == [5] and F.linear is stock


def test_other_threads_keep_their_products(taken):
    input, weight = torch.randn(5, 64), torch.randn(LEAST_WEIGHT // 64, 64)
    with few_rows():
        thread = threading.Thread(target=F.linear, args=(input, weight))
        thread.start()
        thread.join()
        assert not taken


def test_two_copies_of_the_module_restore_torch_together(monkeypatch):
    other = another_copy(monkeypatch, linear_longspark)
    assert other.patched is not linear_longspark.patched
    stock = F.linear
    with other.few_rows():
        with few_rows():
            pass
        assert F.linear is not stock
    assert F.linear is stock


@pytest.mark.parametrize("faster", ["linear", "weight_first"])
def test_it_is_measured_which_way_is_faster(monkeypatch, faster):
    # One of them does nothing, which no machine can beat.
    monkeypatch.setattr(torch._C._nn, "linear", lambda *a: None) if faster == "linear" else None
    monkeypatch.setattr(linear_longspark, "weight_first", lambda *a: None) if faster == "weight_first" else None
    state = torch.get_rng_state()
    assert pays.__wrapped__(5, 1) == (faster == "weight_first")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_output_is_the_targets_with_all_products_turned_round(
    built, prompt, monkeypatch, taken, name, batch_size
):
    monkeypatch.setattr(linear_longspark, "LEAST_WEIGHT", 0)
    target = built(name)
    batch = torch.cat([prompt.roll(shift, dims=1) for shift in range(batch_size)])
    expected = target.generate(batch, do_sample=False, max_new_tokens=24)
    assert not taken
    drafter = scripted_drafter(target, list(expected), wrong_at=[23, 30])
    output = target.generate(batch, assistant_model=drafter, do_sample=False, max_new_tokens=24)
    assert torch.equal(output, expected)
    assert taken and left_on(target) == []


def test_a_draft_pass_is_turned_round_too_and_drafts_the_same(qwen3, prompt, monkeypatch, taken):
    options = {"assistant_model": random_drafter(qwen3), "do_sample": False, "max_new_tokens": 16}
    expected = qwen3.generate(prompt, **options)
    accepted = options["assistant_model"].stats.accepted_by_position
    assert not taken
    monkeypatch.setattr(linear_longspark, "LEAST_WEIGHT", 0)
    assert torch.equal(qwen3.generate(prompt, **options), expected)
    assert {options["assistant_model"].config.block_size, 8} <= set(taken) and 1 not in taken
    assert options["assistant_model"].stats.accepted_by_position == accepted


def test_what_is_compiled_stays_one_graph(prompt, monkeypatch, taken):
    monkeypatch.setattr(linear_longspark, "LEAST_WEIGHT", 0)
    target = build("llama")
    expected = target.generate(prompt, do_sample=False, max_new_tokens=12)
    drafter = random_drafter(target)
    drafter.compile_draft(backend="eager", fullgraph=True)
    torch._dynamo.reset()
    for layer in target.model.layers:
        layer.mlp.compile(backend="eager", fullgraph=True)
    output = target.generate(prompt, assistant_model=drafter, do_sample=False, max_new_tokens=12)
    assert torch.equal(output, expected)
    torch._dynamo.reset()
