"""The models, loaded once in the background, and copies of them for one visitor's work.

Knows: which targets and drafters there are, how far each may read, how loading goes on.
Does not know: what is done with them.
"""

import copy
import logging
import os
import threading
import time
from dataclasses import dataclass, field

import torch
from hardware import ON_ZERO_GPU, is_out_of_memory, release_memory
from limits import CONTEXTS, MAX_CONTEXT, MAX_CONTEXT_ON_SHARED_CPU, MAX_NTK_ALPHA, Refusal, check_text, shown
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from longspark_hf import LongSparkDrafter
from longspark_hf.evaluation.demo import build_drafter
from longspark_hf.evaluation.methods import longspark_drafter
from longspark_hf.evaluation.shapes import free_memory, row_bytes
from longspark_hf.evaluation.targets import device_and_dtype, load_drafter, load_target, scale_rope
from longspark_hf.evaluation.tasks import first_ids


logger = logging.getLogger(__name__)

# Short name: the target to load, and its drafter (none: the one this repository ships).
CATALOGUE = {
    "qwen3-4b": ("Qwen/Qwen3-4B", "Hehy/LongSpark-Qwen3-4B"),
    "qwen3-8b": ("Qwen/Qwen3-8B", "Hehy/LongSpark-Qwen3-8B"),
    "smollm2": ("smollm2", None),
}
UNTRAINED = "untrained, of the same shape (proposes noise)"


