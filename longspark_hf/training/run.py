"""From a target and a data file to a trained drafter: what `longspark train` calls.

Knows: the order of steps, where checkpoints go and which one is best.
Does not know: how a step is computed (trainer), good settings for a target (recipe), what a run costs (plan).
"""

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import create_repo, upload_folder
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.evaluation import targets
from longspark_hf.evaluation.provenance import provenance, read_result, write_result

from .checks import (
    BEST,
    BETTER,
    EVALUATIONS,
    METRICS,
    PROVENANCE,
    check_disk,
    check_output,
    check_same_run,
    check_start,
    check_tokenizer,
    delete_interrupted,
    delete_run,
    replace_best,
    run_bytes,
    run_settings,
)
from .corpus import TrainingData, load_training_data
from .data import frequent_tokens
from .initialize import initialize_from_target
from .trainer import LongSparkTrainer, last_complete_checkpoint


class ClockCallback(TrainerCallback):
    r"""
    Saves by the clock, and ends a run when its time is up.

    Args:
        save_minutes (`float`, *optional*): Minutes between checkpoints.
        max_minutes (`float`, *optional*):
            Minutes after which training stops with an evaluation, as long as the first one took, and a checkpoint.
        decay (`bool`, *optional*, defaults to `False`):
            Let the learning rate fall to zero over the last quarter of `max_minutes`, where its schedule would come later.
        multiple (`int`, *optional*, defaults to 1): Act only at steps that are a multiple of this.

    `max_minutes` count from when this object is made.
    """

    def __init__(
        self,
        save_minutes: float | None = None,
        max_minutes: float | None = None,
        decay: bool = False,
        multiple: int = 1,
    ):
        self.save_minutes, self.max_minutes, self.decay, self.multiple = save_minutes, max_minutes, decay, multiple
        self.evaluation, self.left = 0.0, 1.0
        self.begun = self.saved = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved = time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self.evaluation = time.monotonic() - self.saved

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if self.decay:
            for group in optimizer.param_groups:
                group["lr"] = min(group["lr"], group["initial_lr"] * self.left / 0.25)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.multiple:
            return
        now = time.monotonic()
        save = self.save_minutes is not None and now - self.saved > 60 * self.save_minutes
        left = 1.0
        if self.max_minutes is not None:
            left = max(1 - (now - self.begun) / max(60 * self.max_minutes - self.evaluation, 1e-9), 0.0)
        if args.world_size > 1:  # clocks differ, but all processes must do the same
            decided = [save, left]
            torch.distributed.broadcast_object_list(decided)
            save, left = decided
        self.left = left
        if save or not left:
            control.should_save = True
        if not left:
            control.should_training_stop = True
            control.should_evaluate = args.eval_strategy != "no"  # or the last weights could not become the best ones

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved = time.monotonic()


class StopOnInterrupt(TrainerCallback):
    r"""
    Lets Ctrl-C end a run with a checkpoint. Training then raises `KeyboardInterrupt`; a second Ctrl-C does so at once.

    Args:
        multiple (`int`, *optional*, defaults to 1): Stop only at steps that are a multiple of this.
    """

    def __init__(self, multiple: int = 1):
        self.multiple, self.asked, self.previous = multiple, False, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Processes of one run would get the signal at different steps and wait for each other.
        if args.world_size == 1 and threading.current_thread() is threading.main_thread():
            self.previous = signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self.previous)
        print("Stopping with a checkpoint; Ctrl-C again stops without.", file=sys.stderr)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.asked and state.global_step % self.multiple == 0:
            control.should_save, control.should_evaluate = True, False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)


class KeepBest(TrainerCallback):
    """
    Keeps the drafter with the highest τ of all evaluations in `output_dir/best`. Where τ is equal, as it may be on a few
    short prompts, or none is generated, simulated τ decides.
    """

    METRICS = ("eval_tau", "eval_simulated_tau_greedy", "eval_simulated_tau")

    def __init__(self, trainer: LongSparkTrainer):
        self.trainer = trainer

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        drafter = self.trainer.whole_drafter()  # by all processes, where it is sharded
        if not state.is_world_process_zero:
            return
        metrics = metrics | {"step": state.global_step}
        file = Path(args.output_dir) / BEST / METRICS
        best = read_result(file) if file.exists() else {}
        known = [name for name in self.METRICS if name in metrics]
        if known and [metrics[name] for name in known] > [best.get(name, -1.0) for name in known]:
            # Written aside and moved into place whole: a kill never leaves half a drafter, or none.
            better = Path(args.output_dir) / BETTER
            drafter.save_pretrained(better)
            write_result(better / METRICS, metrics)
            replace_best(args.output_dir)
        with (Path(args.output_dir) / EVALUATIONS).open("a") as log:
            log.write(json.dumps(metrics | {"time": time.time()}) + "\n")


