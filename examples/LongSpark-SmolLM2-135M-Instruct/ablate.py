"""What each part of the drafter in this folder is worth: the recipe of `train.py`, cut to a small budget, with one change at
a time. Writes `ablations.json`; started again, it goes on with the variants that are not in it.

    OMP_NUM_THREADS=1 python examples/LongSpark-SmolLM2-135M-Instruct/ablate.py --data smollm2_synthetic.jsonl
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import train  # the recipe, beside this file
from transformers import TrainingArguments

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.evaluation.provenance import provenance, write_result
from longspark_hf.evaluation.targets import SMOLLM2_HUB_ID, load_target, mask_token_id
from longspark_hf.target_longspark import BorrowedTarget
from longspark_hf.training.corpus import load_training_data
from longspark_hf.training.data import ConversationDataset, frequent_tokens, join_samples, read_samples
from longspark_hf.training.initialize import fit_block_inputs, initialize_from_target
from longspark_hf.training.metrics import simulate, summarize
from longspark_hf.training.trainer import LongSparkTrainer
from longspark_hf.training.views import TargetRows, run_target


FOLDER = Path(__file__).parent
FULL = train.CONFIG | {"draft_vocab_size": train.DRAFT_VOCAB_SIZE}
# Every layer that some variant reads: the target then runs once per conversation for all of them.
LAYERS = [0, 10, 19, 25, 26, 27, 28, 29]
# Each variant by what differs: config fields, or `start` (what is initialised), `without` (what is switched off).
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "no summary": {"num_summary_queries": 0},
    "no window": {"window_size": 0},
    "no boundary": {"boundary_residual": None, "without": "boundary"},
    "no Markov head": {"without": "markov"},
    "random start": {"start": "random"},
    "copied layers, inputs not fitted": {"start": "layers"},
    "no boundary residual": {"boundary_residual": None},
    "uniform layers (0, 10, 19, 29)": {"target_layer_ids": [0, 10, 19, 29]},
    "two layers (28, 29)": {"target_layer_ids": [28, 29]},
    "whole vocabulary": {"draft_vocab_size": None},
}
INPUTS = ("boundary_fusion.", "input_mapping.", "position_embedding.")
FITTED: dict[tuple, dict[str, torch.Tensor]] = {}


class SharedTarget:
    """The target's rows of every conversation, made once and cut to the layers a variant reads."""

    def __init__(self, target, config: LongSparkConfig):
        self.target, self.config = target, config
        self.borrowed = BorrowedTarget.of(target, config)
        self.kept: dict[tuple[int, ...], TargetRows] = {}

    def rows(self, input_ids: torch.LongTensor, layer_ids: list[int]) -> TargetRows:
        """Of `input_ids` of shape `(length,)`."""
        key = tuple(input_ids.tolist())
        if key not in self.kept:
            ids = input_ids[None]
            rows = run_target(self.target, self.borrowed, self.config, ids, torch.ones_like(ids), torch.device("cpu"))
            self.kept[key] = rows[0]
        rows, index = self.kept[key], [self.config.target_layer_ids.index(i) for i in layer_ids]
        return replace(
            rows,
            keys=[rows.keys[i] for i in index],
            values=[rows.values[i] for i in index],
            boundaries=rows.boundaries[:, index],
            probabilities=None,
        )


class AblationTrainer(LongSparkTrainer):
    """Takes the target's rows from where they are shared."""

    shared: SharedTarget

    def run_target(self, inputs: dict[str, Any]) -> list[TargetRows]:
        lengths = inputs["attention_mask"].sum(dim=1).tolist()
        ids = [row[:length] for row, length in zip(inputs["input_ids"], lengths)]
        return [self.shared.rows(row, self.drafter_config.target_layer_ids) for row in ids]


def make_drafter(target, tokenizer, data, change: dict[str, Any]) -> LongSparkDrafter:
    """The drafter of a variant, before training."""
    torch.manual_seed(42)
    fields = FULL | {k: v for k, v in change.items() if k not in ("start", "without")}
    mask = mask_token_id(tokenizer, target.config.vocab_size)
    drafter = LongSparkDrafter(LongSparkConfig.from_target(target.config, mask_token_id=mask, **fields)).float()
    if fields["draft_vocab_size"] is not None:
        drafter.draft_token_ids = frequent_tokens(data.training, fields["draft_vocab_size"], target.config.vocab_size)
    start = change.get("start")
    if start != "random":
        initialize_from_target(drafter, target)
    if start is None:
        # The same fit serves all variants that read the same states.
        key = (*fields["target_layer_ids"], fields["boundary_residual"])
        if key not in FITTED:
            fit_block_inputs(drafter, target, data.sample())
            FITTED[key] = {n: p.clone() for n, p in drafter.state_dict().items() if n.startswith(INPUTS)}
        drafter.load_state_dict(FITTED[key], strict=False)
    with torch.no_grad():
        if change.get("without") == "boundary":
            drafter.boundary_fusion.fc1.weight.zero_()  # and stays so, see the learning rate below
        if change.get("without") == "markov":
            drafter.markov_head.w2.weight.zero_()
            drafter.markov_head.requires_grad_(False)
    return drafter