@dataclass
class LoadedTarget:
    """A target with its tokenizer and the drafters that fit it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, LongSparkDrafter]

    @property
    def name(self) -> str:
        return str(self.model.config._name_or_path).rpartition("/")[2]

    @property
    def own_limit(self) -> int:
        """Positions the target was made for."""
        return self.model.config.get_text_config(decoder=True).max_position_embeddings

    @property
    def row_bytes(self) -> int:
        """Bytes a token takes in the target's K/V cache."""
        return row_bytes(self.model.config.get_text_config(decoder=True), self.model.dtype)

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer that this machine reads for a visitor, by NTK beyond the target's own limit."""
        limit = min(MAX_NTK_ALPHA * self.own_limit, MAX_CONTEXT)
        if self.model.device.type == "cpu" and "SPACE_ID" in os.environ:
            limit = min(limit, MAX_CONTEXT_ON_SHARED_CPU)
        free = free_memory(self.model.device) if not ON_ZERO_GPU else None
        # Two caches, and as much again for what a pass holds in between.
        return limit if free is None else min(limit, max(free // (4 * self.row_bytes), 0))

    def contexts(self) -> list[int]:
        """Lengths to choose from."""
        limit = self.max_context
        return [context for context in CONTEXTS if context <= limit]

    def ntk_alpha(self, context: int) -> int:
        """The factor by which the context has to be stretched: 1, 2 or 4."""
        return next(
            alpha for alpha in (1, 2, MAX_NTK_ALPHA) if alpha == MAX_NTK_ALPHA or alpha * self.own_limit >= context
        )


@dataclass
class Pool:
    """All models of this process. `load` fills it; everything else reads it."""

    targets: dict[str, LoadedTarget] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # short names of targets that could not be loaded, and why
    ready: bool = False
    error: str | None = None
    started: float = field(default_factory=time.monotonic)
    _total: int = 1

    def add(self, loaded: LoadedTarget) -> None:
        self.targets[loaded.name] = loaded

    def progress(self) -> tuple[int, int, str, float]:
        """Steps done, steps in all, what goes on now, and seconds since loading began."""
        now = self.steps[-1] if self.steps else "starting"
        return max(len(self.steps) - 1, 0), self._total, now, time.monotonic() - self.started

    def get(self, target: str = "", drafter: str = "") -> tuple[LoadedTarget, LongSparkDrafter]:
        """
        A target and a drafter by name; the first of each when a name is empty.

        Raises:
            `Refusal`: if they are not loaded.
        """
        check_text("The name of the target", target)
        check_text("The name of the drafter", drafter)
        if self.error is not None:
            raise Refusal(f"The models could not be loaded: {self.error}")
        if not self.ready:
            done, total, now, _ = self.progress()
            raise Refusal(
                f"The models are still being loaded (step {done + 1} of {total}: {now}). Try again in a moment."
            )
        target = target or next(iter(self.targets))
        if target not in self.targets:
            raise Refusal(f"There is no target {shown(target)} here. Choose one of: {', '.join(self.targets)}.")
        drafters = self.targets[target].drafters
        drafter = drafter or next(iter(drafters))
        if drafter not in drafters:
            raise Refusal(f"There is no drafter {shown(drafter)} for {target}. Choose one of: {', '.join(drafters)}.")
        return self.targets[target], drafters[drafter]

    def load(self) -> None:
        """
        Load the wanted targets and their drafters, one after the other. What cannot be loaded is left out.

        Raises:
            `ValueError`: if nothing could be loaded; the page says so, too.
        """
        try:
            device, dtype = device_and_dtype()
            names = wanted_targets(device.type)
            self._total = 3 * len(names)
            for name in names:
                try:
                    self._load_one(name, device, dtype)
                except Exception as error:  # of many kinds, from what downloads and reads weights
                    self.left_out[name] = "not enough memory" if is_out_of_memory(error) else _in_words(error)
                    logger.warning("%s is left out: %s", name, self.left_out[name])
                release_memory()
            if not self.targets:
                raise ValueError("; ".join(f"{name}: {reason}" for name, reason in self.left_out.items()))
            self.ready = True
        except Exception as error:
            self.error = _in_words(error)
            raise

    def _load_one(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        target_id, drafter_id = CATALOGUE[name]
        self.steps.append(f"loading the target {name}")
        target, tokenizer = load_target(target_id, dtype)
        target.to(device)
        self.steps.append(f"loading the drafter of {name}")
        if drafter_id is None:
            drafter, origin, _ = build_drafter(target, tokenizer)
        else:
            drafter, origin = load_drafter(drafter_id, dtype), drafter_id
            drafter.check_target(target, tokenizer)
        drafter.to(device, dtype)
        drafters = {origin.rpartition("/")[2]: drafter}
        if drafter_id is None:  # small enough to have a second one, to compare with
            drafters[UNTRAINED] = longspark_drafter(target, drafter.config)
        self.steps.append(f"warming up {name}")
        if not ON_ZERO_GPU:  # there the GPU is lent to calls of visitors only
            ids = torch.tensor([first_ids(tokenizer, "Hello")], device=device)
            for assistant in (None, drafter):
                target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=assistant,
                    max_new_tokens=8,
                    do_sample=False,
                )
        self.add(LoadedTarget(target, tokenizer, drafters))

    def load_in_background(self) -> None:
        """Start loading. On ZeroGPU it is done before the page is served: only what is on the GPU by then gets there fast."""
        if ON_ZERO_GPU:
            self.load()
        else:
            threading.Thread(target=self.load, daemon=True).start()


POOL = Pool()


def wanted_targets(device: str) -> list[str]:
    """
    Short names of the targets to load: the environment's `LONGSPARK_TARGETS`, else on a GPU all, on a CPU SmolLM2.

    Args:
        device (`str`): Type of the device that they are for.

    Raises:
        `ValueError`: if a name is not in `CATALOGUE`.
    """
    default = "smollm2" if device == "cpu" else ",".join(CATALOGUE)
    names = [name.strip() for name in os.environ.get("LONGSPARK_TARGETS", default).split(",")]
    unknown = [name for name in names if name not in CATALOGUE]
    if unknown:
        raise ValueError(f"LONGSPARK_TARGETS names {unknown}; it takes {', '.join(CATALOGUE)}.")
    return names


def _in_words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def own_copy(model: PreTrainedModel, ntk_alpha: float = 1) -> PreTrainedModel:
    """
    A model of its own for one piece of work: new modules, config and hooks over the same weights.

    Args:
        model (`PreTrainedModel`): Stays as it is.
        ntk_alpha (`float`, *optional*, defaults to 1): Factor by which the copy's context is stretched.
    """
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    own = copy.deepcopy(model, shared)
    if ntk_alpha > 1:
        scale_rope(own.config, ntk_alpha=ntk_alpha)
        own.config.get_text_config(decoder=True).max_position_embeddings *= int(ntk_alpha)
        for module in list(own.modules()):
            for name, child in module.named_children():
                if "rotary" in type(child).__name__.lower():
                    setattr(module, name, type(child)(config=child.config).to(model.device))
    return own
