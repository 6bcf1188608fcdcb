"""`longspark demo`: the same answers, plainly and with a drafter, side by side on this machine.

Knows: which prompts, how a `generate` call is timed.
Does not know: where models come from (targets) or how the result is shown (cli).
"""

import platform
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BatchEncoding, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

import longspark_hf
from longspark_hf import LongSparkConfig, LongSparkDrafter

from .targets import SMOLLM2_HUB_ID, load_drafter, mask_token_id


SHIPPED_DRAFTER = Path(longspark_hf.__file__).parent.parent / "examples" / "LongSpark-SmolLM2-135M-Instruct"
SHORT_QUESTION = "Explain to a curious child, step by step, why the sky is blue and why sunsets are red."
LONG_QUESTION = "Describe what this Python source does, and name its most important classes and functions."


@dataclass
class Generation:
    """One timed `generate` call. The first token ends the prefill; `decode_tokens` are those after it."""

    new_ids: list[int]
    prefill_seconds: float
    decode_seconds: float
    decode_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else float("nan")


class PutTimer(BaseStreamer):
    """Notes when tokens arrive. `generate` puts the prompt first, then each round's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


def build_drafter(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str | None = None
) -> tuple[LongSparkDrafter, str, bool]:
    """
    The drafter to show: the one asked for, else the shipped one, else an untrained one.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        path (`str`, *optional*): Hub id or folder of a drafter.

    Returns:
        `tuple`: the drafter, where it comes from, and whether it is trained.

    Raises:
        `ValueError`: if it cannot be loaded or does not fit the target.
    """
    if path is None and target.config._name_or_path == SMOLLM2_HUB_ID and (SHIPPED_DRAFTER / "config.json").is_file():
        path = str(SHIPPED_DRAFTER)
    if path is not None:
        drafter = load_drafter(path)
        drafter.check_target(target, tokenizer)
        return drafter, path, True

    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    config = LongSparkConfig.from_target(target.config, tokenizer, mask_token_id=mask_token_id(tokenizer, vocab_size))
    torch.manual_seed(0)
    return LongSparkDrafter(config).eval(), "untrained, LongSparkConfig.from_target", False


def build_prompts(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, long_tokens: int, max_new_tokens: int
) -> dict[str, BatchEncoding]:
    """
    A short question, and a question about real source code of about `long_tokens` tokens.

    Args:
        target (`PreTrainedModel`): Its config limits the length.
        tokenizer (`PreTrainedTokenizerBase`): With or without a chat template.
        long_tokens (`int`): Length of the long prompt.
        max_new_tokens (`int`): Must fit behind it.

    Raises:
        `ValueError`: if prompt and answer exceed the target's positions, or the machine has not enough source text.
    """
    limit = target.config.get_text_config(decoder=True).max_position_embeddings
    if long_tokens + max_new_tokens > limit:
        raise ValueError(
            f"--long-tokens {long_tokens} and --max-new-tokens {max_new_tokens} exceed the {limit} positions of the "
            f"target. Use --long-tokens {max(limit - max_new_tokens, 0)} or less."
        )
    frame = _encode(tokenizer, f"```python\n\n```\n\n{LONG_QUESTION}")["input_ids"].shape[1]
    source = _source_text(tokenizer, max(long_tokens - frame, 1))
    return {
        "short": _encode(tokenizer, SHORT_QUESTION),
        "long": _encode(tokenizer, f"```python\n{source}\n```\n\n{LONG_QUESTION}"),
    }


def run(
    target: PreTrainedModel,
    drafter: LongSparkDrafter,
    prompts: dict[str, BatchEncoding],
    max_new_tokens: int,
    repeats: int = 2,
    patience: float = 30.0,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """
    Time every prompt plainly and with the drafter, interleaved, and take medians.

    Args:
        target (`PreTrainedModel`): The target.
        drafter ([`LongSparkDrafter`]): One that fits it.
        prompts (`dict[str, BatchEncoding]`): From [`build_prompts`].
        max_new_tokens (`int`): Length of the answers.
        repeats (`int`, *optional*, defaults to 2): Of each pair.
        patience (`float`, *optional*, defaults to 30.0):
            Seconds after which a prompt is not repeated: a slow prefill makes a long, and steady, measurement anyway.
        progress (`Callable`, *optional*): Told what runs now.

    Returns:
        `dict`: one row per prompt, and what the numbers were measured with.
    """
    progress("warm-up")
    for assistant in (None, drafter):
        _generate(target, prompts["short"], min(max_new_tokens, 8), assistant)

    rows = []
    for name, inputs in prompts.items():
        num_tokens = inputs["input_ids"].shape[1]
        plain, drafted, stats = [], [], []
        start = time.perf_counter()
        while len(plain) < repeats and (not plain or time.perf_counter() - start < patience):
            progress(f"{name} prompt, {num_tokens} tokens, run {len(plain) + 1}: plain")
            plain.append(_generate(target, inputs, max_new_tokens, None))
            progress(f"{name} prompt, {num_tokens} tokens, run {len(drafted) + 1}: with the drafter")
            drafted.append(_generate(target, inputs, max_new_tokens, drafter))
            stats.append(drafter.stats)
        rows.append(_row(name, num_tokens, plain, drafted, stats))
    return {
        "rows": rows,
        "measured_with": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "max_new_tokens": max_new_tokens,
        },
    }


def _generate(
    target: PreTrainedModel, inputs: BatchEncoding, max_new_tokens: int, assistant: LongSparkDrafter | None
) -> Generation:
    timer = PutTimer()
    start = time.perf_counter()
    output = target.generate(
        **inputs, assistant_model=assistant, max_new_tokens=max_new_tokens, do_sample=False, streamer=timer
    )
    return Generation(
        new_ids=output[0, inputs["input_ids"].shape[1] :].tolist(),
        prefill_seconds=timer.times[1] - start,
        decode_seconds=timer.times[-1] - timer.times[1],
        decode_tokens=sum(timer.sizes[2:]),
    )


def _row(
    name: str, num_tokens: int, plain: list[Generation], drafted: list[Generation], stats: list[Any]
) -> dict[str, Any]:
    plain_speed = statistics.median(run.tokens_per_second for run in plain)
    drafted_speed = statistics.median(run.tokens_per_second for run in drafted)
    return {
        "prompt": name,
        "prompt_tokens": num_tokens,
        "new_tokens": len(plain[0].new_ids),
        "runs": len(plain),
        "identical": all(run.new_ids == plain[0].new_ids for run in plain + drafted),
        "tokens_per_second_plain": plain_speed,
        "tokens_per_second_drafter": drafted_speed,
        "speedup": drafted_speed / plain_speed,
        "mean_acceptance_length": stats[-1].mean_acceptance_length,
        "rounds": stats[-1].rounds,
        "accepted_by_position": list(stats[-1].accepted_by_position),
        "first_token_seconds_plain": statistics.median(run.prefill_seconds for run in plain),
        "first_token_seconds_drafter": statistics.median(run.prefill_seconds for run in drafted),
        "prefill_seconds": statistics.median(stat.prefill_seconds for stat in stats),
        "draft_ms_per_round": statistics.median(1e3 * stat.draft_seconds / max(stat.rounds, 1) for stat in stats),
        "verify_ms_per_round": statistics.median(1e3 * stat.verify_seconds / max(stat.rounds, 1) for stat in stats),
        "state_bytes": stats[-1].state_bytes,
    }


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> BatchEncoding:
    if tokenizer.chat_template is None:
        return tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def _source_text(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> str:
    """The standard library's sources, from `argparse.py` on, cut at `num_tokens` tokens."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files = [path for path in files if path.name >= "argparse.py"]
    ids: list[int] = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= num_tokens:
            return tokenizer.decode(ids[:num_tokens])
    raise ValueError(
        f"Found {len(ids)} tokens of Python source in {sysconfig.get_path('stdlib')}, fewer than --long-tokens asks for."
    )
