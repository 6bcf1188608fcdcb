"""Sweep and a short bench on one GPU in under ten minutes: `python -m longspark_hf.evaluation.gpu --output-dir results`.

Knows: what fits on the GPU, where weights may come from, when time is up.
Does not know: what a sweep or a bench measures (sweep, bench).
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from longspark_hf import LongSparkConfig

from .bench import Bench, BenchSettings, make_bench
from .findings import describe, finding_lines
from .methods import longspark_drafter
from .page import write_page
from .shapes import SHAPES, free_memory, parameter_bytes, random_target, shape_config
from .sweep import CONTEXTS, Sweep
from .sweep import run as run_sweep
from .targets import device_and_dtype, load_target_config
from .tasks import load_tasks


SWEEP_SHARE = 0.5  # of the time; the rest is the bench's
TASKS = ["stdlib-1k", "stdlib-8k", "stdlib-32k"]
RANDOM_SHAPES = ["qwen3-14b", "qwen3-8b", "qwen3-4b", "smollm2"]  # the first that fits
WEIGHTS_SHARE = 0.35  # of free memory; the rest is for drafters, caches and what passes need


class OutOfTime(Exception):
    """Raised where a measurement tells its progress, once its time is up. What was measured until then is kept."""


def until(deadline: float) -> Callable[[str], None]:
    """A progress function that prints, and raises [`OutOfTime`] after `deadline` on the monotonic clock."""

    def progress(message: str) -> None:
        if time.monotonic() > deadline:
            raise OutOfTime
        print(message, file=sys.stderr, flush=True)

    return progress


def largest_shape(device: torch.device, dtype: torch.dtype) -> str:
    """The largest known shape whose weights leave room for caches."""
    free = free_memory(device)
    for shape in RANDOM_SHAPES:
        if free is None or parameter_bytes(SHAPES[shape], dtype) <= WEIGHTS_SHARE * free:
            return shape
    return RANDOM_SHAPES[-1]


def fitting_sweep(**fields: Any) -> Sweep:
    """A sweep without the contexts that do not fit into memory."""
    contexts = list(fields.pop("contexts"))
    while True:
        try:
            return Sweep(contexts=contexts, **fields)
        except ValueError as error:
            if "GiB" not in str(error) or len(contexts) == 1:
                raise
            print(f"without {contexts[-1]:,} tokens: {error}", file=sys.stderr)
            contexts.pop()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte: all that random weights need, and nothing to download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<pad>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def random_bench(target: PreTrainedModel, tasks: list[str], settings: BenchSettings, **options: Any) -> Bench:
    """A bench whose target and drafter have random weights: it shows costs; nothing is accepted but by chance."""
    tokenizer = byte_tokenizer()
    config = LongSparkConfig.from_target(target.config, mask_token_id=target.config.vocab_size - 1)
    limit = target.config.max_position_embeddings
    max_new_tokens = options.pop("max_new_tokens")
    names = [
        name for name in tasks if 1024 * int(name.removeprefix("stdlib-").removesuffix("k")) + max_new_tokens < limit
    ]
    loaded = load_tasks(names or tasks[:1], tokenizer, options.pop("num_prompts"), max_new_tokens)
    drafter = longspark_drafter(target, config)
    return Bench(target, tokenizer, drafter, "an untrained drafter", loaded, settings, **options)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--output-dir", type=Path, default=Path("gpu_results"), help="for sweep.json, bench.json, page.html"
    )
    parser.add_argument("--target", help="folder or Hub id of a target with its weights; default: random weights")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter for --target; default: an untrained one")
    parser.add_argument("--shape", help="of random weights; default: the largest of Qwen3 that fits")
    parser.add_argument("--layers", type=int, help="decoder layers of random weights")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20, help="passes of the sweep")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything but downloads")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(arguments)
    try:
        for path in measure(options):
            print(path)
    except ValueError as error:
        parser.error(" ".join(str(error).split()))  # exit code 2


def measure(options: argparse.Namespace) -> list[Path]:
    """Run the sweep, then the bench, until time is up; both files hold what was measured by then."""
    device, dtype = device_and_dtype(options.device, options.dtype)
    if options.target is not None:
        load_target_config(options.target)  # whatever is wrong with the name is told first
    shape = options.target or options.shape or largest_shape(device, dtype)
    begun, seconds = time.monotonic(), 60 * options.minutes
    sweep_file, bench_file = (options.output_dir / f"{name}.json" for name in ("sweep", "bench"))
    written = []

    sweep = fitting_sweep(
        contexts=sorted(options.contexts),
        shape=shape,
        layers=None if options.target else options.layers,
        drafter=options.drafter,
        repeats=options.repeats,
        device=options.device,
        dtype=options.dtype,
    )
    try:
        result = run_sweep(sweep, sweep_file, until(begun + SWEEP_SHARE * seconds))
        print("\n".join([describe(result), *finding_lines(result)]))
    except OutOfTime:
        print("sweep: out of time, finished passes are kept", file=sys.stderr)
    written += [sweep_file] if sweep_file.exists() else []
    gc.collect()  # its models and caches, before others are made
    if device.type == "cuda":
        torch.cuda.empty_cache()

    settings = BenchSettings(repeats=1)
    common = {"num_prompts": 2, "max_new_tokens": options.max_new_tokens, "output": bench_file}
    progress = until(begun + seconds)
    if options.target is not None:
        place = {"device": options.device, "dtype": options.dtype}
        bench = make_bench(
            options.target, options.drafter, options.tasks, settings, progress=progress, **common, **place
        )
    else:
        target = random_target(shape_config(shape, options.layers), device, dtype)
        target.config._name_or_path = f"random weights, shape of {shape}"
        bench = random_bench(target, options.tasks, settings, progress=progress, **common)
    try:
        bench.run()
    except OutOfTime:
        print("bench: out of time, finished runs are kept", file=sys.stderr)
    written += [bench_file] if bench.runs else []
    if written:
        try:
            written += write_page(written, options.output_dir / "page.html")
        except ValueError as error:  # without matplotlib the results are still there
            print(f"no page: {error}", file=sys.stderr)
    return written


if __name__ == "__main__":
    main()
