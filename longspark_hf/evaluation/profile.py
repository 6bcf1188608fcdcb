"""`longspark profile`: where the milliseconds of a speculative round go, and what they would be at least.

Knows: which prompts are answered, in which order, how rounds become rows.
Does not know: how a round is timed (profile_clock), what a part takes at least (profile_floor), how it looks (profile_rows).
"""

import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from longspark_hf import LongSparkDrafter

from .demo import SHIPPED_DRAFTER, build_drafter
from .profile_clock import Round, RoundProfiler, replaced
from .profile_floor import Ceilings, RoundWork
from .provenance import provenance, write_result
from .targets import device_and_dtype, load_target, load_target_config
from .tasks import first_ids, stdlib_prompts


CONTEXTS = (1024, 6144)
SHORTEST_CONTEXT = 128
# What is drafted, and how `generate` is told so.
MODES: dict[str, dict[str, Any]] = {"whole blocks": {}, "auto": {"num_assistant_tokens": "auto"}}
# In the order of a round. `draft` stands for the three before it where a compiled draft pass does not tell them apart.
DRAFT_PARTS = ("trunk", "head", "markov", "draft")
PARTS = (*DRAFT_PARTS, "verify", "acceptance", "upkeep", "rest")


@dataclass(frozen=True)
class ProfileSettings:
    r"""
    What to take apart.

    Args:
        contexts (`tuple[int, ...]`): Lengths of the prompts, about.
        max_new_tokens (`int`, *optional*, defaults to 64): Of every answer.
        prompts (`int`, *optional*, defaults to 2): Of each length.
        repeats (`int`, *optional*, defaults to 1): Of every answer.
        temperature (`float`, *optional*, defaults to 0.0): 0 is greedy.

    Raises:
        `ValueError`: for settings that cannot be measured.
    """

    contexts: tuple[int, ...] = CONTEXTS
    max_new_tokens: int = 64
    prompts: int = 2
    repeats: int = 1
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < SHORTEST_CONTEXT:
            raise ValueError(f"--contexts takes lengths of at least {SHORTEST_CONTEXT}, got {list(self.contexts)}.")
        object.__setattr__(self, "contexts", tuple(sorted(set(self.contexts))))
        for name in ("prompts", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature takes a number of at least 0, got {self.temperature}.")
        if self.max_new_tokens < 2:
            raise ValueError(f"--max-new-tokens must be at least 2, got {self.max_new_tokens}.")


@dataclass
class Context:
    """What was found at one length of prompts: rounds by mode, those of each prompt together."""

    rounds: dict[str, list[list[Round]]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    prompt_tokens: list[int] = field(default_factory=list)
    work: RoundWork | None = None


def measure(
    target: PreTrainedModel,
    drafter: LongSparkDrafter,
    prompts: dict[int, list[torch.LongTensor]],
    max_new_tokens: int = 64,
    repeats: int = 1,
    temperature: float = 0.0,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """
    Answer every prompt with the drafter, by whole blocks and by "auto" in turn, and take the rounds apart.

    Args:
        target (`PreTrainedModel`), drafter ([`LongSparkDrafter`]): On one device.
        prompts (`dict[int, list[torch.LongTensor]]`): Of shape `(1, num_tokens)`, by the length that was asked for.
        max_new_tokens (`int`): Of every answer; none ends before.
        repeats (`int`): Of every answer.
        temperature (`float`): 0 is greedy.
        progress (`Callable`, *optional*): Told what runs now.

    Returns:
        `dict`: a row for each length, and the ceilings that floors are made of.

    Raises:
        `ValueError`: if the answers are too short for a whole round.
    """
    shortest = drafter.config.block_size + 2  # the token of the prefill, and a round that accepts everything
    if max_new_tokens < shortest:
        raise ValueError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a round that drafts {drafter.config.block_size} tokens. "
            f"Use --max-new-tokens {shortest} or more."
        )
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    sampling = sampling if temperature > 0 else {"do_sample": False}
    profiler, ceilings = RoundProfiler(target, drafter), Ceilings(target.device, target.dtype)
    found = {context: Context() for context in prompts}
    turns = [(context, number) for number in range(max(map(len, prompts.values()))) for context in prompts]
    with replaced(target.generation_config, "eos_token_id", None), profiler.installed():
        progress("warm-up")
        with profiler.prefilled(prompts[min(prompts)][0]) as answer:
            answer(max_new_tokens=2 * shortest, **sampling)
        for context, number in turns:
            if number >= len(prompts[context]):
                continue
            here, input_ids = found[context], prompts[context][number]
            title = f"prompt {number + 1} of {len(prompts[context])} of {context} tokens"
            progress(f"{title}: prefill")
            ceilings.sample()
            here.prompt_tokens.append(input_ids.shape[1])
            with profiler.prefilled(input_ids) as answer:
                here.work = RoundWork.of(target, drafter, profiler.cache, drafter.stats.state_bytes)
                rounds: dict[str, list[Round]] = {mode: [] for mode in MODES}
                for repeat in range(repeats):
                    for mode, cap in MODES.items():
                        progress(f"{title}: {mode}, {repeat + 1} of {repeats}")
                        profiler.rounds = rounds[mode]
                        torch.manual_seed(repeat)
                        answer(max_new_tokens=max_new_tokens, **sampling, **cap)
            for mode in MODES:
                here.rounds[mode].append(rounds[mode])
    ceilings.sample()
    return {
        "rows": [make_row(context, here, ceilings) for context, here in found.items()],
        "ceilings": ceilings.medians(),
    }


def make_row(context: int, found: Context, ceilings: Ceilings) -> dict[str, Any]:
    """What was found at one length of prompts, as the result file holds it."""
    whole = [one for rounds in found.rounds["whole blocks"] for one in rounds]
    return {
        "context": context,
        "prompt_tokens": round(statistics.mean(found.prompt_tokens)),
        "prompts": len(found.prompt_tokens),
        **budget(whole, found.work, ceilings),
        "pace": {mode: pace(by_prompt) for mode, by_prompt in found.rounds.items()},
    }


def pace(by_prompt: list[list[Round]]) -> dict[str, Any]:
    """
    Speed of all rounds together, those that drafted nothing among them, against plain steps: what the committed tokens would
    have taken one by one, at the pace of the steps beside their rounds, over what the rounds took.
    """
    rounds = [one for some in by_prompt for one in some]

    def speedup(some: list[Round], plain: str) -> float:
        return sum(one.committed * getattr(one, plain) for one in some) / sum(sum(one.ms.values()) for one in some)

    return {
        "rounds": len(rounds),
        "tau": statistics.mean(one.committed for one in rounds),
        "drafted": statistics.mean(one.drafted for one in rounds),
        "speedup": speedup(rounds, "decode_ms"),
        "speedup_in_place": speedup(rounds, "decode_in_place_ms"),
        "speedup_in_place_by_prompt": [speedup(some, "decode_in_place_ms") for some in by_prompt],
    }


def budget(rounds: list[Round], work: RoundWork, ceilings: Ceilings) -> dict[str, Any]:
    """Where the time of a round goes. Medians over the rounds that drafted most tokens; the last of a call may have room for fewer."""
    if not rounds:
        raise ValueError(
            "No round was seen: this target's calls run in the assisted-decoding loop of transformers. Pass another --target."
        )
    drafted = max(one.drafted for one in rounds)
    if drafted == 0:
        raise ValueError(
            "No round drafted anything: the drafter's logits are not finite. Try another --dtype or --drafter."
        )
    rounds = [one for one in rounds if one.drafted == drafted]
    if not any("trunk" in one.ms for one in rounds):
        rounds = [_draft_in_one(one) for one in rounds]
    names = [part for part in PARTS if any(one.ms.get(part) for one in rounds)]
    whole = [sum(one.ms.values()) for one in rounds]
    passes = [sum(one.ms.get(part, 0.0) for part in (*DRAFT_PARTS, "verify")) for one in rounds]
    round_ms = statistics.median(whole)
    parts = {}
    for part in names:
        milliseconds = statistics.median(one.ms.get(part, 0.0) for one in rounds)
        parts[part] = {"ms": milliseconds, "percent": 100 * milliseconds / round_ms}
        parts[part] |= work.floor(part, drafted, ceilings)
    return {
        "rounds": len(rounds),
        "drafted_tokens": drafted,
        "verified_tokens": drafted + 1,
        "round_ms": round_ms,
        "decode_ms": statistics.median(one.decode_ms for one in rounds),
        "decode_in_place_ms": statistics.median(one.decode_in_place_ms for one in rounds),
        "parts": parts,
        # Each round with what happened beside it: a machine that is busy for a while hits both.
        "round_over_passes": statistics.median(a / b for a, b in zip(whole, passes)),
        "verify_over_decode": statistics.median(one.ms["verify"] / one.decode_ms for one in rounds),
        "break_even_tau": statistics.median(a / one.decode_ms for a, one in zip(whole, rounds)),
    }


def _draft_in_one(one: Round) -> Round:
    others = {part: ms for part, ms in one.ms.items() if part not in DRAFT_PARTS}
    return replace(one, ms={"draft": sum(one.ms.values()) - sum(others.values()), **others})


def run(
    target: str,
    drafter: str | None,
    settings: ProfileSettings,
    device: str = "auto",
    dtype: str = "auto",
    output: Path | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """
    Load two models and take their rounds apart.

    Args:
        target (`str`): A Hub id, a folder, or `smollm2`.
        drafter (`str`, *optional*): A Hub id or a folder; by default the shipped one, or one with random weights.
        settings ([`ProfileSettings`]): What to measure.
        device, dtype (`str`, *optional*, defaults to `"auto"`): Of both models.
        output (`Path`, *optional*): Result file to write.
        progress (`Callable`, *optional*): Told what runs now.

    Returns:
        `dict`: the result, as the file holds it.

    Raises:
        `ValueError`: for whatever the user can put right.
    """
    place, precision = device_and_dtype(device, dtype)
    if output is not None and (output.is_dir() or not _creatable(output)):
        raise ValueError(
            f"Cannot write the result file {output}. Pass a file in a folder that can be written as --output."
        )
    config = load_target_config(target)
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit and settings.contexts[-1] + settings.max_new_tokens > limit:
        raise ValueError(
            f"A prompt of {settings.contexts[-1]} tokens and --max-new-tokens {settings.max_new_tokens} exceed the {limit} "
            f"positions of the target. Use --contexts of {max(limit - settings.max_new_tokens, 0)} or less."
        )
    progress(f"loading {target}")
    model, tokenizer = load_target(target, precision, config)
    draft_model, name, _ = build_drafter(model, tokenizer, drafter)
    name = SHIPPED_DRAFTER.name if name == str(SHIPPED_DRAFTER) else name  # the same on every machine
    progress(f"drafter: {name}")
    prompts = {
        context: [
            torch.tensor([first_ids(tokenizer, turns[0])], device=place)
            for turns in stdlib_prompts(tokenizer, context, settings.prompts, random.Random(0))
        ]
        for context in settings.contexts
    }
    model, draft_model = model.to(place), draft_model.to(device=place, dtype=precision)
    measured = measure(
        model, draft_model, prompts, settings.max_new_tokens, settings.repeats, settings.temperature, progress
    )
    result = {
        "kind": "profile",
        "target": model.config._name_or_path,
        "drafter": name,
        "max_new_tokens": settings.max_new_tokens,
        "prompts": settings.prompts,
        "repeats": settings.repeats,
        "temperature": settings.temperature,
        **measured,
        "provenance": provenance(precision, place),
    }
    if output is not None:
        write_result(output, result)
    return result


def _creatable(path: Path) -> bool:
    """Whether a file can be written there, its folders made before: told before minutes of measuring."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    return folder.is_dir() and os.access(folder, os.W_OK)
