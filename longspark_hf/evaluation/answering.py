"""How one conversation is answered by each method of `longspark bench`, and what is clocked on the way.

Knows: the `generate` call of every method, where its prefill ends and its rounds begin.
Does not know: which prompts there are (tasks), how often they are asked or what becomes of the numbers (bench).
"""

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import CandidateGenerator
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from longspark_hf import InPlaceCache, LongSparkDrafter
from longspark_hf.compat import cache_argument
from longspark_hf.modeling_longspark import LongSparkDraft

from .cost import own_peak_bytes
from .demo import PutTimer
from .tasks import first_ids, next_ids


METHODS = ("plain", "plain_in_place", "prompt_lookup", "longspark", "longspark_auto", "dflash", "zero_acceptance")
# Without a draft: `generate` as it is, and with the cache that LongSpark gives its target.
UNASSISTED = ("plain", "plain_in_place")
OURS = ("longspark", "longspark_auto", "zero_acceptance")
PROMPT_LOOKUP_TOKENS = 10
# Their warm cache would be prefilled a second time by the assisted loop of transformers, which changes the output.
WITHOUT_WARM_CACHE = ("prompt_lookup", "dflash")


@dataclass
class Answer:
    r"""
    One answered conversation; seconds are summed over its turns.

    Args:
        ids (`list[list[int]]`): New tokens of every turn.
        prompt_tokens (`int`): What was asked, earlier answers left out.
        seconds (`float`): Whole `generate` calls.
        prefill_seconds (`float`): Until the first tokens came, the drafter's own prefill in them.
        decode_tokens (`int`): New tokens that came after those.
        rounds (`list[int]`): How many rounds committed 1, 2, ... tokens. A round is one pass of the target after the prefill.
        draft_seconds, verify_seconds (`float`): In candidates and in the target's passes of the rounds.
        state_bytes (`int`, *optional*): What the drafter keeps of the conversation at its end.
        peak_memory_bytes (`int`, *optional*): On a GPU what torch allocated, on a CPU the process's resident memory.
    """

    ids: list[list[int]] = field(default_factory=list)
    prompt_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    rounds: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    state_bytes: int | None = None
    peak_memory_bytes: int | None = None

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.ids))

    def count_round(self, committed: int) -> None:
        self.rounds += [0] * (committed - len(self.rounds))
        self.rounds[committed - 1] += 1


class RoundClock:
    r"""
    Times the parts of the rounds of assisted `generate` calls from outside: the target's passes, and the making of
    candidates where the loop of transformers asks for them. A context manager; nothing of it stays on the target.

    On a GPU the marks are events on its stream, so that looking at the clock waits for nothing.

    Args:
        target (`PreTrainedModel`): Whose `generate` is called inside.
    """

    def __init__(self, target: PreTrainedModel):
        self._target = target
        self._spans: dict[str, list[list[Any]]] = {"draft": [], "verify": []}
        self._handles: list[Any] = []
        self.generator: CandidateGenerator | None = None

    def __enter__(self) -> "RoundClock":
        def begin(*_: Any) -> None:
            self._spans["verify"].append([self._mark()])

        def end(*_: Any) -> None:
            self._spans["verify"][-1].append(self._mark())

        self._handles = [self._target.register_forward_pre_hook(begin), self._target.register_forward_hook(end)]
        self._target._get_candidate_generator = self._make_generator
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._target.__dict__.pop("_get_candidate_generator", None)
        if self.generator is not None:  # a method that refers to its owner would keep states and caches alive
            self.generator.__dict__.pop("get_candidates", None)

    def _make_generator(self, *args: Any, **kwargs: Any) -> CandidateGenerator:
        self.generator = type(self._target)._get_candidate_generator(self._target, *args, **kwargs)
        get_candidates = self.generator.get_candidates

        @functools.wraps(get_candidates)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._mark()
            candidates = get_candidates(*args, **kwargs)
            self._spans["draft"].append([begin, self._mark()])
            return candidates

        self.generator.get_candidates = timed
        return self.generator

    def _mark(self) -> Any:
        if self._target.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, part: str) -> float:
        """Of `draft` or `verify` in all rounds; the first of each belongs to the prefill. Ask behind a synchronisation."""
        spans = self._spans[part][1:]
        if self._target.device.type == "cuda":
            return sum(1e-3 * begin.elapsed_time(end) for begin, end in spans)
        return sum(end - begin for begin, end in spans)


@contextmanager
def never_accepted(drafter: LongSparkDrafter) -> Iterator[None]:
    """
    Every draft is made in full and then replaced by mask tokens, which the target does not emit: what a round costs when
    nothing is accepted.
    """
    draft = drafter.draft

    def rejected(*args: Any, **kwargs: Any) -> LongSparkDraft:
        made = draft(*args, **kwargs)
        mask = torch.full_like(made.token_ids, drafter.config.mask_token_id)
        logits = made.logits
        if kwargs.get("do_sample"):  # a point mass on them, or an unlikely draft would count as a likely one
            logits = torch.full_like(logits, -torch.inf).scatter_(-1, mask[..., None], 0.0)
        return LongSparkDraft(token_ids=mask, logits=logits, finite=made.finite, possible=made.possible)

    drafter.draft = rejected
    try:
        yield
    finally:
        del drafter.draft


