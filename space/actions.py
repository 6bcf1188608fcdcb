"""What a visitor can ask for: a race, points of the charts. The page and the named endpoints call the same functions.

Knows: the order of checks, how results become plain values. Does not know: components (app).
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from limits import (
    CONTEXTS,
    FILE_TYPES,
    MAX_BLOCK_SIZE,
    MAX_CHARACTERS,
    MAX_FILE_BYTES,
    MAX_NEW_TOKENS,
    MAX_QUEUE,
    Refusal,
    check_switch,
    check_temperature,
    check_whole,
)
from measuring import Measured, Point, measure, sweep_contexts
from pool import POOL
from prompts import build_prompt
from racing import LONGSPARK, PLAIN, RaceRequest, RaceView, race
from stopping import Stop


# Which lane begins: turn about, so that neither always finds the caches of the other.
_FIRST = itertools.cycle((PLAIN, LONGSPARK))


def run_race(
    prompt: str,
    document: str,
    context: int,
    target: str,
    drafter: str,
    temperature: float,
    max_new_tokens: int,
    block_size: int,
    stop: Stop,
) -> Iterator[RaceView]:
    """
    Check everything, then race. See [`build_prompt`] and [`RaceRequest`] for the arguments.

    Raises:
        `Refusal`: for anything that is not accepted.
        `Stopped`: if it was stopped before it began.
    """
    check_temperature(temperature)
    check_whole("The cap on the draft", block_size, 0, MAX_BLOCK_SIZE)
    loaded, _ = POOL.get(target, drafter)
    built = build_prompt(loaded, prompt, document, context, max_new_tokens)
    request = RaceRequest(
        target,
        drafter,
        built.ids,
        int(max_new_tokens),
        float(temperature),
        int(block_size),
        next(_FIRST),
        built.origin,
    )
    stop.check()
    yield from race(request, stop)


def race_point(view: RaceView, target: str) -> Point | None:
    """The point of the charts that a finished race measured; none if it was stopped or nothing was drafted."""
    if view.draft_ms is None or view.stopped:
        return None
    loaded, _ = POOL.get(target)
    return Point(loaded.name, "longspark", view.context, view.draft_ms, view.state_bytes, view.target_bytes, "race")


def run_measure(target: str, drafter: str, context: int, growing: bool, stop: Stop) -> Iterator[Measured]:
    """
    Measure one length.

    Raises:
        `Refusal`: for anything that is not accepted.
        `Stopped`: when stopped.
    """
    check_switch("The switch `growing`", growing)
    check_whole("The context", context, 1, CONTEXTS[-1])
    POOL.get(target, drafter)
    stop.check()
    yield from measure(target, drafter, [int(context)], growing, stop)


def run_sweep(target: str, drafter: str, growing: bool, stop: Stop) -> Iterator[Measured]:
    """Measure all lengths that fit. Raises as [`run_measure`] does."""
    check_switch("The switch `growing`", growing)
    contexts = sweep_contexts(*POOL.get(target, drafter), growing)
    if not contexts:
        raise Refusal(
            f"This machine has not enough free memory for {CONTEXTS[0]:,} tokens now. Try again in a moment."
        )
    stop.check()
    yield from measure(target, drafter, contexts, growing, stop)


def race_values(view: RaceView) -> dict[str, Any]:
    """A race as plain values for a client."""
    lanes = {}
    for name, lane in ((PLAIN, view.plain), (LONGSPARK, view.longspark)):
        lanes[name] = {
            "text": "".join(piece for piece, _ in lane.pieces),
            "new_tokens": len(lane.ids),
            "seconds": lane.seconds,
            "prefill_seconds": lane.prefill_seconds,
            "tokens_per_second": lane.tokens_per_second,
        }
    return lanes | {
        "finished": view.finished,
        "stopped": view.stopped,
        "prompt_tokens": view.prompt_tokens,
        "prompt_origin": view.prompt_origin,
        "identical": view.identical,
        "speedup": view.speedup,
        "tau": view.longspark.tau,
        "rounds": view.longspark.rounds,
        "accepted_by_position": list(view.longspark.accepted_by_position),
        "origins": [origin for _, origin in view.longspark.pieces],
        "draft_ms": view.draft_ms,
        "verify_ms": view.verify_ms,
        "state_bytes": view.state_bytes,
        "target_bytes": view.target_bytes,
    }


def point_values(points: list[Point]) -> list[dict[str, Any]]:
    """Points as plain values for a client."""
    return [asdict(point) for point in points]


def server_limits() -> dict[str, Any]:
    """What this server has and accepts, as plain values."""
    done, total, now, _ = POOL.progress()
    return {
        "ready": POOL.ready,
        "loading": None if POOL.ready else POOL.error or f"step {done + 1} of {total}: {now}",
        "left_out": dict(POOL.left_out),
        "targets": {
            name: {
                "drafters": list(loaded.drafters),
                "max_context": loaded.max_context,
                "own_limit": loaded.own_limit,
            }
            for name, loaded in POOL.targets.items()
        },
        "max_new_tokens": MAX_NEW_TOKENS,
        "max_characters": MAX_CHARACTERS,
        "file_types": list(FILE_TYPES),
        "max_file_bytes": MAX_FILE_BYTES,
        "max_queue": MAX_QUEUE,
    }
