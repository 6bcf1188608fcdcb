"""The draft pass by itself: compiled, in another dtype than the target, over the draft vocabulary alone."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoModel,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longspark_hf import LongSparkDrafter

from .targets import random_drafter
from .test_modeling import fill, make_drafter, make_target, training_batch


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small_drafter(target):
    """Of two layers, which is compiled soon: of a sliding and a full one where the target has both."""
    return random_drafter(target, target_layer_ids=[1, 5])


def generate(target, prompt, drafter=None, max_new_tokens=30, **kwargs):
    return target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=drafter,
        max_new_tokens=max_new_tokens,
        **kwargs,
    )


# --- compiled -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "phi"])
@pytest.mark.parametrize("size", [1, 3])
def test_compiled_drafts_are_the_same(built, prompt, name, size):
    target, counter = built(name), CompileCounter()
    prompts = torch.cat([prompt.roll(shift, dims=1) for shift in range(size)])
    drafter = small_drafter(target)
    compiled = copy.deepcopy(drafter)
    compiled.compile_draft(backend=counter, fullgraph=True)

    answers, stats = [], []
    for one in (drafter, compiled):
        answers.append(generate(target, prompts, one, do_sample=False))
        stats.append((one.stats.rounds, one.stats.accepted_by_position))

    assert counter.frame_count >= 1
    assert torch.equal(*answers) and stats[0] == stats[1]
    assert torch.equal(answers[1], generate(target, prompts, do_sample=False))


@pytest.mark.parametrize("options", [{}, {"boundary_residual": -1, "qk_norm": False}, {"draft_vocab_size": 20}])
def test_compiled_pass_has_the_same_logits(options):
    drafter, target = make_drafter(**options), make_target()
    views = fill(drafter)
    expected = drafter.draft(*views, target)
    drafter.compile_draft(backend="eager", fullgraph=True)
    draft = drafter.draft(*views, target)
    assert torch.equal(draft.logits, expected.logits) and torch.equal(draft.token_ids, expected.token_ids)


@pytest.mark.parametrize("do_sample", [False, True])
def test_growing_context_does_not_compile_again(qwen3, prompt, do_sample):
    drafter, counter = small_drafter(qwen3), CompileCounter()
    drafter.compile_draft(backend=counter, fullgraph=True)
    generate(qwen3, prompt, drafter, max_new_tokens=8, do_sample=do_sample)  # the window is not full yet
    assert counter.frame_count == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        generate(qwen3, prompt, drafter, max_new_tokens=200, do_sample=do_sample)
        generate(qwen3, prompt.repeat(1, 10), drafter, max_new_tokens=30, do_sample=do_sample)
    assert counter.frame_count == 1


def test_batches_of_any_size_compile_a_few_times(qwen3, prompt):
    drafter, counter = small_drafter(qwen3), CompileCounter()
    drafter.compile_draft(backend=counter, fullgraph=True)
    for size in (1, 2, 3, 5, 7, 2, 1):
        generate(qwen3, prompt.expand(size, -1), drafter, max_new_tokens=8, do_sample=False)
    assert counter.frame_count <= 3, "one sequence, the first batch, any batch"


def test_more_variants_than_torch_compiles_run_as_they_are():
    drafter, target = make_drafter(), make_target()
    views = fill(drafter)
    expected = drafter.draft(*views, target).token_ids
    drafter.compile_draft(backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        drafter.draft(*views, target)
        drafter.train()  # another variant
        assert torch.equal(drafter.draft(*views, target).token_ids, expected)


def test_compiling_again_changes_nothing(qwen3, prompt):
    drafter, counter = small_drafter(qwen3), CompileCounter()
    drafter.compile_draft(backend=counter, fullgraph=True)
    generate(qwen3, prompt, drafter, max_new_tokens=8)
    drafter.compile_draft(backend=counter, fullgraph=True)
    generate(qwen3, prompt, drafter, max_new_tokens=8)
    assert counter.frame_count == 1


def test_compiled_drafter_is_saved_and_moved_like_any_other(qwen3, prompt, tmp_path):
    drafter, counter = small_drafter(qwen3), CompileCounter()
    names, parameters = list(drafter.state_dict()), len(list(drafter.parameters()))
    drafter.compile_draft(backend=counter, fullgraph=True)
    generate(qwen3, prompt, drafter, max_new_tokens=8)

    assert list(drafter.state_dict()) == names and len(list(drafter.parameters())) == parameters
    drafter.save_pretrained(tmp_path)
    assert "compile" not in (tmp_path / "config.json").read_text()
    loaded = LongSparkDrafter.from_pretrained(tmp_path)
    expected = generate(qwen3, prompt, do_sample=False)
    for one in (loaded, pickle.loads(pickle.dumps(drafter)), drafter.to(torch.bfloat16)):
        assert torch.equal(generate(qwen3, prompt, one, do_sample=False), expected)


def test_copy_of_a_compiled_drafter_drafts_with_its_own_weights():
    drafter, target = make_drafter(), make_target()
    views = fill(drafter)
    drafter.compile_draft(backend="eager", fullgraph=True)
    before = drafter.draft(*views, target).logits
    other = copy.deepcopy(drafter)
    with torch.no_grad():
        for parameter in other.layers.parameters():
            parameter.mul_(1.5)
    changed = other.draft(*views, target).logits
    assert not torch.allclose(changed, before)
    assert torch.equal(drafter.draft(*views, target).logits, before)
    other.compile_draft(backend="eager", fullgraph=True)
    assert torch.equal(other.draft(*views, target).logits, changed)


def test_weights_changed_after_compiling_are_seen():
    drafter, target = make_drafter(), make_target()
    views = fill(drafter)
    drafter.compile_draft(backend="eager", fullgraph=True)
    drafter.draft(*views, target)
    drafter.load_state_dict(make_drafter(seed=9).state_dict())
    expected = make_drafter(seed=9).draft(*views, target).logits
    assert torch.equal(drafter.draft(*views, target).logits, expected)


def test_training_does_not_run_the_compiled_pass():
    drafter, target, counter = make_drafter(), make_target(), CompileCounter()
    expected = drafter(**training_batch(drafter), target=target).loss
    drafter.compile_draft(backend=counter, fullgraph=True)
    loss = drafter.train()(**training_batch(drafter), target=target).loss
    loss.backward()
    assert counter.frame_count == 0 and torch.equal(loss, expected)
    assert all(parameter.grad is not None for parameter in drafter.parameters())


def test_drafter_of_remote_code_compiles(qwen3, prompt, tmp_path):
    small_drafter(qwen3).save_pretrained(tmp_path)
    drafter = AutoModel.from_pretrained(tmp_path, trust_remote_code=True).eval()
    counter = CompileCounter()
    drafter.compile_draft(backend=counter, fullgraph=True)
    assert torch.equal(generate(qwen3, prompt, drafter, do_sample=False), generate(qwen3, prompt, do_sample=False))
    assert counter.frame_count == 1


# --- another dtype than the target's --------------------------------------------------------------------------------


@pytest.mark.parametrize("size, compiled", [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_bf16_drafter_beside_an_fp32_target_leaves_its_output(built, prompt, name, size, compiled):
    target = built(name)
    prompts = torch.cat([prompt.roll(shift, dims=1) for shift in range(size)])
    drafter = small_drafter(target).to(torch.bfloat16)
    if compiled:
        drafter.compile_draft(backend="eager", fullgraph=True)
    output = generate(target, prompts, drafter, do_sample=False)
    assert torch.equal(output, generate(target, prompts, do_sample=False))
    assert drafter.stats.rounds > 0


# --- over the draft vocabulary --------------------------------------------------------------------------------------

BY_VALUE = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.5)],
    "top-k": [TemperatureLogitsWarper(2.0), TopKLogitsWarper(7)],
    "top-k-above-the-draft-vocabulary": [TopKLogitsWarper(30)],
    "top-p": [TopPLogitsWarper(0.8)],
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", BY_VALUE)
def test_processors_of_values_see_the_draft_vocabulary_only(name, do_sample):
    drafter, target = make_drafter(), make_target()
    ids = torch.arange(1, 37, 2)
    drafter.set_draft_vocabulary(ids)
    views, processors, seen = fill(drafter), LogitsProcessorList(BY_VALUE[name]), []
    processors.append(lambda _, scores: seen.append(scores.shape[-1]) or scores)
    kwargs = {"logits_processor": processors, "input_ids": torch.zeros(2, 9, dtype=torch.long), "do_sample": do_sample}

    torch.manual_seed(0)
    draft = drafter.draft(*views, target, by_value=True, **kwargs)
    assert set(seen) == {len(ids)}
    assert draft.logits.shape[-1] == drafter.config.vocab_size
    assert torch.isin(draft.token_ids, ids).all()

    # The same first distribution as over the whole vocabulary: what follows depends on what was drawn.
    torch.manual_seed(0)
    whole = drafter.draft(*views, target, **kwargs)
    assert set(seen) == {len(ids), drafter.config.vocab_size}
    torch.testing.assert_close(draft.logits[:, 0], whole.logits[:, 0])
    if not do_sample:
        assert torch.equal(draft.token_ids, whole.token_ids)


def test_processors_of_tokens_see_the_whole_vocabulary():
    drafter, target = make_drafter(), make_target()
    drafter.set_draft_vocabulary(torch.arange(1, 37, 2))
    processors = LogitsProcessorList([SuppressTokensLogitsProcessor([3, 5])])
    draft = drafter.draft(*fill(drafter), target, logits_processor=processors, input_ids=torch.zeros(2, 9).long())
    assert (draft.logits[:, :, [3, 5]] == -torch.inf).all()


def test_samples_from_a_draft_vocabulary_follow_the_logits_handed_over():
    drafter, target = make_drafter(), make_target()
    ids = torch.tensor([2, 3, 11, 30])
    drafter.set_draft_vocabulary(ids)
    anchors, position_ids, cache = fill(drafter, batch_size=1)
    cache.batch_select_indices(torch.zeros(20000, dtype=torch.long))
    anchors, position_ids = anchors.expand(20000), position_ids.expand(20000)
    draft = drafter.draft(anchors, position_ids, cache, target, num_tokens=1, do_sample=True)
    expected = draft.logits[0, 0].softmax(dim=-1) * 20000
    observed = draft.token_ids[:, 0].bincount(minlength=drafter.config.vocab_size)
    assert (((observed - expected) ** 2)[ids] / expected[ids]).sum() < 25  # chi-square, 3 degrees of freedom
