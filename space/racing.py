"""The race: plain `generate` and `generate` with a drafter, side by side on one device.

Knows: how two generations share a device, what a streamer tells of a round, how a race is stopped, what is counted.
Does not know: prompts (prompts), turns (baton) or how a race looks (panes).
"""

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from baton import Baton
from hardware import model_work, on_gpu, wait_for
from pieces import Pieces
from pool import POOL, LoadedTarget, own_copy
from stopping import Stop, Stopped
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from longspark_hf import LongSparkDrafter
from longspark_hf.compat import cache_argument
from longspark_hf.target_longspark import BorrowedTarget


PLAIN, LONGSPARK = "plain", "longspark"
REPORT_EVERY = 0.15  # seconds between two looks of a visitor
# The same two threads for every race: torch keeps buffers for each thread that ever multiplied matrices.
_LANES = ThreadPoolExecutor(2, thread_name_prefix="lane")


@dataclass(frozen=True)
class RaceRequest:
    r"""
    What to run.

    Args:
        target, drafter (`str`): Names in the pool.
        prompt_ids (`list[int]`): The prompt.
        max_new_tokens (`int`): Length of the answer.
        temperature (`float`, *optional*, defaults to 0): 0 is greedy; otherwise the unfiltered distribution is sampled.
        block_size (`int`, *optional*, defaults to 0): Cap on the draft; 0 leaves the drafter's own.
        first (`str`, *optional*): The lane that begins.
        prompt_origin (`str`, *optional*): Where the prompt comes from, in words.
    """

    target: str
    drafter: str
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    block_size: int = 0
    first: str = PLAIN
    prompt_origin: str = ""