def measure(drafter: LongSparkDrafter, shared: SharedTarget, items: list[dict[str, Any]]) -> dict[str, float]:
    """Simulated τ and acceptance over held-out conversations."""

    def sequences() -> Iterator[tuple]:
        for item in items:
            ids, mask = torch.tensor(item["input_ids"]), torch.tensor(item["response_mask"])
            yield shared.rows(ids, drafter.config.target_layer_ids), mask, item["temperature"]

    drafter.eval()
    return summarize(simulate(drafter, shared.borrowed, sequences()), drafter.config.block_size, "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", required=True, help="JSONL of prompt, response, temperature; the last 5% is held out"
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of every variant")
    parser.add_argument("--short", type=int, default=16, help="held-out conversations")
    parser.add_argument("--long", type=int, default=2, help="held-out conversations of about 3,000 tokens")
    parser.add_argument("--only", nargs="*", help="names of variants")
    parser.add_argument("--output", default=str(FOLDER / "ablations.json"))
    options = parser.parse_args()

    torch.set_num_threads(1)
    target, tokenizer = load_target("smollm2")
    lengths = {"max_length": 4096, "max_response_length": 159}
    data = load_training_data(
        options.data, tokenizer, target.config.vocab_size, long_share=0.1, long_characters=12000, **lengths
    )
    held_out = read_samples(options.data)[-(len(data.held_out) + sum(data.held_out.dropped_as.values())) :]
    long = ConversationDataset(join_samples(held_out, 12000)[: options.long], tokenizer, **lengths).items
    fields = {"mask_token_id": 0, "target_layer_ids": LAYERS, "qk_norm": False}
    shared = SharedTarget(target, LongSparkConfig.from_target(target.config, **fields))

    output = Path(options.output)
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    done = {row["variant"] for row in rows}
    for name in [name for name in options.only or VARIANTS if name not in done]:
        drafter = make_drafter(target, tokenizer, data, VARIANTS[name])
        fitted = "start" not in VARIANTS[name]
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=1,
                max_steps=options.steps,
                # Without fitted inputs there is nothing that large steps could spoil, and small ones do not suffice.
                learning_rate=2e-4 if fitted else 1e-3,
                optim="adamw_torch_fused",
                adam_beta2=0.95,
                warmup_steps=50,
                lr_scheduler_type="warmup_stable_decay",
                lr_scheduler_kwargs={"num_decay_steps": options.steps // 3, "decay_type": "linear"},
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                seed=42,
            )
            trainer = AblationTrainer(
                drafter,
                target,
                arguments,
                train_dataset=data.training,
                num_anchors=512,
                steps_per_batch=6,
                markov_lr_scale=10.0 if fitted else 3.0,
                boundary_lr_scale=0.0 if fitted else 1.0,
            )
            trainer.shared = shared
            trainer.train()
        seconds = time.monotonic() - begun
        row = {"variant": name, "anchors": trainer.num_anchors_seen, "parameters": drafter.num_parameters()}
        for kind, items in (("short", data.held_out.items[: options.short]), ("long", long)):
            metrics = measure(drafter, shared, items)
            row[f"{kind}_simulated_tau"] = round(metrics["x_simulated_tau"], 4)
            row[f"{kind}_accepted_1"] = round(metrics["x_accepted_1"], 4)
            row[f"{kind}_greedy_accepted_1"] = round(metrics["x_greedy_accepted_1"], 4)
        rows.append(row)
        print(json.dumps(row), f"{seconds:.0f} s", flush=True)
        result = {
            "target": SMOLLM2_HUB_ID,
            "steps": options.steps,
            "short_conversations": options.short,
            "long_conversations": {"number": len(long), "tokens": [len(item["input_ids"]) for item in long]},
            "rows": rows,
            "provenance": provenance(drafter.dtype),
        }
        write_result(output, result)


if __name__ == "__main__":
    main()
