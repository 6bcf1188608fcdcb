"""What a round does beside its arithmetic: looks at the device, transfers to a drafter elsewhere, faults on the way."""

import contextlib
import sys

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from .targets import TARGETS, build, cache_of, drafter_config, left_on, random_drafter
from .test_batches import NEW, answers, generate, make_drafter  # noqa: F401


LOOKS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy")


@contextlib.contextmanager
def counted_looks(monkeypatch):
    """The files in which a value leaves a tensor, once for each time: it would wait for a GPU."""
    looks = []

    def counting(original):
        def look(self, *args, **kwargs):
            looks.append(sys._getframe(1).f_code.co_filename)
            return original(self, *args, **kwargs)

        return look

    with monkeypatch.context() as patch:
        for name in LOOKS:
            patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
        yield looks


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_round_looks_at_the_device_once(built, answers, monkeypatch, name, size, do_sample):  # noqa: F811
    target = built(name)
    batch, _, _ = answers(name, 4)
    batch = {"input_ids": batch["input_ids"][:size]}  # without padding the masks of transformers need no look either
    options = {"do_sample": do_sample} | ({"temperature": 0.7, "top_k": 0, "top_p": 0.9} if do_sample else {})
    passes = []
    handle = target.register_forward_hook(lambda *_: passes.append(1))
    with counted_looks(monkeypatch) as looks:
        generate(target, batch, random_drafter(target), **options)
    handle.remove()
    ours = [name for name in looks if name.endswith("_longspark.py")]
    assert len(passes) > 10
    # Beside one for each pass, some at the beginning: `generate` looks at the prompt, we at its padding and pad token.
    assert len(ours) <= len(passes) + 2 and len(looks) <= len(passes) + 10


def test_a_drafter_elsewhere_receives_views_of_fixed_size_only(qwen3, prompt):
    output = generate(qwen3, {"input_ids": prompt}, random_drafter(qwen3), return_dict_in_generate=True)
    layer = cache_of(output).longspark_state[0].layers[0]
    row = 2 * qwen3.config.num_key_value_heads * qwen3.config.head_dim * 4
    assert layer.transfer(8) == (8 * row, True), "after a round its rows are less than the state"
    assert layer.transfer(4000) == layer.transfer(100_000) and not layer.transfer(4000)[1]
    assert layer.transfer(4000)[0] < 4 * layer.nbytes


def test_one_device_transfers_nothing(qwen3, answers):  # noqa: F811
    batch, prompts, truth = answers("qwen3", 2)
    drafter = make_drafter("mixed", qwen3, prompts, truth)
    generate(qwen3, batch, drafter)
    assert drafter.stats.transferred_bytes == 0


class Failing(LogitsProcessor, BaseStreamer):
    """Something of the user's that fails at its n-th call."""

    def __init__(self, after, error):
        self.left, self.error = after, error

    def _count(self):
        self.left -= 1
        if self.left < 0:
            raise self.error

    def __call__(self, input_ids, scores):
        self._count()
        return scores

    def put(self, value):
        self._count()

    def end(self):
        pass


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("where", ["draft", "target", "head", "processor", "streamer"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_fault_at_any_step_of_a_round_leaves_nothing(qwen3, answers, size, where, error):  # noqa: F811
    batch, _, truth = answers("qwen3", 4)
    batch = {name: value[:size] for name, value in batch.items()}
    for after in (0, 5):
        drafter, failing, handle = random_drafter(qwen3), Failing(after, error), None
        options = {}
        modules = {"draft": drafter.layers[2], "target": qwen3.get_decoder().layers[3], "head": qwen3.lm_head}
        if where in modules:
            handle = modules[where].register_forward_hook(lambda *_: failing._count())  # noqa: B023
        elif where == "processor":
            options["logits_processor"] = LogitsProcessorList([failing])
        else:
            options["streamer"] = failing
        with pytest.raises(type(error)):
            generate(qwen3, batch, drafter, max_new_tokens=20, **options)
        if handle is not None:
            handle.remove()
        assert left_on(qwen3) == [] and drafter.stats is None
        for assistant in (None, drafter):
            output = generate(qwen3, batch, assistant, max_new_tokens=12)
            assert torch.equal(output[:, -12:], torch.stack(truth[:size])[:, :12])


def test_the_tests_have_targets_of_both_kinds():
    assert drafter_config(build("qwen3")).num_hidden_layers == 5 and "gemma3" in TARGETS