@dataclass
class Run:
    r"""
    A run that is ready to begin.

    Args:
        trainer ([`LongSparkTrainer`]): Built.
        checkpoint (`str`, *optional*): Where it goes on.
    """

    trainer: LongSparkTrainer
    checkpoint: str | None = None

    def __call__(self) -> LongSparkTrainer:
        """Train to the end, and publish the best drafter where that was asked for."""
        trainer = self.trainer
        if trainer.is_world_process_zero():
            data, parameters = trainer.train_dataset, self.trainer.model.num_parameters()
            print(
                f"{len(data)} conversations with {data.num_response_tokens()} response tokens, drafter of "
                f"{parameters / 1e6:.1f}M parameters" + (f", going on from {self.checkpoint}" * bool(self.checkpoint)),
                file=sys.stderr,
            )
        if self._is_done():
            # The Trainer would take another step, and then see that it was one too many.
            trainer.state = TrainerState.load_from_json(str(Path(self.checkpoint) / TRAINER_STATE_NAME))
            trainer.model.load_state_dict(LongSparkDrafter.from_pretrained(self.checkpoint).state_dict())
        else:
            trainer.train(resume_from_checkpoint=self.checkpoint)
        if trainer.args.push_to_hub and trainer.is_world_process_zero():
            folder = Path(trainer.args.output_dir) / BEST
            token = trainer.args.hub_token
            upload_folder(
                repo_id=trainer.hub_model_id, folder_path=folder, commit_message="LongSpark drafter", token=token
            )
        return trainer

    def _is_done(self) -> bool:
        if self.checkpoint is None:
            return False
        args, steps = self.trainer.args, self.trainer.args.max_steps
        if steps <= 0:
            per_epoch = math.ceil(len(self.trainer.get_train_dataloader()) / args.gradient_accumulation_steps)
            steps = math.ceil(args.num_train_epochs * per_epoch)
        return int(self.checkpoint.rpartition("-")[2]) >= steps


def train(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: str | Path | TrainingData,
    output_dir: str | Path,
    **options: Any,
) -> LongSparkTrainer:
    r"""
    Train a drafter, or go on with a run that was interrupted.

    Args:
        target, tokenizer, data, output_dir, options: As for [`prepare`].

    Returns:
        [`LongSparkTrainer`]: after training; `output_dir/best` holds the drafter with the highest τ.
    """
    return prepare(target, tokenizer, data, output_dir, **options)()


