"""From a target and a data file to a trained drafter: what `longspark train` calls.

Knows: defaults, the order of steps, where checkpoints go and which one is best.
Does not know: how a step is computed (trainer).
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.evaluation.provenance import provenance, write_result

from .data import ConversationDataset, Sample, frequent_tokens, join_samples, read_samples, tokenize
from .initialize import initialize_from_target
from .trainer import LongSparkTrainer, last_complete_checkpoint


class ClockCallback(TrainerCallback):
    r"""
    Saves by the clock, and ends a run when its time is up.

    Args:
        save_minutes (`float`, *optional*): Minutes between checkpoints.
        max_minutes (`float`, *optional*): Minutes after which training stops with a checkpoint.
        multiple (`int`, *optional*, defaults to 1): Only at steps that are a multiple of this.
    """

    def __init__(self, save_minutes: float | None = None, max_minutes: float | None = None, multiple: int = 1):
        self.save_minutes, self.max_minutes, self.multiple = save_minutes, max_minutes, multiple

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun = self.saved = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        if state.global_step % self.multiple:
            return
        if self.save_minutes is not None and now - self.saved > 60 * self.save_minutes:
            control.should_save = True
        if self.max_minutes is not None and now - self.begun > 60 * self.max_minutes:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved = time.monotonic()


class KeepBest(TrainerCallback):
    """Keeps the drafter with the highest metric of all evaluations in `output_dir/best`."""

    def __init__(self, drafter: LongSparkDrafter, metric: str = "eval_tau"):
        self.drafter, self.metric = drafter, metric

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        if not state.is_world_process_zero or self.metric not in metrics:
            return
        folder = Path(args.output_dir) / "best"
        file = folder / "metrics.json"
        best = json.loads(file.read_text()) if file.exists() else {self.metric: -1.0}
        if metrics[self.metric] > best[self.metric]:
            self.drafter.save_pretrained(folder)
            file.write_text(json.dumps(metrics | {"step": state.global_step}, indent=2) + "\n")
        with (Path(args.output_dir) / "evaluations.jsonl").open("a") as log:
            log.write(json.dumps(metrics | {"step": state.global_step, "time": time.time()}) + "\n")


def train(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: str | Path,
    output_dir: str | Path,
    *,
    mask_token_id: int,
    config: dict[str, Any] | None = None,
    draft_vocab_size: int | None = None,
    from_target: bool = True,
    eval_share: float = 0.05,
    num_eval_prompts: int = 12,
    num_simulated: int = 32,
    long_share: float = 0.0,
    long_characters: int = 8000,
    max_length: int = 4096,
    max_response_length: int | None = None,
    num_anchors: int = 512,
    anchors_per_group: int = 32,
    steps_per_batch: int = 1,
    markov_lr_scale: float = 1.0,
    save_minutes: float | None = None,
    max_minutes: float | None = None,
    resume: bool = True,
    **arguments: Any,
) -> LongSparkTrainer:
    r"""
    Train a drafter, or go on with a run that was interrupted.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): Frozen.
        data (`str`): JSONL, see [`read_samples`]. Its last `eval_share` is held out.
        output_dir (`str`): Gets checkpoints, `best/`, `evaluations.jsonl` and `provenance.json`.
        mask_token_id (`int`): A token the target never emits.
        config (`dict`, *optional*): Fields of [`LongSparkConfig`] other than the target's.
        draft_vocab_size (`int`, *optional*): Propose only so many of the data's most frequent tokens.
        from_target (`bool`, *optional*, defaults to `True`): Start draft layers as the paired target layers.
        eval_share (`float`, *optional*, defaults to 0.05): Held out at the end of the file.
        num_eval_prompts (`int`, *optional*, defaults to 12): Held-out prompts for the τ of `generate`.
        num_simulated (`int`, *optional*, defaults to 32): Held-out conversations for the simulated metrics.
        long_share (`float`, *optional*, defaults to 0): Share of the samples joined to long conversations.
        long_characters (`int`, *optional*, defaults to 8000): Length of those.
        max_length, max_response_length (`int`, *optional*): See [`tokenize`].
        num_anchors, anchors_per_group, steps_per_batch, markov_lr_scale: See [`LongSparkTrainer`].
        save_minutes, max_minutes (`float`, *optional*): See [`ClockCallback`].
        resume (`bool`, *optional*, defaults to `True`): Go on from the newest complete checkpoint in `output_dir`.
        arguments (`Any`): For `TrainingArguments`.

    Returns:
        [`LongSparkTrainer`]: after training; `output_dir/best` holds the drafter with the highest τ.
    """
    samples = read_samples(data)
    num_held_out = max(1, int(len(samples) * eval_share))
    training, held_out = samples[:-num_held_out], samples[-num_held_out:]
    lengths = {"max_length": max_length, "max_response_length": max_response_length}
    train_dataset = ConversationDataset(_conversations(training, long_share, long_characters), tokenizer, **lengths)
    eval_dataset = ConversationDataset([[s] for s in held_out[:num_simulated]], tokenizer, **lengths)
    prompts = [_prompt(sample, tokenizer) for sample in held_out[-num_eval_prompts:]] if num_eval_prompts else []

    seed = arguments.get("seed", 42)
    torch.manual_seed(seed)
    overrides = {"mask_token_id": mask_token_id, "draft_vocab_size": draft_vocab_size} | (config or {})
    drafter = LongSparkDrafter(LongSparkConfig.from_target(target.config, **overrides)).float()
    if draft_vocab_size is not None:
        drafter.draft_token_ids = frequent_tokens(train_dataset, draft_vocab_size, target.config.vocab_size)
    if from_target:
        initialize_from_target(drafter, target, torch.tensor([train_dataset[0]["input_ids"]]))

    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    print(
        f"{len(train_dataset)} conversations ({train_dataset.dropped} dropped), "
        f"{train_dataset.num_response_tokens()} response tokens, {len(eval_dataset)} + {len(prompts)} held out; "
        f"drafter of {drafter.num_parameters() / 1e6:.1f}M parameters",
        file=sys.stderr,
    )
    made_with = {
        "data": str(data),
        "arguments": {k: v for k, v in arguments.items() if isinstance(v, int | float | str | bool)},
        **provenance(drafter.dtype, target.device),
    }
    write_result(output_dir / "provenance.json", made_with)

    trainer = LongSparkTrainer(
        drafter,
        target,
        TrainingArguments(output_dir=str(output_dir), **arguments),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        eval_prompts=prompts,
        num_anchors=num_anchors,
        anchors_per_group=anchors_per_group,
        steps_per_batch=steps_per_batch,
        markov_lr_scale=markov_lr_scale,
        callbacks=[ClockCallback(save_minutes, max_minutes, steps_per_batch), KeepBest(drafter)],
    )
    checkpoint = last_complete_checkpoint(output_dir) if resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def _conversations(samples: list[Sample], long_share: float, long_characters: int) -> list[list[Sample]]:
    num_joined = int(len(samples) * long_share)
    order = random.Random(0).sample(range(len(samples)), num_joined)
    joined = set(order)
    conversations = [[sample] for index, sample in enumerate(samples) if index not in joined]
    return conversations + [c for c in join_samples([samples[i] for i in order], long_characters) if c]


def _prompt(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> torch.LongTensor:
    item = tokenize([sample], tokenizer)
    if item is None:
        raise ValueError(f"A held-out sample has no room for a response: {sample.messages!r:.200}")
    return torch.tensor([item["input_ids"][: item["response_mask"].index(True)]])
