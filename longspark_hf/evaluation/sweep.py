"""`longspark sweep`: what drafting costs as the context grows, for LongSpark and its peers in one process.

Knows: which passes are timed, in which order, how they become rows, how a stopped sweep goes on.
Does not know: how a drafter drafts (methods), what a target looks like (shapes), how the result is shown (cli, page).
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longspark_hf import LongSparkConfig
from longspark_hf.attention_longspark import grouped_attention
from longspark_hf.compat import cache_argument
from longspark_hf.linear_longspark import few_rows
from longspark_hf.target_longspark import check_config_fit
from longspark_hf.training.journal import ResumableJsonl

from .demo import SHIPPED_DRAFTER, PutTimer
from .findings import findings
from .info import peer_state_bytes
from .methods import (
    COMMITTED_ROWS,
    DFLASH_BLOCK_SIZE,
    DFLASH_SLIDING_WINDOW,
    METHODS,
    held_caches,
    make_drafters,
    make_method,
)
from .provenance import provenance, write_result
from .shapes import free_memory, parameter_bytes, random_target, row_bytes, shape_config
from .targets import device_and_dtype, load_drafter_config


CONTEXTS = [1024, 8192, 32768, 131072]
PREFILLS = 3  # passes with real prefills: they are long, and steady


@dataclass
class Sweep:
    r"""
    What to measure.

    Args:
        contexts (`list[int]`): Rows of the prefix.
        shape (`str`, *optional*, defaults to `"smollm2"`): Of the target, see `shape_config`.
        layers (`int`, *optional*): Decoder layers of the target, where not all fit.
        drafter (`str`, *optional*):
            Folder or Hub id whose config the LongSpark drafter has. Default: the shipped drafter's for SmolLM2, what
            `LongSparkConfig.from_target` builds for any other shape.
        methods (`list[str]`, *optional*): Of `METHODS`, all by default.
        repeats (`int`, *optional*, defaults to 15): Passes over everything.
        prefill_to (`int`, *optional*, defaults to 0): Measure real prefills of the contexts up to this length.
        device, dtype (`str`, *optional*, defaults to `"auto"`): See `device_and_dtype`.

    Raises:
        `ValueError`: for what cannot be measured, or does not fit into memory.
    """

    contexts: list[int] = field(default_factory=lambda: list(CONTEXTS))
    shape: str = "smollm2"
    layers: int | None = None
    drafter: str | None = None
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    repeats: int = 15
    prefill_to: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError(f"--contexts takes lengths of at least 1, got {self.contexts}.")
        self.contexts = sorted(set(self.contexts))
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown or not self.methods:
            raise ValueError(
                f"No such method: {', '.join(unknown) or 'none given'}. Choose among {', '.join(METHODS)}."
            )
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}.")
        self.torch_device, self.torch_dtype = device_and_dtype(self.device, self.dtype)
        self.target_config = shape_config(self.shape, self.layers)
        kinds = set(getattr(self.target_config, "layer_types", None) or ()) - {"full_attention"}
        if kinds:
            raise ValueError(
                f"The sweep measures targets with full attention; {self.shape} has {', '.join(kinds)} too."
            )
        self.drafter_config, self.drafter_name = self._drafter_config()
        self._check_memory()

    def _drafter_config(self) -> tuple[LongSparkConfig, str]:
        path = self.drafter
        if (
            path is None
            and self.shape == "smollm2"
            and self.layers is None
            and (SHIPPED_DRAFTER / "config.json").is_file()
        ):
            path = str(SHIPPED_DRAFTER)
        if path is None:
            mask = self.target_config.vocab_size - 1
            return LongSparkConfig.from_target(self.target_config, mask_token_id=mask), "LongSparkConfig.from_target"
        config = load_drafter_config(path)
        check_config_fit(config, self.target_config)
        return config, f"the shape of {Path(path).name}"

    def _check_memory(self) -> None:
        config, dtype = self.target_config, self.torch_dtype
        weights = parameter_bytes(config, dtype)
        longest = row_bytes(config, dtype) * self.contexts[-1]
        transient = (
            4 * longest // config.num_hidden_layers
        )  # a layer's rows are copied, and repeated for grouped heads
        peers = (
            sum(peer_state_bytes(self.drafter_config, c, dtype) for c in self.contexts)
            if "dflash" in self.methods
            else 0
        )
        needed, free = int(1.5 * weights) + longest + transient + 2 * peers, free_memory(self.torch_device)
        if free is not None and needed > free:
            raise ValueError(
                f"A sweep to {self.contexts[-1]:,} rows with {config.num_hidden_layers} layers of {self.shape} needs about "
                f"{needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free. Take a smaller --layers, or leave the "
                "longest of --contexts out."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """What the numbers depend on; a stopped sweep goes on with these only."""
        drafter = self.drafter_config
        source = provenance(self.torch_dtype, self.torch_device)
        return {
            "shape": self.shape,
            "layers": self.target_config.num_hidden_layers,
            "layers_of_the_shape": shape_config(self.shape).num_hidden_layers,
            "weights": "random: cost does not depend on them",
            "contexts": self.contexts,
            "methods": self.methods,
            "drafter": self.drafter_name,
            "draft_layers": drafter.num_hidden_layers,
            "block_size": drafter.block_size,
            "window_size": drafter.window_size,
            "num_summary_queries": drafter.num_summary_queries,
            "draft_vocab_size": drafter.draft_vocab_size,
            "dflash_block_size": DFLASH_BLOCK_SIZE,
            "dflash_sliding_window": DFLASH_SLIDING_WINDOW,
            "committed_rows": COMMITTED_ROWS,
            "prefill_to": self.prefill_to,
            **{name: source[name] for name in ("device", "threads", "dtype", "torch", "transformers")},
        }


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator, so that a clock tells what was done and not what was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a call, between two synchronisations."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


class Measurement:
    """Everything a pass runs: a target with synthetic rows at every context, and the methods."""

    def __init__(self, sweep: Sweep):
        self.sweep, self.device = sweep, sweep.torch_device
        self.target = random_target(sweep.target_config, self.device, sweep.torch_dtype)
        self.cache_argument = cache_argument(self.target)
        self.caches = held_caches(self.target, sweep.contexts)
        self.drafters = make_drafters(self.target, sweep.drafter_config, sweep.methods)
        self.methods = {name: make_method(d, self.target, sweep.contexts) for name, d in self.drafters.items()}

    @torch.no_grad()
    def _verify(self, kind: str, context: int, num_tokens: int) -> None:
        ids = torch.ones(1, num_tokens, dtype=torch.long, device=self.device)
        with ExitStack() as stack:
            if kind == "in_place":
                stack.enter_context(grouped_attention(self.target))
                stack.enter_context(few_rows())
            self.target(ids, **{self.cache_argument: self.caches[kind, context]}, use_cache=True)

    def one_pass(self) -> dict[str, float]:
        """Milliseconds of every call, in turn, so that a busy machine hits all alike."""
        times = {}
        verified = {(method.verified_in, method.verified_tokens) for method in self.methods.values()}
        passes = [("stock", 1), ("in_place", 1), *sorted(verified)]  # 1: a plain step
        for context in self.sweep.contexts:
            for name, method in self.methods.items():
                method.draft(context)  # not timed: what ran before, a long verification perhaps, must not matter
                method.restore(context)
                times[f"draft {name} {context}"] = timed_ms(lambda m=method, c=context: m.draft(c), self.device)
                method.restore(context)
            self._verify("in_place", context, 1)  # not timed, as above
            for kind, number in passes:
                times[f"verify {kind} {number} {context}"] = timed_ms(
                    lambda k=kind, n=number, c=context: self._verify(k, c, n), self.device
                )
        return times

    def prefill_pass(self) -> dict[str, float]:
        """Milliseconds from a real prompt to the second new token: a drafter's own prefill lies before it."""
        times = {}
        for context in (c for c in self.sweep.contexts if c <= self.sweep.prefill_to):
            ids = torch.randint(2, self.target.config.vocab_size - 2, (1, context), device=self.device)
            for name, drafter in {"plain": None, **self.drafters}.items():
                kind = {"speculation_type": "dflash"} if name.startswith("dflash") else {}
                timer = PutTimer()
                start = time.perf_counter()
                self.target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=drafter,
                    max_new_tokens=3,
                    do_sample=False,
                    pad_token_id=0,
                    streamer=timer,
                    **kind,
                )
                times[f"second_token {name} {context}"] = 1e3 * (timer.times[2] - start)
        return times

    def rows(self, passes: list[dict[str, float]]) -> Iterator[dict[str, Any]]:
        """Medians over the passes, a row for each method and context."""
        target_bytes = sum(parameter.nbytes for parameter in self.target.parameters())
        token_bytes = row_bytes(self.sweep.target_config, self.sweep.torch_dtype)
        for name, method in self.methods.items():
            for context in self.sweep.contexts:
                state = method.state_bytes(context)
                drafts = [times[f"draft {name} {context}"] for times in passes]
                verify = f"verify {method.verified_in} {method.verified_tokens} {context}"
                yield {
                    "method": name,
                    "context": context,
                    "draft_ms": statistics.median(drafts),
                    "draft_ms_low": min(drafts),
                    "draft_ms_high": max(drafts),
                    "verify_ms": statistics.median(times[verify] for times in passes),
                    "verified_tokens": method.verified_tokens,
                    "plain_ms": statistics.median(times[f"verify stock 1 {context}"] for times in passes),
                    "plain_in_place_ms": statistics.median(times[f"verify in_place 1 {context}"] for times in passes),
                    "state_bytes": state,
                    "total_bytes": target_bytes + token_bytes * context + method.weight_bytes + state,
                }