def prepare(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: str | Path | TrainingData,
    output_dir: str | Path,
    *,
    mask_token_id: int | None = None,
    config: dict[str, Any] | None = None,
    draft_vocab_size: int | None = None,
    from_target: bool = True,
    init_from: str | Path | None = None,
    eval_share: float = 0.05,
    num_eval_prompts: int = 12,
    eval_new_tokens: int = 128,
    num_simulated: int = 32,
    long_share: float = 0.0,
    long_characters: int = 8000,
    max_length: int = 4096,
    max_response_length: int | None = None,
    num_anchors: int = 512,
    anchors_per_group: int = 32,
    steps_per_batch: int = 1,
    markov_lr_scale: float = 1.0,
    boundary_lr_scale: float = 1.0,
    save_minutes: float | None = None,
    max_minutes: float | None = None,
    decay_by_clock: bool = False,
    resume: bool = True,
    eval_first: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    **arguments: Any,
) -> Run:
    r"""
    Everything up to the first step, so that whatever is wrong shows before any long work.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): Frozen.
        data (`str` or [`TrainingData`]):
            JSONL, see [`read_samples`]; its last `eval_share` is held out. Or what [`load_training_data`] made of it.
        output_dir (`str`): Gets checkpoints, `best/`, `evaluations.jsonl` and `provenance.json`.
        mask_token_id (`int`, *optional*): A token the target never emits; looked for by default.
        config (`dict`, *optional*): Fields of [`LongSparkConfig`] other than the target's; they win over the arguments.
        draft_vocab_size (`int`, *optional*): Propose only so many of the data's most frequent tokens.
        from_target (`bool`, *optional*, defaults to `True`): Start draft layers as the paired target layers.
        init_from (`str`, *optional*): Start from this drafter, a folder or a Hub id; its config is kept.
        num_eval_prompts (`int`, *optional*, defaults to 12): Held-out prompts for the τ of `generate`.
        eval_new_tokens (`int`, *optional*, defaults to 128): Tokens generated for each.
        num_simulated (`int`, *optional*, defaults to 32): Held-out conversations for the simulated metrics.
        eval_share, long_share, long_characters, max_length, max_response_length: See [`load_training_data`].
        num_anchors, anchors_per_group, steps_per_batch, markov_lr_scale, boundary_lr_scale: See [`LongSparkTrainer`].
        save_minutes, max_minutes, decay_by_clock: See [`ClockCallback`].
        resume (`bool`, *optional*, defaults to `True`):
            Go on from the newest complete checkpoint in `output_dir`. `False` deletes the run that is there.
        eval_first (`bool`, *optional*, defaults to `False`): Evaluate a new run before its first step.
        callbacks (`Sequence[TrainerCallback]`, *optional*): Further ones.
        arguments (`Any`): For `TrainingArguments`.

    Raises:
        `ValueError`: for data, tokenizer, drafter or folder that cannot be used; see checks.
    """
    clock = ClockCallback(save_minutes, max_minutes, decay_by_clock, steps_per_batch)
    check_tokenizer(tokenizer, target.config, target.generation_config)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if not isinstance(data, TrainingData):
        lengths = {"max_length": max_length, "max_response_length": max_response_length}
        shares = {"eval_share": eval_share, "long_share": long_share, "long_characters": long_characters}
        data = load_training_data(data, tokenizer, vocab_size, target.generation_config, **shares, **lengths)

    torch.manual_seed(arguments.get("seed", 42))
    wanted = {"mask_token_id": mask_token_id, "draft_vocab_size": draft_vocab_size, **(config or {})}
    draft_vocab_size = wanted["draft_vocab_size"]
    if init_from is None:
        if wanted["mask_token_id"] is None:
            wanted["mask_token_id"] = targets.mask_token_id(tokenizer, vocab_size)
        drafter = LongSparkDrafter(LongSparkConfig.from_target(target.config, tokenizer, **wanted)).float()
        if draft_vocab_size is not None:
            drafter.draft_token_ids = frequent_tokens(data.training, draft_vocab_size, vocab_size)
    else:
        drafter = targets.load_drafter(str(init_from))
        check_start(str(init_from), drafter.config, wanted)
        drafter.check_target(target)
        if draft_vocab_size is not None and drafter.draft_token_ids is None:
            drafter.set_draft_vocabulary(frequent_tokens(data.training, draft_vocab_size, vocab_size))

    args = TrainingArguments(output_dir=str(output_dir), **arguments)
    kept = {
        "init_from": None if init_from is None else str(init_from),
        "from_target": from_target,
        "num_anchors": num_anchors,
        "steps_per_batch": steps_per_batch,
        "markov_lr_scale": markov_lr_scale,
        "boundary_lr_scale": boundary_lr_scale,
        "num_eval_prompts": num_eval_prompts,
        "eval_new_tokens": eval_new_tokens,
    }
    settings = run_settings(drafter.config, data, args, kept)
    checkpoint = _claim_output(args, settings, drafter.num_parameters(), resume)
    if from_target and init_from is None and checkpoint is None:
        initialize_from_target(drafter, target, data.sample())
    args.eval_on_start = eval_first and checkpoint is None
    if args.process_index == 0:
        made_with = {
            "data": data.path,
            "settings": settings,
            "arguments": {k: v for k, v in arguments.items() if isinstance(v, int | float | str | bool)},
            **provenance(drafter.dtype, args.device),
        }
        write_result(Path(output_dir) / PROVENANCE, made_with)
    trainer = LongSparkTrainer(
        drafter,
        target,
        args,
        train_dataset=data.training,
        eval_dataset=data.held_out.items[:num_simulated],
        eval_prompts=data.prompts(num_eval_prompts),
        eval_new_tokens=eval_new_tokens,
        num_anchors=num_anchors,
        anchors_per_group=anchors_per_group,
        steps_per_batch=steps_per_batch,
        markov_lr_scale=markov_lr_scale,
        boundary_lr_scale=boundary_lr_scale,
        callbacks=[clock, *callbacks],
    )
    trainer.add_callback(KeepBest(trainer))
    return Run(trainer, checkpoint)


def _claim_output(args: TrainingArguments, settings: dict[str, Any], num_parameters: int, resume: bool) -> str | None:
    """Make sure that this run can live in its folder; returns the checkpoint to go on from."""
    folder = args.output_dir
    # The first process tidies up, so that all others find the same.
    with args.main_process_first(local=False):
        check_output(folder)
        if resume:
            check_same_run(folder, settings)
        elif args.process_index == 0:
            delete_run(folder)
        if args.process_index == 0:
            replace_best(folder)
            delete_interrupted(folder)
        if args.push_to_hub and args.process_index == 0:
            _check_hub(args)
        if args.save_strategy != "no":
            check_disk(folder, run_bytes(num_parameters, args.save_total_limit)["total"])
        return last_complete_checkpoint(folder)


def _check_hub(args: TrainingArguments) -> None:
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        create_repo(name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)
    except Exception as error:  # of whichever HTTP library huggingface_hub uses
        raise ValueError(
            f"Cannot create the repository {name} on the Hub ({error}). Log in with `hf auth login`, or train without "
            "--push-to-hub and upload best/ later."
        ) from error


def result(output_dir: str | Path) -> dict[str, Any]:
    """
    What a run has come to, from its folder.

    Returns:
        `dict`: `tau_before` the first step and `tau_after` of the best drafter, `None` where none was measured; `step` of
        the best drafter and `drafter`, its folder.
    """
    folder = Path(output_dir)
    evaluations = folder / EVALUATIONS
    try:
        first = json.loads(evaluations.read_text().partition("\n")[0]) if evaluations.exists() else {}
    except ValueError:  # torn by a kill
        first = {}
    best = read_result(folder / BEST / METRICS) if (folder / BEST).exists() else {}
    return {
        "tau_before": first.get("eval_tau") if first.get("step") == 0 else None,
        "tau_after": best.get("eval_tau"),
        "step": best.get("step"),
        "drafter": str(folder / BEST),
    }
