"""Draft time and drafter state at any context length, measured when asked.

Knows: which passes are timed and in which order, how much memory a length needs.
Does not know: how a drafter drafts (longspark_hf.evaluation.methods) or how points are drawn (charts).
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from hardware import ON_ZERO_GPU, model_work, on_gpu
from limits import CONTEXTS, Refusal, short_length
from pool import POOL, LoadedTarget, own_copy
from stopping import Stop

from longspark_hf import LongSparkDrafter
from longspark_hf.evaluation.info import peer_state_bytes
from longspark_hf.evaluation.methods import DFlashMethod, LongSparkMethod, dflash_drafter
from longspark_hf.evaluation.shapes import free_memory
from longspark_hf.evaluation.sweep import timed_ms


PASSES = 9


@dataclass(frozen=True)
class Point:
    r"""
    One measured point of the charts.

    Args:
        target (`str`): Name of the target; charts show those of one.
        method (`str`): `longspark` or `dflash`, as in a sweep of longspark_hf.
        context (`int`): Tokens.
        draft_ms (`float`): Milliseconds from one verification to the next: committed rows taken in, a block drafted.
        state_bytes (`int`): Of the drafter.
        target_bytes (`int`): Of the target's K/V cache at that length.
        source (`str`): `race` (the mean over its rounds) or `alone` (the median of passes with nothing in between).
    """

    target: str
    method: str
    context: int
    draft_ms: float
    state_bytes: int
    target_bytes: int
    source: str


@dataclass
class Measured:
    """Points so far, and how far the measurement is."""

    done: int
    total: int
    context: int
    points: list[Point] = field(default_factory=list)


def sweep_contexts(loaded: LoadedTarget, drafter: LongSparkDrafter, growing: bool = True) -> list[int]:
    """The lengths of a sweep that fit into a quarter of the memory that is free."""
    free = free_memory(loaded.model.device) if not ON_ZERO_GPU else None
    if free is None:
        return list(CONTEXTS)
    return [context for context in CONTEXTS if 4 * _needed(drafter, context, growing) <= free]


def _needed(drafter: LongSparkDrafter, context: int, growing: bool) -> int:
    # The growing cache is held twice: as it was, and with a block appended.
    return 2 * peer_state_bytes(drafter.config, context, drafter.dtype) if growing else 0


def measure_seconds(target: str, drafter: str, contexts: list[int], growing: bool, stop: Stop) -> int:
    """GPU time to ask for."""
    return int(min(15 + sum(2 + context / 16384 for context in contexts), 120))


@on_gpu(duration=measure_seconds)
def measure(target: str, drafter: str, contexts: list[int], growing: bool, stop: Stop) -> Iterator[Measured]:
    r"""
    Time drafting at some lengths: LongSpark, and the DFlash drafter of transformers of the same shape, in turn.

    Rows of the prefix are random, as cost does not depend on them; so lengths that no prompt reaches here can be measured.

    Args:
        target, drafter (`str`): Names in the pool.
        contexts (`list[int]`): Lengths in tokens.
        growing (`bool`): Whether to measure the DFlash drafter, too.
        stop ([`Stop`]): Ends it after the pass that runs.

    Yields:
        [`Measured`]: after every pass.

    Raises:
        `Refusal`: if a length is too long for this machine, models are missing, or memory runs out.
        `Stopped`: when stopped.
    """
    loaded, chosen = POOL.get(target, drafter)
    possible = sweep_contexts(loaded, chosen, growing)
    for context in contexts:
        if context > max(possible, default=0):
            raise Refusal(
                f"{context:,} tokens need more memory than this machine has free; up to {max(possible, default=0):,} can "
                "be measured now. Choose a shorter context."
            )
    with model_work(f"drafting at {short_length(max(contexts, default=0))} tokens"):
        yield from _measure(loaded, chosen, contexts, growing, stop)


def _measure(
    loaded: LoadedTarget, drafter: LongSparkDrafter, contexts: list[int], growing: bool, stop: Stop
) -> Iterator[Measured]:
    measured = Measured(0, len(contexts) * PASSES, contexts[0] if contexts else 0)
    model, own = own_copy(loaded.model), own_copy(drafter)
    peer = dflash_drafter(model, own.config) if growing else None
    for context in contexts:
        measured.context = context
        methods: dict[str, LongSparkMethod | DFlashMethod] = {"longspark": LongSparkMethod(own, model, [context])}
        if peer is not None:
            methods["dflash"] = DFlashMethod(peer, model, [context])
        times: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(PASSES):
            stop.check()
            for name, method in methods.items():
                times[name].append(_one_pass(method, context, model.device))
            measured.done += 1
            yield measured
        for name, method in methods.items():
            draft_ms = statistics.median(times[name][1:])  # the first pass warms up
            sizes = method.state_bytes(context), context * loaded.row_bytes
            measured.points.append(Point(loaded.name, name, context, draft_ms, *sizes, "alone"))
        yield measured


def _one_pass(method: LongSparkMethod | DFlashMethod, context: int, device: torch.device) -> float:
    time = timed_ms(lambda: method.draft(context), device)
    method.restore(context)
    return time