def run(sweep: Sweep, output: str | Path, progress: Callable[[str], None] = lambda message: None) -> dict[str, Any]:
    """
    Measure, and write the result file. Every finished pass is kept beside it: stopped or killed, the same call goes on.

    Args:
        sweep ([`Sweep`]): What to measure.
        output (`str`): Result file. While the sweep is not finished, `output` + `.passes` holds what was measured.
        progress (`Callable`, *optional*): Told what runs now.

    Raises:
        `ValueError`: if the output cannot be written, or holds another result or the passes of another sweep.
    """
    output = Path(output)
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder. Name a file in it.")
    if output.exists() and not Path(f"{output}.passes").exists():
        return _finished(output, sweep)
    result: dict[str, Any] = {}
    with ResumableJsonl(f"{output}.passes", sweep.settings) as kept:
        passes = list(kept.records())
        progress(
            f"making {sweep.target_config.num_hidden_layers} layers of {sweep.shape}, and states of {sweep.contexts}"
        )
        measurement = Measurement(sweep)
        progress("warm-up")
        measurement.one_pass()
        try:
            while len(passes) < sweep.repeats:
                progress(f"pass {len(passes) + 1} of {sweep.repeats}")
                times = measurement.one_pass()
                if len(passes) < PREFILLS:
                    times |= measurement.prefill_pass()
                kept.append([times], {"passes": len(passes) + 1})
                passes.append(times)
        finally:
            if passes:
                result = _result(sweep, measurement, passes)
                write_result(output, result)
    for path in (kept.path, kept.journal):
        path.unlink()
    return result


def _finished(output: Path, sweep: Sweep) -> dict[str, Any]:
    """The result of this very sweep, which is not made twice; anything else is not written over."""
    try:
        found = json.loads(output.read_text(encoding="utf-8"))
        mine = found["kind"] == "sweep" and found["settings"] == sweep.settings and found["passes"] >= sweep.repeats
    except (ValueError, KeyError, TypeError):
        mine = False
    if not mine:
        raise ValueError(
            f"--output {output} exists and holds no unfinished sweep. Name another file, or remove this one."
        )
    return found


def _result(sweep: Sweep, measurement: Measurement, passes: list[dict[str, float]]) -> dict[str, Any]:
    prefill = []
    for key in (key for key in passes[0] if key.startswith("second_token ")):
        _, name, context = key.split()
        median = statistics.median(times[key] for times in passes if key in times)
        prefill.append({"method": name, "context": int(context), "second_token_ms": median})
    rows = list(measurement.rows(passes))
    return {
        "kind": "sweep",
        "shape": sweep.shape,
        "settings": sweep.settings,
        "passes": len(passes),
        "rows": rows,
        "prefill": prefill,
        "findings": findings(rows),
        "provenance": provenance(sweep.torch_dtype, sweep.torch_device),
    }
