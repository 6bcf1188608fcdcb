"""A training run before it is begun: its settings, what it costs, and how fast a few real steps of it are.

Knows: how choices and the recipe become the arguments of a run, and how they are cut to a time limit.
Does not know: how memory and disk are counted (estimates), how a run goes (run), how to show any of it (cli).
"""

import copy
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

from longspark_hf import LongSparkConfig
from longspark_hf.compat import checkpointing_argument
from longspark_hf.evaluation import targets
from longspark_hf.evaluation.shapes import free_memory
from longspark_hf.target_longspark import check_config_fit

from .checks import (
    check_disk,
    check_output,
    check_same_run,
    check_start,
    check_tokenizer,
    free_disk,
    read_provenance,
    run_bytes,
    run_settings,
)
from .corpus import TrainingData, load_training_data
from .estimates import count_parameters, training_memory
from .metrics import generated_tau
from .recipe import batch_size, num_steps, recipe, schedule
from .run import Run, StopOnInterrupt, prepare
from .trainer import complete_checkpoints


SAVE_TOTAL_LIMIT = 2
NUM_EVALUATIONS = 10
# Of a time limit: what evaluations may take, and what is planned for at all, since steps differ in length.
EVALUATION_SHARE, PLANNED_SHARE = 0.25, 0.9
# Measured: passes of the target over conversations of mean length, of which the first warms up; tokens generated.
NUM_PASSES, NUM_TOKENS = 3, 16
_DRAFTER_OPTIONS = ("mask_token_id", "draft_vocab_size")


@dataclass
class Speed:
    """Measured seconds of an optimizer step, of the simulation of one conversation and of one generated token."""

    step: float
    simulation: float
    token: float

    def evaluation(self, options: dict[str, Any]) -> float:
        """Seconds of an evaluation with the options of a plan."""
        tokens = options["num_eval_prompts"] * options["eval_new_tokens"]
        return options["num_simulated"] * self.simulation + tokens * self.token