class Answerer:
    r"""
    Answers conversations by every method, on the same target in the same process.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        drafter ([`LongSparkDrafter`]): For `longspark` and `zero_acceptance`.
        dflash (`PreTrainedModel`, *optional*): For `dflash`.
        num_assistant_tokens (`int`, *optional*): Tokens drafted a round; each method's own number by default.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: LongSparkDrafter,
        dflash: PreTrainedModel | None = None,
        num_assistant_tokens: int | None = None,
    ):
        self.target, self.tokenizer, self.drafter, self.dflash = target, tokenizer, drafter, dflash
        self.num_assistant_tokens = num_assistant_tokens

    def answer(
        self, method: str, turns: list[str], max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> Answer:
        """
        Answer all turns of a conversation. A later turn finds the cache, and the drafter's state, of the turn before.

        Args:
            method (`str`): One of [`METHODS`].
            turns (`list[str]`): What the user says.
            max_new_tokens (`int`): Of each turn.
            temperature (`float`, *optional*, defaults to 0.0): 0 is greedy.
            seed (`int`, *optional*, defaults to 0): Of sampling.
        """
        torch.manual_seed(seed)
        self._reset_peak()
        answer, ids = Answer(), []
        warm = len(turns) > 1 and method not in WITHOUT_WARM_CACHE
        cache = {}
        if warm or method == "plain_in_place":
            kind = InPlaceCache if method == "plain_in_place" else DynamicCache
            cache = {cache_argument(self.target): kind(config=self.target.config)}
        for turn in turns:
            prompt = next_ids(self.tokenizer, ids, turn) if ids else first_ids(self.tokenizer, turn)
            answer.prompt_tokens += len(prompt) - len(ids)
            new = self._generate(method, prompt, max_new_tokens, temperature, cache, answer)
            answer.ids.append(new)
            ids = prompt + new
        answer.peak_memory_bytes = self._peak()
        return answer

    def _generate(
        self,
        method: str,
        prompt: list[int],
        max_new_tokens: int,
        temperature: float,
        cache: dict[str, Any],
        answer: Answer,
    ) -> list[int]:
        inputs = torch.tensor([prompt], device=self.target.device)
        # Pure sampling, whatever the target's generation_config filters: a temperature is what it says.
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        timer, clock = PutTimer(), RoundClock(self.target)
        rejecting = never_accepted(self.drafter) if method == "zero_acceptance" else nullcontext()
        with rejecting, nullcontext() if method in UNASSISTED else clock:
            self._synchronize()
            start = time.perf_counter()
            output = self.target.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=max_new_tokens,
                streamer=timer,
                **(sampling if temperature > 0 else {"do_sample": False}),
                **self._assistance(method),
                **cache,
            )
            self._synchronize()
            end = time.perf_counter()

        answer.seconds += end - start
        # The prompt is put first, then what the first pass brought, then what every round committed.
        answer.prefill_seconds += timer.times[1] - start
        answer.decode_tokens += sum(timer.sizes[2:])
        for committed in timer.sizes[2:]:
            answer.count_round(committed)
        answer.draft_seconds += self.drafter.stats.draft_seconds if method in OURS else clock.seconds("draft")
        answer.verify_seconds += clock.seconds("verify")
        answer.state_bytes = self._state_bytes(method, clock.generator)
        return output[0, len(prompt) :].tolist()

    def _assistance(self, method: str) -> dict[str, Any]:
        cap = {} if self.num_assistant_tokens is None else {"num_assistant_tokens": self.num_assistant_tokens}
        calls: dict[str, dict[str, Any]] = {
            "plain": {},
            "plain_in_place": {},
            "prompt_lookup": {"prompt_lookup_num_tokens": self.num_assistant_tokens or PROMPT_LOOKUP_TOKENS},
            "longspark": {"assistant_model": self.drafter, **cap},
            "longspark_auto": {"assistant_model": self.drafter, "num_assistant_tokens": "auto"},
            "zero_acceptance": {"assistant_model": self.drafter, **cap},
            "dflash": {"assistant_model": self.dflash, "speculation_type": "dflash"},
        }
        return calls[method]

    def _state_bytes(self, method: str, generator: CandidateGenerator | None) -> int | None:
        if method == "dflash":
            layers = generator.cache.layers
            return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.is_initialized)
        if method in UNASSISTED:
            return None
        return 0 if method == "prompt_lookup" else self.drafter.stats.state_bytes

    def warm_up(self, methods: list[str], temperature: float = 0.0) -> dict[str, str]:
        """
        A short answer by every method, so that none pays for being the first.

        Returns:
            `dict[str, str]`: why a method cannot run on this target, by method; only `dflash` may fail.
        """
        failed = {}
        for method in methods:
            try:
                self.answer(method, ["Why is the sky blue?"], 8, temperature)
            except (ValueError, RuntimeError, TypeError, AttributeError, IndexError) as error:
                if method != "dflash":
                    raise
                failed[method] = str(error).strip().partition("\n")[0]
        return failed

    def top_two_margin(self, prompt: list[int]) -> float:
        """By how much the target's most likely next token leads the second, in logits."""
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.target.forward).parameters else {}
        with torch.no_grad():
            logits = self.target(torch.tensor([prompt], device=self.target.device), **last).logits
        first, second = logits[0, -1].float().topk(2).values.tolist()
        return first - second

    def _synchronize(self) -> None:
        if self.target.device.type in ("cuda", "mps"):
            getattr(torch, self.target.device.type).synchronize()

    def _reset_peak(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)
        else:
            _try(lambda: Path("/proc/self/clear_refs").write_text("5"))

    def _peak(self) -> int | None:
        if self.target.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.target.device)
        return _try(own_peak_bytes)


def _try(call: Callable[[], Any]) -> Any:
    """What a call into /proc returns; `None` where there is none."""
    try:
        return call()
    except OSError:
        return None
