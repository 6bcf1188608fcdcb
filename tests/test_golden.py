"""Golden vectors: an independent float64 implementation of the checkpoint format, against ours loaded as released."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from longspark_hf import LongSparkDrafter
from longspark_hf.target_longspark import BorrowedTarget


GOLDEN = Path(os.environ.get("LONGSPARK_GOLDEN", Path(__file__).parents[1] / "../shared/golden"))
CASES = sorted(path.parent for path in GOLDEN.glob("*/case.json"))
RELEASED_KEYS = {
    "hidden": "hidden_size",
    "intermediate": "qwen_intermediate_size",
    "Hq": "qwen_num_attention_heads",
    "Hkv": "num_key_value_heads",
    "d": "head_dim",
    "vocab": "vocab_size",
    "num_target_layers": "num_target_layers",
    "B": "block_size",
    "R": "global_memory_slots",
    "W": "raw_target_rows",
    "rank": "parallel_markov_rank",
    "eps": "qwen_rms_norm_eps",
    "base": "qwen_rope_theta",
    "mask": "mask_token_id",
    "n": "parallel_mixer_layers",
    "target_layer_ids": "target_layer_ids",
}
ROUNDS = (0, 1)


def close(actual: torch.Tensor, expected: np.ndarray) -> None:
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, torch.from_numpy(expected), atol=1e-6, rtol=0.0)


def write_released(case: dict, weights: dict[str, np.ndarray], folder: Path) -> None:
    """A checkpoint as the authors publish it: their tensor names, their config keys."""
    config = {released: case[ours] for ours, released in RELEASED_KEYS.items()}
    config |= {
        "model_type": "draftfreekv",
        "architectures": ["DraftFreeKVModel"],
        "draft_mode": "parallel_shifted_qwen",
        "parallel_markov_head_type": "vanilla",
        "target_layer_policy": None,
        "local_draft_rows": case["B"],
        "max_accepted_tokens": case["B"] + 1,
        "global16_raw256_enabled": True,
        "global_memory_source_window": "full",
        "global_checkpoint_compatibility": "retrain_required",
        "global_query_mode": "learned",
        "target_kv_memory_layout": "direct",
        "target_kv_window_size": None,
        "memory_query_mode": "hidden_r16",
        "adapter_rank": 512,
        "training_objective": "dspark_l1",
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: torch.from_numpy(weights[name]) for name in weights}, folder / "model.safetensors", {"format": "pt"}
    )


class GoldenCase:
    """One case: the drafter, its stub target, and the two rounds."""

    def __init__(self, path: Path, folder: Path):
        self.case = json.loads((path / "case.json").read_text())
        self.weights, self.inputs, self.expected = (
            dict(np.load(path / f"{name}.npz")) for name in ("weights", "target", "expected")
        )
        write_released(self.case, self.weights, folder)
        self.drafter = LongSparkDrafter.from_pretrained(folder, dtype=torch.float64).eval()
        inputs = {name: torch.from_numpy(array) for name, array in self.inputs.items()}
        self.keys, self.values, self.boundary = (inputs[name].double() for name in ("K", "V", "boundary"))
        self.anchors, self.teacher = inputs["anchors"], inputs["teacher"]
        self.lengths = (self.case["L"], self.keys.shape[2])
        self.target = self._stub_target(inputs)

    def _stub_target(self, inputs: dict[str, torch.Tensor]) -> BorrowedTarget:
        hidden, vocab = self.case["hidden"], self.case["vocab"]
        embed_tokens = nn.Embedding(vocab, hidden, _weight=inputs["embed"].double())
        final_norm = nn.RMSNorm(hidden, eps=self.case["eps"], dtype=torch.float64)
        lm_head = nn.Linear(hidden, vocab, bias=False, dtype=torch.float64)
        with torch.no_grad():
            final_norm.weight.copy_(inputs["final_norm"])
            lm_head.weight.copy_(inputs["lm_head"])
        return BorrowedTarget(embed_tokens, final_norm, lm_head)

    def state(self, number: int, steps: list[int] | None = None, dtype: torch.dtype = torch.float64):
        """The drafter's state in a round; `steps` says where the rows before it were cut, by default nowhere."""
        keys, values = self.keys.to(dtype), self.values.to(dtype)
        cache = self.drafter.new_cache()
        bounds = [0, *(steps or []), self.lengths[number]]
        for start, end in zip(bounds, bounds[1:]):
            for layer in range(self.case["n"]):
                cache.update(keys[None, layer, :, start:end], values[None, layer, :, start:end], layer)
        cache.set_boundary(self.boundary[None, number])
        return cache

    def round(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Anchor and its position."""
        return self.anchors[None, number], torch.tensor([self.lengths[number]])

    @torch.no_grad()
    def base_logits(self, number: int) -> torch.Tensor:
        output = self.drafter(*self.round(number), self.state(number), self.target)
        return self.target.lm_head(output.hidden_states)


@pytest.fixture(
    scope="module",
    params=[pytest.param(path, id=path.name) for path in CASES]
    or [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=f"no golden vectors in {GOLDEN}"))],
)
def golden(request, tmp_path_factory):
    return GoldenCase(request.param, tmp_path_factory.mktemp("released"))


def check_summary(golden: GoldenCase, cache, number: int) -> None:
    close(torch.cat([layer.summary_values for layer in cache.layers]), golden.expected[f"summary_values_{number}"])
    close(torch.cat([layer.summary_lse for layer in cache.layers]), golden.expected[f"summary_lse_{number}"])


@pytest.mark.parametrize("number", ROUNDS)
def test_golden_summary_from_scratch(golden, number):
    check_summary(golden, golden.state(number), number)


def test_golden_summary_of_round_1_follows_from_round_0_by_the_incremental_update(golden):
    check_summary(golden, golden.state(1, steps=[golden.lengths[0]]), 1)


@pytest.mark.parametrize("number", ROUNDS)
def test_golden_state_does_not_depend_on_how_the_rows_were_chunked(golden, number):
    whole = golden.state(number)
    rng, length = np.random.default_rng(golden.lengths[number]), golden.lengths[number]
    for _ in range(3):
        steps = sorted(rng.choice(np.arange(1, length), size=min(6, length - 1), replace=False).tolist())
        chunked = golden.state(number, steps)
        check_summary(golden, chunked, number)
        for ours, theirs in zip(chunked.layers, whole.layers):
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_golden_rows_in_single_precision_keep_the_summary_of_a_double_precision_drafter(golden):
    check_summary(golden, golden.state(1, steps=[golden.lengths[0]], dtype=torch.float32), 1)


@pytest.mark.parametrize("number", ROUNDS)
def test_golden_boundary_fusion(golden, number):
    fused = golden.drafter.boundary_fusion(golden.state(number).boundary.flatten(1))
    close(fused[0].detach(), golden.expected[f"boundary_fusion_{number}"])


@pytest.mark.parametrize("number", ROUNDS)
def test_golden_base_logits(golden, number):
    close(golden.base_logits(number)[0], golden.expected[f"base_logits_{number}"])


@pytest.mark.parametrize("number", ROUNDS)
def test_golden_teacher_forced_logits(golden, number):
    previous_ids = torch.cat([golden.anchors[number, None], golden.teacher[number]])[None]
    with torch.no_grad():
        logits = golden.drafter.corrected_logits(golden.base_logits(number), previous_ids)
    close(logits[0], golden.expected[f"teacher_forced_logits_{number}"])


@pytest.mark.parametrize("number", ROUNDS)
def test_golden_greedy_draft(golden, number):
    draft = golden.drafter.draft(*golden.round(number), golden.state(number), golden.target)
    assert draft.token_ids[0].tolist() == golden.expected[f"greedy_tokens_{number}"].tolist()
    close(draft.logits[0], golden.expected[f"greedy_logits_{number}"])
    assert draft.finite.all() and draft.possible.all()


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_golden_shorter_draft_is_a_prefix_of_the_whole(golden, num_tokens):
    draft = golden.drafter.draft(*golden.round(1), golden.state(1), golden.target, num_tokens=num_tokens)
    assert draft.token_ids[0].tolist() == golden.expected["greedy_tokens_1"][:num_tokens].tolist()
    close(draft.logits[0], golden.expected["greedy_logits_1"][:num_tokens])


def test_golden_rounds_batch_together(golden):
    cache = golden.drafter.new_cache()
    lengths = torch.tensor(golden.lengths)
    row_mask = torch.arange(golden.lengths[1]) < lengths[:, None]
    for layer in range(golden.case["n"]):
        rows = (states[None, layer].expand(2, -1, -1, -1) for states in (golden.keys, golden.values))
        cache.update(*rows, layer, row_mask)
    cache.set_boundary(golden.boundary)
    draft = golden.drafter.draft(golden.anchors, lengths, cache, golden.target)
    for number in ROUNDS:
        close(draft.logits[number], golden.expected[f"greedy_logits_{number}"])


def test_golden_released_checkpoint_is_saved_under_our_names_and_loads_back_equal(golden, tmp_path):
    golden.drafter.save_pretrained(tmp_path / "ours")
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        saved = set(file.keys())
    assert saved == set(golden.drafter.state_dict()) and not saved & set(golden.weights)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "longspark"

    again = LongSparkDrafter.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    assert len(saved) == len(again.state_dict())
    for name, tensor in golden.drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    draft = again.draft(*golden.round(1), golden.state(1), golden.target)
    close(draft.logits[0], golden.expected["greedy_logits_1"])
