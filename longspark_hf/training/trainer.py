"""`LongSparkTrainer`: distils a frozen target into a drafter, online, with many anchors per pass of the target.

Knows: how a batch of conversations becomes a loss that is right under gradient accumulation and data parallelism, and
what an evaluation reports.
Does not know: how views are made (views), what the loss is (loss_longspark), where data comes from (data).
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from longspark_hf.configuration_longspark import LongSparkConfig
from longspark_hf.evaluation.provenance import read_result, write_result
from longspark_hf.loss_longspark import at_least_fp32, slot_weights, target_probabilities
from longspark_hf.modeling_longspark import LongSparkDrafter
from longspark_hf.target_longspark import BorrowedTarget, check_fit

from .data import collate
from .metrics import generated_tau, label_mask, possible_anchors, simulate, slot_targets, summarize
from .views import Carry, TargetRows, group_views, prefix_scan, run_target, split_anchors


# Written last: a checkpoint without it was interrupted.
COMPLETE = "complete.json"


class _Kept:
    """Target rows of a batch, for the steps that share it; passes through `Trainer` untouched."""

    rows: list[TargetRows] | None = None


class _Total(torch.autograd.Function):
    """A value whose gradient flows into the last summand; the other tensors get gradients that are known already."""

    @staticmethod
    def forward(ctx, last: torch.Tensor, total: torch.Tensor, gradients: list[torch.Tensor | None], *_: torch.Tensor):
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None, None, *ctx.gradients


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter outside of the model's forward: itself, or put together from its shards, differentiable."""
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    mesh = parameter.device_mesh
    full = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())  # the mean over processes, as of all gradients
    return full


def peak_memory(device: torch.device) -> dict[str, int]:
    """Most memory so far: `peak_memory_bytes` of tensors on a GPU, `peak_rss_bytes` of the whole process on a CPU."""
    if device.type == "cuda":
        return {"peak_memory_bytes": torch.cuda.max_memory_allocated(device)}
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


