"""What a drafter costs on a target, by context length: `python -m longspark_hf.evaluation.cost`.

Knows: how to time a draft pass over synthetic rows, the target's passes over few tokens, the prefill with and without a
drafter, and peak memory.
Does not know: the parts of a round (profile), or acceptance; a drafter's weights do not change its cost.
"""

import argparse
import contextlib
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from longspark_hf import InPlaceCache, LongSparkConfig, LongSparkDrafter
from longspark_hf.attention_longspark import grouped_attention
from longspark_hf.compat import cache_argument
from longspark_hf.linear_longspark import few_rows
from longspark_hf.target_longspark import BorrowedTarget

from .demo import PutTimer, build_prompts
from .info import peer_state_bytes
from .methods import held_caches, synthetic_state
from .provenance import provenance, write_result
from .targets import load_target, mask_token_id


CONTEXTS = (1024, 8192, 32768, 131072)
VERIFY_CONTEXTS, VERIFY_TOKENS = (1024, 4096, 7168), (1, 2, 4, 8)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def median_ms(calls: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """
    Median milliseconds of several calls, run in turn so that a busy machine hits all alike.

    Args:
        calls (`dict`): What to time, by name.
        repeats (`int`): Rounds over all of them; three more warm up.
    """
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 3):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat >= 3:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def draft_rows(drafter: LongSparkDrafter, borrowed: BorrowedTarget, repeats: int) -> list[dict[str, Any]]:
    """Draft pass and state at every context length, beside the KV cache a growing drafter of that shape would hold."""
    anchor = torch.tensor([1])
    states = {context: synthetic_state(drafter, context) for context in CONTEXTS}
    calls = {
        context: functools.partial(drafter.draft, anchor, torch.tensor([context]), state, borrowed)
        for context, state in states.items()
    }
    times = median_ms(calls, repeats)
    return [
        {
            "context": context,
            "draft_ms": times[context],
            "state_bytes": states[context].nbytes,
            "growing_peer_state_bytes": peer_state_bytes(drafter.config, context, drafter.dtype),
        }
        for context in CONTEXTS
    ]