@dataclass
class Plan:
    r"""
    A run that could be begun.

    Args:
        target (`str`): Name of the target, as for [`load_target`].
        target_config (`PreTrainedConfig`), target_parameters (`int`): Of the target.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        data ([`TrainingData`]): To train on.
        output_dir (`str`): Of the run.
        drafter_config ([`LongSparkConfig`]): Of the drafter.
        options (`dict`): Arguments of [`prepare`].
        minutes (`float`, *optional*): Wall-clock limit.
        shrinkable (`bool`): Whether a time limit may lower the number of evaluation prompts.
        begun (`dict`, *optional*): The run in `output_dir` that this one goes on with, see [`begun`].
        speed ([`Speed`], *optional*): Once it was measured.
    """

    target: str
    target_config: PreTrainedConfig
    target_parameters: int
    tokenizer: PreTrainedTokenizerBase
    data: TrainingData
    output_dir: str
    drafter_config: LongSparkConfig
    options: dict[str, Any]
    minutes: float | None = None
    shrinkable: bool = True
    begun: dict[str, Any] | None = None
    speed: Speed | None = None

    @property
    def is_done(self) -> bool:
        """Whether the run that this one goes on with has come to its end."""
        return self.begun is not None and self.begun["step"] >= self.options["max_steps"]

    @property
    def dtype(self) -> torch.dtype:
        """Of the target's weights; the drafter's are fp32."""
        return torch.bfloat16 if self.options["bf16"] else torch.float32

    def get_ready(self, progress: Callable[[str], None], dry_run: bool = False) -> Run | None:
        """
        Load the target, time a few steps where a dry run or a new run's time limit asks for it, and build the run.

        Args:
            progress (`Callable`): Told what takes time.
            dry_run (`bool`, *optional*, defaults to `False`): Build none, and load nothing that would not fit.

        Returns:
            [`Run`], or `None` where there is none to begin.
        """
        fits = self.memory()["total"] <= _available_memory()
        if not fits:
            progress("by the estimate this run does not fit into memory, see --dry-run")
        if self.is_done or (dry_run and not fits):
            return None
        progress(f"loading {self.target}")
        target = targets.load_target(self.target, self.dtype)[0]
        if dry_run or (self.minutes is not None and self.begun is None):
            progress("timing a few steps")
            start = time.monotonic()
            self.speed = measure(self, target)
            if self.minutes is not None and self.begun is None:
                self.options["max_minutes"] = self.minutes - (time.monotonic() - start) / 60
                self.fit_into(self.options["max_minutes"], self.speed)
                # Clocks differ, but all processes must do the same.
                (self.options,) = broadcast_object_list([self.options])
        if dry_run:
            return None
        stop = StopOnInterrupt(self.options["steps_per_batch"])
        return prepare(target, self.tokenizer, self.data, self.output_dir, callbacks=[stop], **self.options)

    def set_steps(self, steps: int, num_evaluations: int = NUM_EVALUATIONS) -> None:
        """Set the length of the run in optimizer steps, and what follows from it."""
        every = self.options["steps_per_batch"]
        interval = math.ceil(steps / num_evaluations / every) * every
        self.options |= {"max_steps": steps, "eval_steps": interval, "save_steps": interval, **schedule(steps, every)}

    def go_on(self, keep_length: bool, keep_prompts: bool) -> None:
        """Take from the run that was begun what a time limit may have set."""
        known = {name: value for name, value in self.begun.items() if value is not None}
        if keep_length and "max_steps" in known:
            self.set_steps(known["max_steps"])
            self.options |= {name: known[name] for name in ("eval_steps", "save_steps") if name in known}
        if keep_prompts and "num_eval_prompts" in known:
            self.options["num_eval_prompts"] = known["num_eval_prompts"]

    def fit_into(self, minutes: float, speed: Speed) -> None:
        """Shorten the run to a time limit, so that its learning rate decays in time."""
        available = 60 * PLANNED_SHARE * minutes
        # One evaluation before the first step and one after the last are the least.
        scale = EVALUATION_SHARE * available / 2 / speed.evaluation(self.options)
        if self.shrinkable and scale < 1:
            for name in ("num_eval_prompts", "num_simulated"):
                self.options[name] = min(self.options[name], max(2, int(scale * self.options[name])))
        seconds = speed.evaluation(self.options)
        num_evaluations = min(max(int(EVALUATION_SHARE * available / seconds) - 1, 1), NUM_EVALUATIONS)
        every = self.options["steps_per_batch"]
        steps = max(int((available - (num_evaluations + 1) * seconds) / speed.step / every), 1) * every
        if steps < self.options["max_steps"]:
            self.set_steps(steps, num_evaluations)

    def seconds(self, speed: Speed) -> float:
        """How long the run takes, evaluations included."""
        num_evaluations = 1 + math.ceil(self.options["max_steps"] / self.options["eval_steps"])
        return self.options["max_steps"] * speed.step + num_evaluations * speed.evaluation(self.options)

    def _starts_from_target(self) -> bool:
        return self.options["from_target"] and self.options["init_from"] is None

    def memory(self) -> dict[str, int]:
        """Estimated peak, see [`training_memory`]."""
        return training_memory(
            self.drafter_config,
            self.target_config,
            self.target_parameters * self.dtype.itemsize,
            length=self.data.longest(),
            num_anchors=self.options["num_anchors"],
            steps_per_batch=self.options["steps_per_batch"],
            start_tokens=sum(ids.shape[1] for ids in self.data.sample()) if self._starts_from_target() else 0,
            target_dtype=self.dtype,
            checkpointing=self.options.get(checkpointing_argument(), False),
        )

    def describe(self) -> dict[str, Any]:
        """Everything about the run in plain values: sizes in bytes, times in seconds, no time where none was measured."""
        config, options = self.drafter_config, self.options
        begin = "the target's layers" if self._starts_from_target() else "random weights"
        parameters = count_parameters(config)
        shown = ("target_layer_ids", "block_size", "markov_rank", "draft_vocab_size", "mask_token_id")
        passed = ("num_anchors", "steps_per_batch", "learning_rate", "lr_scheduler_type", "num_eval_prompts", "bf16")
        per_step = options["gradient_accumulation_steps"] * _world_size()
        time_estimate = None
        if self.speed is not None:
            time_estimate = {
                "measured": f"{NUM_PASSES - 1} target passes of mean length, {options['steps_per_batch']} steps each",
                "step_seconds": self.speed.step,
                "evaluation_seconds": self.speed.evaluation(options),
                "total_seconds": self.seconds(self.speed),
            }
        return {
            "target": self.target_config._name_or_path,
            "target_parameters": self.target_parameters,
            "drafter": {
                "parameters": sum(parameters.values()),
                "split": parameters,
                **{name: getattr(config, name) for name in shown},
            },
            "settings": {"started_from": options["init_from"] or begin, "batch_size": per_step}
            | {name: options[name] for name in passed},
            "data": self.data.describe(config.draft_vocab_size, config.vocab_size),
            "disk": run_bytes(sum(parameters.values()), SAVE_TOTAL_LIMIT) | {"free": free_disk(self.output_dir)},
            "memory": self.memory() | {"available": _available_memory()},
            "steps": options["max_steps"],
            "time": time_estimate,
        }


