"""The parts of a speculative round, timed from outside in real `generate` calls.

Knows: which methods a round is made of, to which part a moment belongs.
Does not know: what is generated, what becomes of the times (profile).
"""

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from longspark_hf import LongSparkDrafter
from longspark_hf.compat import cache_argument
from longspark_hf.decoding_longspark import AssistedDecoding
from longspark_hf.inplace_longspark import appending_in_place
from longspark_hf.rows_longspark import TargetRows
from longspark_hf.tap_longspark import TargetTap
from longspark_hf.target_longspark import BorrowedTarget

from .sweep import synchronize


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object or a class is another one inside, and afterwards what it was, or inherited again."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@dataclass
class Round:
    """
    Milliseconds of one round by part, of the plain steps that followed it (in a stock cache and in one that appends in place),
    and how many tokens were drafted and committed.
    """

    ms: dict[str, float] = field(default_factory=dict)
    decode_ms: float = 0.0
    decode_in_place_ms: float = 0.0
    drafted: int = 0
    committed: int = 0


class RoundProfiler:
    r"""
    Times the rounds of `target.generate(..., assistant_model=drafter)`. A profiler: on a GPU it waits for the device wherever a
    part begins and ends, so that each pays for its own work. A round without a profiler overlaps them and takes less.

    Args:
        target (`PreTrainedModel`), drafter ([`LongSparkDrafter`]): Of the calls to be timed, one sequence at a time.

    A moment belongs to the innermost part that runs, so the parts of a round sum up to it:

    - `verify`: the target's forward, with its K/V cache written and the rows for the drafter cloned in it;
    - `trunk`: the drafter's forward, with the target's final norm on the block; `head`: the target's head on it;
    - `markov`: what else happens in `drafter.draft`: the Markov chain, its processors and choices;
    - `acceptance`: judging, choosing, criteria and the one look at the device; `upkeep`: commits to the drafter's state, and
      commits or crops of the target's cache; `rest`: Python between them, masks, arguments of the target, streaming.

    After every round one token is decoded in each of two caches that hold the prompt, one as plain `generate` keeps it and one
    that appends in place: plain steps, interleaved with what they are compared with. Methods are replaced inside
    [`~RoundProfiler.installed`] only, some of them for all of the process: nothing else may generate meanwhile.
    """

    def __init__(self, target: PreTrainedModel, drafter: LongSparkDrafter):
        self.target, self.drafter, self.device = target, drafter, target.device
        self.rounds: list[Round] = []
        self.cache: Cache | None = None
        self.cache_in_place: Cache | None = None
        self._cache_name = cache_argument(target)
        self._round: Round | None = None
        self._parts: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def installed(self) -> Iterator["RoundProfiler"]:
        """The methods of a round are timed inside."""
        target, drafter, state = self.target, self.drafter, vars(TargetTap)["state"]
        wrappers = [
            (AssistedDecoding, "_round", self._whole(AssistedDecoding._round)),
            (AssistedDecoding, "_keep", self._timed(AssistedDecoding._keep, "acceptance")),
            (TargetTap, "commit", self._timed(TargetTap.commit, "upkeep")),
            (TargetTap, "state", property(self._timed(state.fget, "upkeep"), doc=state.__doc__)),
            (TargetRows, "commit", self._timed(TargetRows.commit, "upkeep")),
            (Cache, "crop", self._timed(Cache.crop, "upkeep")),
            (BorrowedTarget, "logits", self._timed(BorrowedTarget.logits, "head")),
            (target, "forward", self._timed(target.forward, "verify")),
            (drafter, "forward", self._timed(drafter.forward, "trunk")),
            (drafter, "draft", self._counted(self._timed(drafter.draft, "markov"))),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, wrapper in wrappers:
                stack.enter_context(replaced(owner, name, wrapper))
            yield self

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            # Nothing is timed while a compiler looks at it: the clock would become a constant or a break in its graph.
            if torch.compiler.is_compiling() or self._round is None:
                return method(*args, **kwargs)
            self._turn()
            self._parts.append(part)
            try:
                return method(*args, **kwargs)
            finally:
                self._turn()
                self._parts.pop()

        return timed

    def _turn(self) -> None:
        """What passed since the last turn goes to the part that ran."""
        synchronize(self.device)
        now = time.perf_counter()
        part = self._parts[-1]
        self._round.ms[part] = self._round.ms.get(part, 0.0) + 1e3 * (now - self._since)
        self._since = now

    def _counted(self, draft: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(draft)
        def counted(*args: Any, **kwargs: Any) -> Any:
            made = draft(*args, **kwargs)
            if self._round is not None:
                self._round.drafted = made.token_ids.shape[1]
            return made

        return counted

    @contextlib.contextmanager
    def prefilled(self, input_ids: torch.LongTensor) -> Iterator[Callable[..., torch.LongTensor]]:
        """
        Read a prompt once, with the drafter. Calls inside go on from there, on copies, and so do the plain steps.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, num_tokens)`): The prompt, of two tokens or more.

        Yields:
            `Callable`: answers it with the drafter; takes the arguments of `generate`.
        """
        read, cache = input_ids[:, :-1], DynamicCache(config=self.target.config)
        self._generate(read, cache, max_new_tokens=1, do_sample=False)
        try:
            self.cache, self.cache_in_place = copy.deepcopy(cache), copy.deepcopy(cache)
            for plain in (self.cache, self.cache_in_place):
                plain.activate_past_recording()  # every plain step is taken back
            with appending_in_place(self.cache_in_place):
                yield lambda **arguments: self._generate(input_ids, copy.deepcopy(cache), **arguments)
        finally:
            self.cache = self.cache_in_place = None

    def _generate(self, input_ids: torch.LongTensor, cache: Cache, **arguments: Any) -> torch.LongTensor:
        arguments |= {"attention_mask": torch.ones_like(input_ids), "assistant_model": self.drafter}
        return self.target.generate(input_ids, **{self._cache_name: cache}, **arguments)

    def _whole(self, one_round: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(one_round)
        def whole(decoding: AssistedDecoding) -> None:
            tokens = decoding.sequences[0].tokens
            before = len(tokens)
            synchronize(self.device)
            self._round, self._parts, self._since = Round(), ["rest"], time.perf_counter()
            try:
                one_round(decoding)
                self._turn()
                self.rounds.append(self._round)
            finally:
                self._round = None
            one, token_ids = self.rounds[-1], decoding.input_ids[:, -1:]  # any token takes as long
            one.committed = len(tokens) - before
            one.decode_ms = self._plain_step(token_ids, self.cache)
            one.decode_in_place_ms = self._plain_step(token_ids, self.cache_in_place)

        return whole

    def _plain_step(self, token_ids: torch.LongTensor, cache: Cache) -> float:
        position_ids = torch.full_like(token_ids, int(cache.get_seq_length()))
        synchronize(self.device)
        start = time.perf_counter()
        self.target(token_ids, position_ids=position_ids, use_cache=True, **{self._cache_name: cache})
        synchronize(self.device)
        milliseconds = 1e3 * (time.perf_counter() - start)
        cache.crop(-1)
        return milliseconds