@dataclass
class LaneView:
    """What is to be seen of one generation. `pieces` are (text, origin) pairs, one for each token."""

    phase: str = "waiting"  # waiting, reading, writing, done, stopped
    layers_read: int = 0
    layers: int = 0
    pieces: list[tuple[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    rounds: int = 0
    tokens: int = 0  # after the one that follows from the prefill
    accepted_by_position: list[int] = field(default_factory=list)
    tau_by_round: list[float] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Mean tokens committed per round; 0 before the first."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding; the prefill and its token are not counted."""
        seconds = self.seconds - self.prefill_seconds
        return self.tokens / seconds if self.tokens and seconds > 0 else None


@dataclass
class RaceView:
    """Everything a race shows, while it runs and after it. Measured values are `None` until they are measured."""

    plain: LaneView
    longspark: LaneView
    first: str
    prompt_tokens: int
    temperature: float
    block_size: int
    prompt_origin: str = ""
    dtype: str = "float32"
    identical: bool | None = None
    first_difference: int | None = None
    state_bytes: int | None = None
    target_bytes: int | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None
    finished: bool = False
    stopped: bool = False

    @property
    def speedup(self) -> float | None:
        """Of decoding, over plain `generate`."""
        plain, drafted = self.plain.tokens_per_second, self.longspark.tokens_per_second
        return drafted / plain if plain and drafted else None

    @property
    def context(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + len(self.longspark.ids)


class Lane(BaseStreamer):
    r"""
    One `generate` call, run in a thread of its own. As its streamer it hears of every round, and passes the baton there.

    Args:
        name (`str`): `PLAIN` or `LONGSPARK`.
        model (`PreTrainedModel`): A copy of its own: hooks on its layers tell how far a pass is, and stop it.
        drafter ([`LongSparkDrafter`], *optional*): Assists.
        request ([`RaceRequest`]): What to run.
        baton ([`Baton`]), stop ([`Stop`]): Shared with the other lane.
        events (`queue.Queue`): Told `(name, what, ...)`.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        drafter: LongSparkDrafter | None,
        request: RaceRequest,
        baton: Baton,
        stop: Stop,
        events: queue.Queue,
    ):
        self.name, self.model, self.drafter, self.request = name, model, drafter, request
        self.baton, self.stop, self.events = baton, stop, events
        self.puts = 0
        self.drafts, self.draft_seconds = 0, 0.0
        self._drafting_since: float | None = None
        self._drafted = False
        if drafter is not None:  # a copy of its own, too
            drafter.draft = self._noting(drafter.draft)

    def _noting(self, draft: Callable) -> Callable:
        """The drafter is not asked in every round: at the end there may be room for the target's own token only."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._drafted = True
            return draft(*args, **kwargs)

        return noted

    def watch(self, layers: torch.nn.ModuleList) -> None:
        """Be told before every layer of a pass."""
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, read=index: self._before_layer(read))

    def _before_layer(self, read: int) -> None:
        self.stop.check()
        if self.puts == 1:  # the prompt came, its pass goes on
            self.events.put((self.name, "layer", read))
        elif read == 0 and self._drafting_since is not None:  # the draft ends where the verification begins
            if self._drafted:
                wait_for(self.model.device)
                self.draft_seconds += time.perf_counter() - self._drafting_since
                self.drafts += 1
            self._drafting_since, self._drafted = None, False

    def put(self, value: torch.Tensor) -> None:
        """`generate` puts the prompt, then the token that follows from the prefill, then what each round committed."""
        self.stop.check()
        self.puts += 1
        if self.puts > 1:
            ids = value.flatten().tolist()
            wait_for(self.model.device)
            self.events.put((self.name, "tokens", ids, self.baton.put_down(self.name)))
            self.baton.take(self.name)
            self._drafting_since = time.perf_counter()
            self.stop.check()

    def end(self) -> None:
        pass

    def run(self) -> None:
        """The call from start to end; what becomes of it is told to `events`."""
        try:
            self.baton.take(self.name)
            self.stop.check()
            self.events.put((self.name, "done", *self._generate()))
        except Stopped:
            self.events.put((self.name, "stopped"))
        except BaseException as error:
            self.events.put((self.name, "failed", error.with_traceback(None)))  # its frames hold tensors
        finally:
            self.baton.leave(self.name)

    def _generate(self) -> tuple[int, int, float, Any]:
        """Runs the call; returns bytes of the target's K/V cache, drafts, their seconds, and the drafter's statistics."""
        request, device = self.request, self.model.device
        cache = DynamicCache(config=self.model.config)
        options: dict[str, Any] = {cache_argument(self.model): cache, "do_sample": request.temperature > 0}
        if request.temperature > 0:
            options |= {"temperature": float(request.temperature), "top_k": 0, "top_p": 1.0}
        if self.drafter is not None:
            options["assistant_model"] = self.drafter
            if request.block_size:
                options["num_assistant_tokens"] = int(request.block_size)
        ids = torch.tensor([request.prompt_ids], device=device)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=int(request.max_new_tokens),
            streamer=self,
            **options,
        )
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return held, self.drafts, self.draft_seconds, None if self.drafter is None else self.drafter.stats


def race_seconds(request: RaceRequest, stop: Stop) -> int:
    """GPU time to ask for: longer prompts are read longer, twice."""
    return int(min(20 + len(request.prompt_ids) / 1500 + request.max_new_tokens / 4, 120))


@on_gpu(duration=race_seconds)
def race(request: RaceRequest, stop: Stop) -> Iterator[RaceView]:
    r"""
    Run a race.

    Args:
        request ([`RaceRequest`]): What to run.
        stop ([`Stop`]): Ends it at the next layer, in prefill, draft or verification.

    Yields:
        [`RaceView`]: the same one, more of it each time; the last is finished.

    Raises:
        `Refusal`: if models are missing or memory runs out.
    """
    loaded, drafter = POOL.get(request.target, request.drafter)
    view = RaceView(
        plain=LaneView(),
        longspark=LaneView(accepted_by_position=[0] * drafter.config.block_size),
        first=request.first,
        prompt_tokens=len(request.prompt_ids),
        temperature=request.temperature,
        block_size=min(request.block_size or drafter.config.block_size, drafter.config.block_size),
        prompt_origin=request.prompt_origin,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
    )
    with model_work(f"{len(request.prompt_ids):,} tokens of prompt and {request.max_new_tokens} new ones, twice"):
        yield from _run_lanes(view, loaded, drafter, request, stop)


def _run_lanes(
    view: RaceView, loaded: LoadedTarget, drafter: LongSparkDrafter, request: RaceRequest, stop: Stop
) -> Iterator[RaceView]:
    """Both lanes from start to end. A function of its own, so that nothing holds their tensors after it."""
    order = [request.first, LONGSPARK if request.first == PLAIN else PLAIN]
    alpha = loaded.ntk_alpha(len(request.prompt_ids) + request.max_new_tokens)
    baton, events = Baton(order), queue.Queue()
    lanes = []
    for name in order:
        model = own_copy(loaded.model, alpha)
        assistant = own_copy(drafter, alpha) if name == LONGSPARK else None
        lane = Lane(name, model, assistant, request, baton, stop, events)
        layers = BorrowedTarget.of(model, drafter.config).layers
        lane.watch(layers)
        getattr(view, name).layers = len(layers)
        lanes.append(lane)
    running = [_LANES.submit(lane.run) for lane in lanes]
    try:
        yield from _follow(view, {name: Pieces(loaded.tokenizer) for name in order}, events, baton)
    finally:
        if not view.finished:  # failed, or the visitor is gone
            stop.set()
        wait(running)


def _follow(view: RaceView, pieces: dict[str, Pieces], events: queue.Queue, baton: Baton) -> Iterator[RaceView]:
    """Keep the view up to date until both lanes are done."""
    running = set(pieces)
    next_report = 0.0
    while running:
        try:
            name, what, *details = events.get(timeout=REPORT_EVERY)
        except queue.Empty:
            _show_clocks(view, running, baton)
            yield view
            continue
        lane = getattr(view, name)
        if what == "failed":
            raise details[0]
        if what == "layer":
            lane.phase, lane.layers_read = "reading", details[0]
        elif what == "tokens":
            _count(lane, pieces[name], *details)
        else:
            lane.phase = what
            view.stopped |= what == "stopped"
            running.discard(name)
            if what == "done" and name == LONGSPARK:
                _take_stats(view, *details)
        if time.monotonic() >= next_report:
            _show_clocks(view, running, baton)
            yield view
            next_report = time.monotonic() + REPORT_EVERY
    _compare(view)
    view.finished = True
    yield view


def _show_clocks(view: RaceView, running: set[str], baton: Baton) -> None:
    """Of lanes that still read the prompt; later, seconds go with the tokens that came in them."""
    for name in running:
        lane = getattr(view, name)
        if not lane.ids:
            lane.seconds = baton.elapsed(name)


def _count(lane: LaneView, pieces: Pieces, ids: list[int], seconds: float) -> None:
    """Account for one `put`: n tokens are n - 1 accepted drafts and, last, one of the target's own."""
    first = not lane.ids
    lane.phase, lane.seconds = "writing", seconds
    lane.ids += ids
    origins = ["draft"] * (len(ids) - 1) + ["first" if first else "target"]
    for token_id, origin in zip(ids, origins):
        lane.pieces.append((pieces.add(token_id), origin))
    if first:
        lane.prefill_seconds = seconds
        return
    lane.rounds += 1
    lane.tokens += len(ids)
    lane.tau_by_round.append(lane.tau)
    for position in range(len(ids) - 1):
        lane.accepted_by_position[position] += 1


def _take_stats(view: RaceView, target_bytes: int, drafts: int, draft_seconds: float, stats: Any) -> None:
    """What the drafter itself counted replaces what was counted on the way."""
    lane = view.longspark
    lane.rounds, lane.tokens = stats.rounds, stats.tokens
    lane.accepted_by_position = list(stats.accepted_by_position)
    # A draft that ends the answer stands where `_count` expects a token of the target's own; the statistics count it.
    if lane.pieces and sum(lane.accepted_by_position) > lane.tokens - lane.rounds:
        lane.pieces[-1] = (lane.pieces[-1][0], "draft")
    view.state_bytes, view.target_bytes = stats.state_bytes, target_bytes
    # Not `stats.draft_seconds` and `stats.verify_seconds`: one of them runs on while the other lane holds the baton.
    if drafts:
        view.draft_ms = 1e3 * draft_seconds / drafts
    if stats.rounds:
        view.verify_ms = 1e3 * (lane.seconds - lane.prefill_seconds - draft_seconds) / stats.rounds


def _compare(view: RaceView) -> None:
    plain, drafted = view.plain.ids, view.longspark.ids
    if view.stopped or view.temperature > 0:
        return
    view.identical = plain == drafted
    if not view.identical:
        pairs = zip(plain, drafted)
        view.first_difference = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(drafted)))