def make_plan(
    target: str,
    data: str,
    output_dir: str,
    *,
    layers: list[int] | None = None,
    block_size: int | None = None,
    draft_vocab: int | None = None,
    markov_rank: int | None = None,
    mask_token: str | None = None,
    init_from: str | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    batch: int | None = None,
    anchors: int | None = None,
    max_length: int | None = None,
    eval_prompts: int | None = None,
    minutes: float | None = None,
    bf16: bool | None = None,
    gradient_checkpointing: bool = False,
    compile: bool = False,
    resume: bool = True,
    seed: int = 42,
    push_to_hub: str | None = None,
) -> Plan:
    r"""
    Choices, completed by the recipe for the target. Nothing is loaded but configs, tokenizer and data.

    Args:
        target (`str`): A Hub id, a folder, or `smollm2`.
        data (`str`), output_dir (`str`): See [`prepare`].
        layers, block_size, markov_rank: Fields `target_layer_ids`, `block_size`, `markov_rank` of [`LongSparkConfig`].
        draft_vocab (`int`, *optional*): Tokens the drafter can propose, the data's most frequent ones; 0 for all.
        mask_token (`str`, *optional*): A token or its id; looked for by default.
        init_from (`str`, *optional*): A drafter to start from.
        epochs (`float`, *optional*): Times every conversation is met.
        steps (`int`, *optional*): Optimizer steps, in place of `epochs`.
        batch (`int`, *optional*): Conversations of an optimizer step, over all processes.
        anchors (`int`, *optional*): Per conversation.
        max_length (`int`, *optional*): Conversations are cut there; by default at 4096 or the target's positions.
        eval_prompts (`int`, *optional*): Held-out prompts for the τ of `generate`.
        minutes (`float`, *optional*): Wall-clock limit, see [`Plan.fit_into`] for a schedule that fits.
        bf16 (`bool`, *optional*): Target in bf16 and autocast; by default where a GPU can.
        push_to_hub (`str`, *optional*): Hub id for the best drafter.

    Raises:
        `ValueError`: for the first thing that is wrong, before anything takes long.
    """
    target_config = targets.load_target_config(target)
    text = target_config.get_text_config(decoder=True)
    shell = targets.meta_target(target_config)
    defaults = recipe(shell)

    for name, value in (("--epochs", epochs), ("--minutes", minutes), ("--learning-rate", learning_rate)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be more than 0, got {value:g}.")

    # What was asked for goes before the recipe; a drafter to start from brings its own shape.
    asked = {"target_layer_ids": layers, "block_size": block_size, "markov_rank": markov_rank}
    asked = {name: value for name, value in asked.items() if value is not None}
    tokenizer = targets.load_tokenizer(target)
    check_tokenizer(tokenizer, target_config)
    if draft_vocab is None and init_from is None:
        draft_vocab = defaults["draft_vocab_size"]
    options = {name: value for name, value in defaults.items() if name not in ("epochs", "batch_size", "config")}
    options |= {"draft_vocab_size": draft_vocab or None, "init_from": init_from}
    if init_from is None:
        options["config"] = defaults["config"] | asked
        options["mask_token_id"] = _mask_token_id(mask_token, tokenizer, text.vocab_size)
        fields = options["config"] | {name: options[name] for name in _DRAFTER_OPTIONS}
        drafter_config = LongSparkConfig.from_target(target_config, tokenizer, **fields)
    else:
        options["config"] = asked
        if mask_token is not None:
            options["mask_token_id"] = _mask_token_id(mask_token, tokenizer, text.vocab_size)
        drafter_config = targets.load_drafter_config(init_from)
        check_start(init_from, drafter_config, asked | {name: options.get(name) for name in _DRAFTER_OPTIONS})
        if drafter_config.draft_vocab_size is None:
            drafter_config.draft_vocab_size = options["draft_vocab_size"]
    check_config_fit(drafter_config, target_config)

    check_output(output_dir)
    positions = text.max_position_embeddings
    max_length = min(4096, positions) if max_length is None else max_length
    if max_length > positions:
        raise ValueError(f"--max-length {max_length} exceeds the {positions} positions of the target.")
    generation_config = targets.load_generation_config(target, target_config)
    corpus = load_training_data(data, tokenizer, text.vocab_size, generation_config, max_length=max_length)
    check_disk(output_dir, run_bytes(sum(count_parameters(drafter_config).values()), SAVE_TOTAL_LIMIT)["total"])

    chosen = {"num_anchors": anchors, "learning_rate": learning_rate, "num_eval_prompts": eval_prompts}
    options |= {name: value for name, value in chosen.items() if value is not None}
    for name in ("num_eval_prompts", "num_simulated"):
        options[name] = min(options[name], len(corpus.held_out))
    cuda = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    asked_epochs = epochs is not None
    epochs = defaults["epochs"] if epochs is None else epochs
    world_size = _world_size()
    if batch is None:
        batch = max(defaults["batch_size"] or batch_size(len(corpus.training), epochs), world_size)
        batch -= batch % world_size
    if batch % world_size:
        raise ValueError(
            f"--batch-size {batch} cannot be shared by {world_size} processes. Use {batch + world_size - batch % world_size}."
        )
    options |= {
        "resume": resume,
        "eval_first": True,
        "save_minutes": 10.0,
        "max_minutes": minutes,
        "decay_by_clock": minutes is not None,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": batch // world_size,
        "max_grad_norm": 1.0,
        "bf16": cuda if bf16 is None else bf16,
        "use_cpu": not torch.accelerator.is_available(),
        "torch_compile": compile,
        checkpointing_argument(): gradient_checkpointing,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_total_limit": SAVE_TOTAL_LIMIT,
        "logging_steps": 20,
        "report_to": [],
        "seed": seed,
        "push_to_hub": push_to_hub is not None,
        "hub_model_id": push_to_hub,
        "hub_strategy": "end",
    }
    plan = Plan(
        target=target,
        target_config=target_config,
        target_parameters=shell.num_parameters(),
        tokenizer=tokenizer,
        data=corpus,
        output_dir=str(output_dir),
        drafter_config=drafter_config,
        options=options,
        minutes=minutes,
        shrinkable=eval_prompts is None,
        begun=begun(output_dir) if resume else None,
    )
    plan.set_steps(steps or num_steps(len(corpus.training), epochs, batch, options["steps_per_batch"]))
    if plan.begun is not None:
        plan.go_on(keep_length=steps is None and not asked_epochs, keep_prompts=eval_prompts is None)
    if resume:
        arguments = {name: options[name] for name in options if name in TrainingArguments.__dataclass_fields__}
        args = TrainingArguments(output_dir=str(output_dir), **arguments)
        check_same_run(output_dir, run_settings(drafter_config, corpus, args, options))
    return plan


def begun(output_dir: str | Path) -> dict[str, Any] | None:
    """
    The run in a folder: the `step` of its newest complete checkpoint, and `max_steps`, `eval_steps`, `save_steps` and
    `num_eval_prompts` as it was begun; `None` where there is no run to go on with.
    """
    checkpoints, found = complete_checkpoints(output_dir), read_provenance(output_dir)
    if not checkpoints or not found:
        return None
    arguments, settings = found.get("arguments", {}), found.get("settings", {})
    return {
        "step": max(checkpoints),
        **{name: arguments.get(name) for name in ("max_steps", "eval_steps", "save_steps")},
        "num_eval_prompts": settings.get("num_eval_prompts"),
    }


def measure(plan: Plan, target: PreTrainedModel) -> Speed:
    r"""
    Time a few real steps of a plan, on a drafter that is thrown away.

    Args:
        plan ([`Plan`]): Its options are used but for length, saving and the number of conversations of a step.
        target (`PreTrainedModel`): The target.
    """
    mean, every = plan.data.mean_length(), plan.options["steps_per_batch"]
    data = copy.copy(plan.data)
    data.training = copy.copy(plan.data.training)
    typical = sorted(plan.data.training.items, key=lambda item: abs(len(item["input_ids"]) - mean))
    data.training.items = typical[: NUM_PASSES * _world_size()]
    options = plan.options | {
        "max_steps": NUM_PASSES * every,
        "gradient_accumulation_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "push_to_hub": False,
        "eval_first": False,
        "save_minutes": None,
        "max_minutes": None,
        "decay_by_clock": False,
    }
    clock = _StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = prepare(target, plan.tokenizer, data, folder, callbacks=[clock], **options).trainer
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        micro_step = (clock.times[-1] - clock.times[every - 1]) / (len(clock.times) - every)
        start = time.perf_counter()
        prompts, trainer.eval_prompts = trainer.eval_prompts, []
        trainer.evaluate(plan.data.held_out.items[:1] * _world_size())
        simulation = time.perf_counter() - start
        start = time.perf_counter()
        if prompts:
            generated_tau(trainer.target, trainer.whole_drafter(), prompts[:1], NUM_TOKENS)
        token = (time.perf_counter() - start) / NUM_TOKENS
    speed = [Speed(micro_step * plan.options["gradient_accumulation_steps"], simulation, token)]
    return broadcast_object_list(speed)[0]  # what follows from it must be the same everywhere


class _StepClock(TrainerCallback):
    """Notes when steps end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.accelerator.is_available() and not args.use_cpu:
            torch.accelerator.synchronize()
        self.times.append(time.perf_counter())


def _mask_token_id(token: str | None, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    if token is None:
        try:
            return targets.mask_token_id(tokenizer, vocab_size)
        except ValueError as error:
            raise ValueError(
                f"No unused token is known among the {vocab_size} of this target. Name one with --mask-token: a reserved "
                "special token, or any other (or its id) that the target never emits."
            ) from error
    if token.isdigit():
        return int(token)
    found = tokenizer.get_vocab().get(token)
    if found is None:
        raise ValueError(f"--mask-token {token!r} is no token of the target. Give one of its tokens, or a token id.")
    return found


def _available_memory() -> int:
    return free_memory(targets.device_and_dtype()[0])


def _world_size() -> int:
    """Processes of a launcher such as `accelerate launch`."""
    return int(os.environ.get("WORLD_SIZE", 1))
