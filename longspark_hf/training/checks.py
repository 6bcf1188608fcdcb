"""What stops a training run before it begins: a tokenizer that is not the target's, a full disk, another run's folder.

Knows: what a run leaves in its folder, how much it needs there, which settings make it the same run.
Does not know: how a run is carried out (run) or what it costs in memory and time (plan).
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase, TrainingArguments

from longspark_hf import LongSparkConfig
from longspark_hf.evaluation.provenance import read_result

from .corpus import TrainingData
from .data import response_end, stop_ids
from .trainer import all_checkpoints, complete_checkpoints


BEST, PROVENANCE, EVALUATIONS = "best", "provenance.json", "evaluations.jsonl"
BETTER = f"{BEST}.new"  # until it is in the place of the best
METRICS = "metrics.json"  # of the best drafter; written last

# What makes two runs the same run: of the drafter's config, of the arguments of `prepare`, of `TrainingArguments`.
KEPT_FIELDS = ("target_layer_ids", "block_size", "window_size", "num_summary_queries", "markov_rank", "mask_token_id")
KEPT_FIELDS += ("qk_norm", "boundary_residual", "draft_vocab_size")
KEPT_OPTIONS = ("init_from", "from_target", "num_anchors", "steps_per_batch", "markov_lr_scale", "boundary_lr_scale")
KEPT_OPTIONS += ("num_eval_prompts", "eval_new_tokens")  # or τ of one evaluation says nothing about another's
KEPT_ARGUMENTS = ("learning_rate", "lr_scheduler_type", "adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm")
KEPT_ARGUMENTS += ("bf16", "seed")


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    target_config: PreTrainedConfig,
    generation_config: GenerationConfig | None = None,
) -> None:
    """
    Raise if a tokenizer cannot be the target's, or cannot end a response.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): To check.
        target_config (`PreTrainedConfig`): Of the target.
        generation_config (`GenerationConfig`, *optional*): Of the target; may name further end-of-sequence tokens.

    Raises:
        `ValueError`: naming both values and the fix.
    """
    text = target_config.get_text_config(decoder=True)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The target's tokenizer has no end-of-sequence token, so a drafter could not learn where responses end. Set "
            '"eos_token" in its tokenizer_config.json.'
        )
    # Added tokens may lie above the table (Gemma 3's image token does); the vocabulary itself may not.
    if tokenizer.vocab_size > text.vocab_size:
        raise ValueError(
            f"The tokenizer has a vocabulary of {tokenizer.vocab_size} tokens, the target one of {text.vocab_size}: it "
            "belongs to another model. Put the target's own tokenizer into its folder."
        )
    ends, end = stop_ids(text) | stop_ids(generation_config), response_end(tokenizer, generation_config)
    if generation_config is not None and ends and end not in ends:
        raise ValueError(
            f"The tokenizer ends a response with {tokenizer.decode([end])!r} (id {end}), but the target "
            f"stops at {sorted(ends)} only. Either the tokenizer belongs to another model, or `eos_token_id` is to be "
            "corrected in the target's generation_config.json."
        )


def check_start(name: str, config: LongSparkConfig, wanted: dict[str, Any]) -> None:
    """
    Raise if a drafter to start from is not as wanted.

    Args:
        name (`str`), config ([`LongSparkConfig`]): Of the drafter.
        wanted (`dict`): Fields of its config; `None` takes what it has, and a draft vocabulary can be given to one without.

    Raises:
        `ValueError`: naming both values.
    """
    for field, value in wanted.items():
        has = getattr(config, field)
        if value is not None and value != has and not (field == "draft_vocab_size" and has is None):
            raise ValueError(
                f"The drafter {name} has `{field}` {has}, not {value}. Leave that setting out to go on with this drafter, "
                "or train a new one without --init-from."
            )


def run_bytes(num_parameters: int, save_total_limit: int | None) -> dict[str, int]:
    """
    Disk space of a run, in bytes.

    Args:
        num_parameters (`int`): Of the drafter, kept in fp32.
        save_total_limit (`int`, *optional*): Checkpoints kept; one more exists while the newest is written.

    Returns:
        `dict`: of one `checkpoint` (fp32 weights and both moments of AdamW), the `best` drafter, and the `total`.
    """
    checkpoint, best = 3 * 4 * num_parameters, 4 * num_parameters
    # The best drafter, too, is written beside its predecessor before it takes the place.
    return {"checkpoint": checkpoint, "best": best, "total": ((save_total_limit or 1) + 1) * checkpoint + 2 * best}


def free_disk(folder: str | Path) -> int:
    """Free disk space where `folder` is or will be."""
    return shutil.disk_usage(_existing(folder)).free


def check_disk(folder: str | Path, needed: int) -> None:
    """
    Raise if a run would fill the disk.

    Args:
        folder (`str`): Of the run; what an interrupted run has written there already is not needed again.
        needed (`int`): Bytes of the whole run.

    Raises:
        `ValueError`: naming both sizes.
    """
    written = sum(file.stat().st_size for part in _written(folder) for file in part.rglob("*") if file.is_file())
    free = free_disk(folder)
    if needed - written > free:
        raise ValueError(
            f"Checkpoints and the best drafter in {folder} need {needed / 2**30:.3g} GiB, but {free / 2**30:.3g} GiB are "
            "free there. Make room, or choose an --output on another disk."
        )


def check_output(folder: str | Path) -> None:
    """
    Raise if no run can be written to `folder`, which need not exist yet.

    Raises:
        `ValueError`: if it is a file, is not ours to write to, or holds checkpoints of something else.
    """
    place = _existing(folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = "is not a folder" if not place.is_dir() else "is not writable"
        raise ValueError(f"Cannot write to {folder}: {place} {reason}. Choose another --output.")
    found = _written(folder)
    if found and not (Path(folder) / PROVENANCE).is_file():
        raise ValueError(
            f"The folder {folder} holds {', '.join(sorted(part.name for part in found))}, but no {PROVENANCE}: a run of "
            "`longspark train` would delete what it did not write. Choose another --output, or move them away."
        )


def check_same_run(folder: str | Path, settings: dict[str, Any]) -> None:
    """
    Raise if `folder` holds a run with other settings.

    Args:
        folder (`str`): Of the run.
        settings (`dict`): What made it what it is, see [`run_settings`].

    Raises:
        `ValueError`: naming the settings that differ, with both values.
    """
    if not _written(folder):
        return
    there = read_provenance(folder).get("settings", {})
    now = json.loads(json.dumps(settings))
    differ = [
        f"{name} {there[name]} there, {now[name]} now" for name in there if name in now and there[name] != now[name]
    ]
    if differ:
        raise ValueError(
            f"The folder {folder} holds another run: {'; '.join(differ)}. Repeat its settings to go on with it, choose "
            "another --output, or start over with --no-resume, which deletes that run."
        )


def read_provenance(folder: str | Path) -> dict[str, Any]:
    """
    What a run has noted about itself in its folder, nothing where there is no run.

    Raises:
        `ValueError`: if the file is damaged.
    """
    file = Path(folder) / PROVENANCE
    fix = "Choose another --output, or start over with --no-resume, which deletes the run there."
    return read_result(file, fix) if file.is_file() else {}


def run_settings(
    config: LongSparkConfig, data: TrainingData, args: TrainingArguments, options: dict[str, Any]
) -> dict[str, Any]:
    r"""
    The settings that a run must keep when it is resumed. Its length, and when it saves and evaluates, may change.

    Args:
        config ([`LongSparkConfig`]): Of the drafter.
        data ([`TrainingData`]): Its digest stands for the content of the file.
        args (`TrainingArguments`): A batch may be split differently among processes, its size must stay.
        options (`dict`): Arguments of [`~longspark_hf.training.run.prepare`], of which `KEPT_OPTIONS` are taken.
    """
    arguments = args.to_dict()
    return {
        # A local copy of the same model differs in its directory only.
        "target": (config.target_name_or_path or "").rstrip("/").rpartition("/")[2],
        **{name: getattr(config, name) for name in KEPT_FIELDS},
        "data_sha256": data.digest,
        **data.settings,
        **{name: options[name] for name in KEPT_OPTIONS},
        "batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
        **{name: arguments[name] for name in KEPT_ARGUMENTS},
    }


def delete_run(folder: str | Path) -> None:
    """Delete what a run has written to `folder`, and nothing else."""
    for part in _written(folder):
        shutil.rmtree(part)
    for name in (PROVENANCE, EVALUATIONS):
        (Path(folder) / name).unlink(missing_ok=True)


def delete_interrupted(folder: str | Path) -> None:
    """Delete checkpoints that were not written to their end, or they would be in the way."""
    complete = complete_checkpoints(folder)
    for step, checkpoint in all_checkpoints(folder).items():
        if step not in complete:
            shutil.rmtree(checkpoint)


def replace_best(folder: str | Path) -> None:
    """Let a better drafter that was written to its end take the place of the best; half of one is deleted."""
    best, better = Path(folder) / BEST, Path(folder) / BETTER
    if (better / METRICS).is_file():
        shutil.rmtree(best, ignore_errors=True)
        better.rename(best)
    elif better.exists():
        shutil.rmtree(better)


def _existing(folder: str | Path) -> Path:
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    return place


def _written(folder: str | Path) -> list[Path]:
    drafters = (Path(folder) / name for name in (BEST, BETTER))
    return [*all_checkpoints(folder).values(), *(drafter for drafter in drafters if drafter.is_dir())]