class LongSparkTrainer(Trainer):
    r"""
    A `Trainer` whose model is the drafter. The target runs once per sequence, without gradient, and serves all anchors
    of the sequence; nothing of it is trained or saved.

    Args:
        drafter ([`LongSparkDrafter`]): Trained.
        target (`PreTrainedModel`): Frozen. Moved to the training device unless it has a `device_map`.
        args (`TrainingArguments`): As for `Trainer`.
        train_dataset, eval_dataset (`Dataset`):
            Of items with `input_ids`, `response_mask` and `temperature`; for evaluation, several by name as well.
        eval_prompts (`Sequence[torch.LongTensor]`, *optional*):
            Prompts of shape `(1, length)`; evaluation reports the τ of greedy `generate` over them as `eval_tau`.
        num_anchors (`int`, *optional*, defaults to 512): Anchors per sequence, drawn anew each time it is seen.
        anchors_per_group (`int`, *optional*, defaults to 32): Anchors in one pass of the drafter.
        steps_per_batch (`int`, *optional*, defaults to 1):
            Optimizer steps made from one pass of the target, each on its share of the anchors. More steps learn more from
            little data; the batches that would have followed meanwhile are left out. Save at multiples of it. A step that
            the end of an epoch cuts short takes some of the shared batches, one that needs more than are shared its own.
        markov_lr_scale (`float`, *optional*, defaults to 1.0): Learning rate of the Markov head over that of the rest.
        boundary_lr_scale (`float`, *optional*, defaults to 1.0):
            Same, for the matrix that reads the raw boundary states. Where a few of their channels are thousands of times
            larger than the rest, Adam's steps of equal size upset what it holds; 0 freezes it as it was initialised.
        eval_new_tokens (`int`, *optional*, defaults to 128): Tokens per prompt of `eval_prompts`.
        kwargs (`Any`): For `Trainer`.

    Raises:
        `ValueError`: under DeepSpeed, or version 1 of FSDP.

    Anchors depend on `args.seed`, the step and the process alone, so that a resumed run repeats them. Activations exist
    for one group of anchors at a time, so that memory does not grow with `num_anchors`.
    """

    loss_is_scaled_for_ga = True  # `training_step` must not divide it by the number of accumulated batches

    def __init__(
        self,
        drafter: LongSparkDrafter,
        target: PreTrainedModel,
        args: TrainingArguments,
        *,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        eval_prompts: Sequence[torch.LongTensor] = (),
        num_anchors: int = 512,
        anchors_per_group: int = 32,
        steps_per_batch: int = 1,
        markov_lr_scale: float = 1.0,
        boundary_lr_scale: float = 1.0,
        eval_new_tokens: int = 128,
        **kwargs: Any,
    ):
        check_fit(drafter.config, target)
        if args.metric_for_best_model in ("loss", "eval_loss"):
            raise ValueError(
                f"An evaluation reports no loss, but `metric_for_best_model` is {args.metric_for_best_model!r}, as it is by "
                'default. Pass `metric_for_best_model="tau"` and `eval_prompts`, or "simulated_tau" or '
                '"simulated_tau_greedy", to `TrainingArguments`.'
            )
        drafter.boundary_fusion.fc1.requires_grad_(boundary_lr_scale != 0)
        args.remove_unused_columns = False
        args.label_names = []
        args.ddp_find_unused_parameters = False
        args._n_gpu = min(args.n_gpu, 1)  # several GPUs take several processes: `DataParallel` cannot split the views
        if args.torch_compile:
            # Layer by layer, for shapes that change: the views of every pass have lengths of their own.
            os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "1"
            os.environ["ACCELERATE_DYNAMO_USE_DYNAMIC"] = "1"
        if eval_dataset is None and len(eval_prompts):
            eval_dataset = []  # enough to evaluate, though `Trainer` asks for a dataset
        super().__init__(
            drafter, args, data_collator=collate, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs
        )
        if self.is_deepspeed_enabled or (self.is_fsdp_enabled and not self.accelerator.is_fsdp2):
            kind = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP version 1"
            raise ValueError(
                f"LongSparkTrainer runs several backward passes per batch, which {kind} does not allow. Use plain data "
                "parallelism (`accelerate launch --multi_gpu`) or `--use_fsdp --fsdp_version 2`."
            )
        if self.is_fsdp_enabled:
            drafter.get_input_embeddings = lambda: None  # accelerate asks; the drafter borrows the target's
        self.model_accepts_loss_kwargs = True  # what tells `training_step` the same in transformers 5.18
        self.target = target.requires_grad_(False).eval()
        if getattr(target, "hf_device_map", None) is None:
            self.target.to(args.device)
        self.borrowed = BorrowedTarget.of(self.target, drafter.config)
        self.eval_prompts, self.eval_new_tokens = list(eval_prompts), eval_new_tokens
        self.num_anchors, self.anchors_per_group = num_anchors, anchors_per_group
        self.markov_lr_scale, self.boundary_lr_scale = markov_lr_scale, boundary_lr_scale
        self.steps_per_batch = steps_per_batch
        self._batches: list[dict[str, Any]] = []
        self.num_anchors_seen = 0

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW as configured, with learning rates of their own for the Markov head and the raw boundary's matrix."""
        if self.optimizer is None:
            optimizer_class, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            scales = {"markov_head": self.markov_lr_scale, "boundary_fusion.fc1": self.boundary_lr_scale, "": 1.0}
            groups = [
                {"params": [], "lr": kwargs["lr"] * scale, "weight_decay": 0.0 if part else self.args.weight_decay}
                for part, scale in scales.items()
            ]
            for name, parameter in (model or self.model).named_parameters():
                if parameter.requires_grad:
                    part = next(index for index, part in enumerate(scales) if part in name)
                    groups[part]["params"].append(parameter)
            self.optimizer = optimizer_class(groups, **kwargs)
        return self.optimizer

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        """The batches of one optimizer step with their anchors, and the sum of slot weights over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        share, group = self.state.global_step % self.steps_per_batch, self.state.global_step // self.steps_per_batch
        if share and 0 < len(batches) <= len(self._batches):
            # What was fetched is dropped, so that the place in the data follows from the step. Of what is shared, as many
            # as were asked for: at the end of an epoch the Trainer counts on fewer.
            batches = self._batches[: len(batches)]
        else:
            # A tuple of ints hashes alike in every process and session.
            seed = hash((self.args.seed, group, self.args.process_index)) % 2**63
            generator = torch.Generator().manual_seed(seed)
            for batch in batches:
                batch["drawn"] = [self._draw(mask.cpu(), generator) for mask in batch["response_mask"]]
                batch["rows"] = _Kept()
            self._batches = batches if self.steps_per_batch > 1 else []

        sums = torch.zeros(1 + len(batches), dtype=torch.float32)  # weights, then passes of the drafter by batch
        for number, batch in enumerate(batches, 1):
            batch["anchors"] = [anchors[share :: self.steps_per_batch] for anchors in batch["drawn"]]
            for mask, anchors in zip(batch["response_mask"], batch["anchors"]):
                sums[0] += self._label_weights(mask.cpu(), anchors).sum()
                sums[number] += len(split_anchors(anchors.tolist(), self.anchors_per_group))
                self.num_anchors_seen += len(anchors)
        everyones = sums.to(device)[None]
        everyones = self.accelerator.gather(everyones) if self.args.world_size > 1 else everyones
        # Every process makes as many passes as the busiest, and one at least: passes and gradients are collective.
        for batch, count in zip(batches, everyones[:, 1:].amax(dim=0).tolist()):
            batch["num_passes"] = max(int(count), 1)
        # A share may be empty at the very end of short responses.
        total = everyones[:, 0].sum()
        return batches, total.clamp(min=torch.finfo(total.dtype).tiny)

    def _draw(self, response_mask: torch.Tensor, generator: torch.Generator) -> torch.LongTensor:
        anchors = possible_anchors(response_mask)
        if len(anchors) > self.num_anchors:
            anchors = anchors[torch.randperm(len(anchors), generator=generator)[: self.num_anchors]].sort().values
        return anchors

    def _label_weights(self, response_mask: torch.Tensor, anchors: torch.LongTensor) -> torch.Tensor:
        block_size = self.drafter_config.block_size
        label_rows = anchors[:, None] + 1 + torch.arange(block_size)
        return label_mask(response_mask, label_rows) * slot_weights(block_size)

    @property
    def drafter_config(self) -> LongSparkConfig:
        """Of the drafter in training."""
        return self.accelerator.unwrap_model(self.model).config

    def run_target(self, inputs: dict[str, Any]) -> list[TargetRows]:
        """The target's rows for a batch of conversations."""
        return run_target(
            self.target,
            self.borrowed,
            self.drafter_config,
            inputs["input_ids"],
            inputs["attention_mask"],
            self.args.device,
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ):
        """
        The objective summed over this batch's anchors, divided by the sum of weights of the whole optimizer step.

        Args:
            model (`nn.Module`): The drafter, perhaps wrapped for data parallelism.
            inputs (`dict`): A collated batch with `anchors` from [`~LongSparkTrainer.get_batch_samples`].
            num_items_in_batch (`torch.Tensor`): That sum.

        Where gradients are on, those of all passes but the last are in the parameters already when this returns.
        """
        drafter = self.accelerator.unwrap_model(model)
        kept = inputs["rows"]
        if kept.rows is None:
            kept.rows = self.run_target(inputs)
            if self.steps_per_batch > 1:
                for rows in kept.rows:
                    rows.probabilities = self._probabilities(rows, drafter)
        queries = whole(drafter.summary_queries)
        passes = self._passes(drafter.config, queries, inputs)
        if self.steps_per_batch == 1:
            kept.rows = None

        def pass_loss(rows: TargetRows, mask: torch.Tensor, group: list[int], carry: Carry, queries: torch.Tensor):
            slots = slot_targets(rows, group, drafter.config.block_size)
            output = model(
                cache=group_views(drafter.config, queries, rows, group, carry),
                target=self.borrowed,
                target_hidden_states=rows.hidden_states,
                probabilities=rows.probabilities,
                label_mask=label_mask(mask, slots.pop("label_rows")),
                num_items_in_batch=1.0,
                **slots,
            )
            # Divided out here: FSDP would round what it is given to bf16. Data parallelism averages gradients over
            # processes, but the divisor is the weight of all of them already.
            return output.loss * self.accelerator.num_processes / num_items_in_batch

        # All passes but the last go backward at once, up to what they share: the scan over the sequence. The last one's
        # backward pass, which is the caller's, goes through the scan too and exchanges gradients between processes.
        total, shared, leaves = 0.0, [queries], [queries.detach().requires_grad_()]
        for rows, mask, group, carry in passes[:-1]:
            cut = [tuple(t.detach().requires_grad_() for t in layer) for layer in carry]
            with getattr(model, "no_sync", contextlib.nullcontext)():
                loss = pass_loss(rows, mask, group, cut, leaves[0])
                if torch.is_grad_enabled():
                    self.accelerator.backward(loss)
            total = total + loss.detach()
            shared += [t for layer in carry for t in layer]
            leaves += [t for layer in cut for t in layer]
        last = pass_loss(*passes[-1], queries)
        loss = _Total.apply(last, total + last.detach(), [leaf.grad for leaf in leaves], *shared)
        return (loss, {}) if return_outputs else loss

    def _passes(self, config: LongSparkConfig, queries: torch.Tensor, inputs: dict[str, Any]) -> list[tuple]:
        """Passes of the drafter over a batch: rows, mask of what is learned, anchors, summaries before them."""
        passes = []

        def add(rows: TargetRows, mask: torch.Tensor, groups: list[list[int]]) -> None:
            carries = prefix_scan(config, queries, rows, [group[0] for group in groups])
            passes.extend((rows, mask, *both) for both in zip(groups, carries))

        sequences = list(zip(inputs["rows"].rows, inputs["response_mask"], inputs["anchors"]))
        for rows, mask, anchors in sequences:
            add(rows, mask, split_anchors(anchors.tolist(), self.anchors_per_group))
        while len(passes) < inputs["num_passes"]:  # another process has more; these count for nothing
            rows, mask, _ = sequences[0]
            add(rows, torch.zeros_like(mask), [[min(1, len(rows.input_ids) - 1)]])
        return passes

    def _probabilities(self, rows: TargetRows, drafter: LongSparkDrafter) -> torch.Tensor:
        dtype = at_least_fp32(drafter.dtype)
        index = torch.arange(len(rows.hidden_states), device=rows.hidden_states.device)
        chunks = (
            target_probabilities(rows.hidden_states, chunk, self.borrowed, dtype, drafter.draft_token_ids)[0]
            for chunk in index.split(256)
        )
        return torch.cat(list(chunks))

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """
        Simulated acceptance over the evaluation data, and τ of `generate` over `eval_prompts` as `eval_tau`.

        Returns:
            `dict`: see [`summarize`]; with several datasets by name, the names are in those of the metrics.

        Raises:
            `ValueError`: without data and prompts.
        """
        datasets = self.eval_dataset if eval_dataset is None else eval_dataset
        if not isinstance(datasets, dict):
            datasets = {"": () if datasets is None else datasets}
        if not any(map(len, datasets.values())) and not self.eval_prompts:
            raise ValueError("There is nothing to evaluate on. Pass `eval_dataset`, or `eval_prompts` to the trainer.")
        drafter = self.whole_drafter()
        was_training = drafter.training
        drafter.eval()
        world, rank = self.args.world_size, self.args.process_index

        def sequences(dataset: Dataset) -> Iterator[tuple]:
            for index in range(rank, len(dataset), world):
                inputs = self._prepare_inputs(collate([dataset[index]]))
                if not len(possible_anchors(inputs["response_mask"][0])):
                    continue  # a response of one token has no round
                yield self.run_target(inputs)[0], inputs["response_mask"][0], dataset[index]["temperature"]

        metrics = {}
        # Evaluation must not move the random state that training continues with.
        with torch.random.fork_rng():
            for name, dataset in datasets.items():
                if not len(dataset):
                    continue
                sums = simulate(drafter, self.borrowed, sequences(dataset)).to(self.args.device, torch.float32)
                if world > 1:
                    sums = self.accelerator.reduce(sums)
                prefix = f"{metric_key_prefix}_{name}" if name else metric_key_prefix
                metrics |= summarize(sums.double().cpu(), drafter.config.block_size, prefix)
            if self.eval_prompts:
                metrics[f"{metric_key_prefix}_tau"] = generated_tau(
                    self.target, drafter, self.eval_prompts, self.eval_new_tokens, do_sample=False
                )
        metrics[f"{metric_key_prefix}_anchors_seen"] = self.num_anchors_seen
        metrics |= {f"{metric_key_prefix}_{name}": peak for name, peak in peak_memory(self.args.device).items()}
        drafter.train(was_training)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, *_: Any, **__: Any) -> None:
        """
        Not for a drafter.

        Raises:
            `ValueError`: always.
        """
        raise ValueError(
            "A drafter predicts nothing without its target. Use `evaluate(dataset)` for its metrics, or "
            "`target.generate(**inputs, assistant_model=drafter)`."
        )

    def whole_drafter(self) -> LongSparkDrafter:
        """The drafter to evaluate; a copy where it is sharded, as processes evaluate on their own."""
        drafter = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if not self.is_fsdp_enabled:
            return drafter
        state = {name: whole(t.detach()) for name, t in drafter.state_dict().items()}
        copy = LongSparkDrafter.without_weights(drafter.config)
        copy.load_state_dict(state, assign=True)
        return copy

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As `Trainer.log`; the last entry of a training has the peak memory too."""
        if "train_runtime" in logs:
            logs |= peak_memory(self.args.device)
        super().log(logs, *args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """As `Trainer.train`; `True` goes on from the newest checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"There is no complete checkpoint in {self.args.output_dir} to resume from. Choose another `output_dir`, "
                    "or leave out `resume_from_checkpoint`."
                )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Older checkpoints go when the new one is complete, not before: a kill must leave one.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()  # each process writes its random state
        if self.args.should_save:
            output_dir = self._get_output_dir(trial)
            folder = Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            write_result(folder / COMPLETE, {"num_anchors_seen": self.num_anchors_seen})
            rotate_checkpoints(output_dir, limit, self.state.best_model_checkpoint, use_mtime=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        file = Path(resume_from_checkpoint) / COMPLETE
        if file.exists():
            self.num_anchors_seen = read_result(file)["num_anchors_seen"]


def all_checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """Folders of checkpoints, by step."""
    found = {path: path.name.rpartition("-")[2] for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    return {int(step): path for path, step in found.items() if re.fullmatch(r"[0-9]+", step) and path.is_dir()}


def complete_checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """Those that were written to their end."""
    return {step: path for step, path in all_checkpoints(output_dir).items() if (path / COMPLETE).is_file()}


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint that was written to its end."""
    complete = complete_checkpoints(output_dir)
    return str(complete[max(complete)]) if complete else None