@torch.no_grad()
def verify_rows(target: PreTrainedModel, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of the target's passes over few tokens, by context: its stock cache and attention, and ours, in turn."""
    name, rows = cache_argument(target), []
    for context in VERIFY_CONTEXTS:
        say(f"verification at {context} rows")
        ids = torch.randint(0, target.config.vocab_size, (1, max(VERIFY_TOKENS)))
        kinds = {"stock": DynamicCache, "in_place": InPlaceCache, "grouped": InPlaceCache, "ours": InPlaceCache}
        caches = {kind: cache_class(config=target.config) for kind, cache_class in kinds.items()}
        for index, held in enumerate(held_caches(target, [context])["stock", context].layers):
            for cache in caches.values():
                cache.update(held.keys, held.values, index)

        def verify(kind: str, num_tokens: int, caches: dict[str, Cache] = caches, ids: torch.Tensor = ids) -> None:
            with contextlib.ExitStack() as stack:
                if kind in ("grouped", "ours"):
                    stack.enter_context(grouped_attention(target))
                if kind == "ours":
                    stack.enter_context(few_rows())
                target(ids[:, :num_tokens], **{name: caches[kind]})
            caches[kind].crop(-num_tokens)

        cases = [(kind, num_tokens) for num_tokens in VERIFY_TOKENS for kind in kinds]
        times = median_ms({case: functools.partial(verify, *case) for case in cases}, repeats)
        rows += [
            {"context": context, "tokens": num_tokens, **{f"{kind}_ms": times[kind, num_tokens] for kind in kinds}}
            for num_tokens in VERIFY_TOKENS
        ]
    return rows


def prefill_seconds(
    target: PreTrainedModel, tokenizer: Any, drafter: LongSparkDrafter, num_tokens: int, repeats: int
) -> dict[str, Any]:
    """Time to the first token of a real prompt, plainly and with the drafter, in turn."""
    inputs = build_prompts(target, tokenizer, num_tokens, 2)["long"]
    times: dict[str, list[float]] = {"plain": [], "drafter": []}
    for repeat in range(repeats):
        for name, assistant in (("plain", None), ("drafter", drafter)):
            say(f"prefill of {inputs['input_ids'].shape[1]} tokens, {name}, {repeat + 1} of {repeats}")
            timer, start = PutTimer(), time.perf_counter()
            target.generate(**inputs, assistant_model=assistant, max_new_tokens=2, do_sample=False, streamer=timer)
            times[name].append(timer.times[1] - start)
    ratios = [ours / plain for ours, plain in zip(times["drafter"], times["plain"], strict=True)]
    medians = {f"{name}_seconds": statistics.median(values) for name, values in times.items()}
    return {
        "prompt_tokens": inputs["input_ids"].shape[1],
        **medians,
        "ratio": statistics.median(ratios),
        "all_seconds": times,
    }


def peak_memory(target: str, num_tokens: int, repeats: int = 1) -> dict[str, Any]:
    """
    Peak resident memory of processes that answer a long prompt, with the drafter loaded in all and used in half.

    With `MALLOC_MMAP_THRESHOLD_=1048576` in the environment it is what was in use; glibc's default also counts freed blocks
    that it keeps.
    """
    peaks: dict[str, list[int]] = {"plain": [], "drafter": []}
    for repeat in range(repeats):
        for name, found in peaks.items():
            say(f"peak memory, {name}, {repeat + 1} of {repeats}")
            command = [sys.executable, "-m", __spec__.name, "--target", target, "--peak-of", name]
            command += ["--prefill-tokens", str(num_tokens)]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(int(result.stdout.strip().splitlines()[-1]))
    medians = {name: statistics.median(found) for name, found in peaks.items()}
    return {"prompt_tokens": num_tokens, "ratio": medians["drafter"] / medians["plain"], "all_bytes": peaks}


def own_peak_bytes() -> int:
    """Peak resident memory of this process since it started. (`getrusage` would count its parent's too.)"""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--output", help="Result file to write; printed otherwise.")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--prefill-tokens", type=int, default=8000)
    parser.add_argument("--prefill-repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="Of the drafter.")
    parts = ["draft", "verify", "prefill", "memory"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--peak-of", choices=["plain", "drafter"], help=argparse.SUPPRESS)
    args = parser.parse_args()

    target, tokenizer = load_target(args.target)
    torch.manual_seed(0)
    config = LongSparkConfig.from_target(target.config, mask_token_id=mask_token_id(tokenizer, len(tokenizer)))
    drafter = LongSparkDrafter(config).to(getattr(torch, args.dtype)).eval()
    if args.peak_of:
        for parameter in target.parameters():  # out of the mapped file, whose pages the kernel drops when it likes
            parameter.data = parameter.data.clone()
        inputs = build_prompts(target, tokenizer, args.prefill_tokens, 16)["long"]
        assistant = drafter if args.peak_of == "drafter" else None
        target.generate(**inputs, assistant_model=assistant, max_new_tokens=16, do_sample=False)
        print(own_peak_bytes())
        return

    borrowed = BorrowedTarget.of(target, config)
    result: dict[str, Any] = {
        "target": target.config._name_or_path,
        "drafter": "untrained, LongSparkConfig.from_target: cost does not depend on weights",
    }
    if "draft" in args.parts:
        say("draft pass by context")
        rows = result["rows"] = draft_rows(drafter, borrowed, args.repeats)
        result["draft_ms_128k_over_1k"] = rows[-1]["draft_ms"] / rows[0]["draft_ms"]
    if "verify" in args.parts:
        result["verify"] = verify_rows(target, args.repeats)
    if "prefill" in args.parts:
        result["prefill"] = prefill_seconds(target, tokenizer, drafter, args.prefill_tokens, args.prefill_repeats)
    if "memory" in args.parts:
        result["peak_memory"] = peak_memory(args.target, args.prefill_tokens)
    result["provenance"] = provenance(drafter.dtype)
    if args.output:
        write_result(args.output, result)
    else:
        print(result)


if __name__ == "__main__":
    main()
