"""`longspark bench`: the same conversations answered by every method in one process, turn about.

Knows: the order of runs, what is kept when it is stopped.
Does not know: which conversations there are (tasks), how one is answered and clocked (answering), how numbers are taken
together and shown (bench_rows).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from longspark_hf import LongSparkConfig, LongSparkDrafter

from .answering import METHODS, PROMPT_LOOKUP_TOKENS, WITHOUT_WARM_CACHE, Answer, Answerer
from .bench_rows import Run, make_rows
from .demo import SHIPPED_DRAFTER, build_drafter
from .methods import dflash_drafter
from .provenance import provenance
from .targets import device_and_dtype, load_target, load_target_config, load_tokenizer, scale_rope
from .tasks import Task, first_ids, load_tasks, next_ids


@dataclass(frozen=True)
class BenchSettings:
    r"""
    Args:
        methods (`tuple[str, ...]`): Of [`METHODS`]; `plain`, the baseline, is always among them.
        temperatures (`tuple[float, ...]`): Every prompt is answered at each; 0 is greedy.
        repeats (`int`): Of everything.
        seed (`int`): Of sampling; every method samples a prompt with the same one.
        num_assistant_tokens (`int`, *optional*): Tokens drafted a round.
        rope_theta, ntk_alpha (`float`, *optional*): What the rotary base was changed by.
        concurrency (`int`): Sequences at once.

    Raises:
        `ValueError`: for settings that cannot be measured.
    """

    methods: tuple[str, ...] = METHODS
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 3
    seed: int = 0
    num_assistant_tokens: int | None = None
    rope_theta: float | None = None
    ntk_alpha: float | None = None
    concurrency: int = 1

    def __post_init__(self) -> None:
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown:
            raise ValueError(f"Unknown method '{unknown[0]}'. --methods takes {', '.join(METHODS)}.")
        wrong = [t for t in self.temperatures if not 0 <= t < float("inf")]
        if wrong or not self.temperatures:
            raise ValueError(f"--temperatures takes numbers of at least 0, got {wrong[0] if wrong else 'none'}.")
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}.")
        if self.num_assistant_tokens is not None and self.num_assistant_tokens < 1:
            raise ValueError(f"--num-assistant-tokens must be at least 1, got {self.num_assistant_tokens}.")
        if self.concurrency != 1:
            raise ValueError(
                f"--concurrency {self.concurrency}: this benchmark asks one prompt at a time, so only 1 can be measured. For "
                "batches run `python -m longspark_hf.evaluation.batches --help`."
            )
        object.__setattr__(self, "methods", tuple(m for m in METHODS if m == "plain" or m in self.methods))
        object.__setattr__(self, "temperatures", tuple(dict.fromkeys(map(float, self.temperatures))))


@dataclass
class Bench:
    r"""
    One measurement, resumable from its result file.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`), drafter ([`LongSparkDrafter`]): On one device.
        drafter_name (`str`): Where the drafter comes from.
        tasks (`list[Task]`): From `load_tasks`.
        settings ([`BenchSettings`]): What to measure.
        output (`Path`, *optional*): Result file, written anew after every run.
        context_growth (`float`, *optional*, defaults to 1.0): By which the rotary base was scaled for longer contexts.
        progress (`Callable`, *optional*): Told what runs now.

    Raises:
        `ValueError`: if a prompt does not fit the target, or `output` holds something else or other settings.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: LongSparkDrafter
    drafter_name: str
    tasks: list[Task]
    settings: BenchSettings
    output: Path | None = None
    context_growth: float = 1.0
    progress: Callable[[str], None] = lambda message: None
    runs: list[Run] = field(default_factory=list, init=False)
    notes: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.drafter.check_target(self.target)
        for task in self.tasks:
            self._check_lengths(task)
        self._plain_ids: dict[tuple[str, int], list[list[int]]] = {}
        self._provenance = provenance(self.target.dtype, self.target.device)
        self._unsupported: dict[str, str] = {}
        if self.output is not None:
            self._resume(self.output)
            self._write()

    def _check_lengths(self, task: Task) -> None:
        limit = getattr(self.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        for number, turns in enumerate(task.conversations, start=1):
            ids = first_ids(self.tokenizer, turns[0])
            for turn in turns[1:]:
                ids = next_ids(self.tokenizer, ids, turn)
            room = int(limit * self.context_growth) - len(ids) if limit else len(turns) * task.max_new_tokens
            if len(turns) * task.max_new_tokens > room:
                fix = f"--max-new-tokens {room // len(turns)} or less" if room >= 2 * len(turns) else "a shorter task"
                raise ValueError(
                    f"Task '{task.name}', prompt {number}: {len(ids)} prompt tokens and {len(turns)} x "
                    f"{task.max_new_tokens} new tokens exceed the {int(limit * self.context_growth)} positions of the target. "
                    f"Use {fix}, or scale its rotary base with --ntk-alpha."
                )

    def run(self) -> None:
        """Do what is not done yet. May be interrupted at any time; `result` tells what there is."""
        left = list(self._left())
        if not left:
            return
        answerer = Answerer(self.target, self.tokenizer, self.drafter, None, self.settings.num_assistant_tokens)
        methods = list(self.settings.methods)
        if "dflash" in methods:
            try:
                answerer.dflash = dflash_drafter(self.target, self.drafter.config)
            except ValueError as error:
                self._unsupported["dflash"] = str(error)
                methods.remove("dflash")
        self.progress("warm-up")
        for temperature in self.settings.temperatures:
            self._unsupported |= answerer.warm_up(methods, temperature)

        for number, (task, index, temperature, repeat, method) in enumerate(left, start=1):
            if method in self._unsupported:
                continue
            self.progress(
                f"{number} of {len(left)}: {task.name}, prompt {index + 1}, T = {temperature:g}, repeat {repeat + 1}, {method}"
            )
            seed = self.settings.seed + 1000 * repeat + index
            answer = answerer.answer(method, task.conversations[index], task.max_new_tokens, temperature, seed)
            run = {
                "task": task.name,
                "prompt": index,
                "temperature": temperature,
                "repeat": repeat,
                "method": method,
                **_numbers_of(answer),
            }
            if temperature == 0:
                run["difference"] = self._difference(answerer, task, index, method, answer)
            self.runs.append(run)
            self._write()

    def _left(self) -> Iterator[tuple[Task, int, float, int, str]]:
        """What is to be done, in order. `plain` goes first, the others take turns so that none always follows another."""
        done = {_key(run) for run in self.runs}
        plain, *others = self.settings.methods
        for task in self.tasks:
            for index in range(len(task.conversations)):
                for temperature in self.settings.temperatures:
                    for repeat in range(self.settings.repeats):
                        shift = (index + repeat) % max(len(others), 1)
                        for method in [plain, *others[shift:], *others[:shift]]:
                            if (task.name, index, temperature, repeat, method) not in done:
                                yield task, index, temperature, repeat, method

    def _difference(
        self, answerer: Answerer, task: Task, index: int, method: str, answer: Answer
    ) -> dict[str, Any] | None:
        """Where a greedy answer first leaves the plain one, and how close the target's choice was there."""
        if method == "plain":
            self._plain_ids.setdefault((task.name, index), answer.ids)
        plain = self._plain_ids.get((task.name, index))
        if plain is None or plain == answer.ids:
            return None
        ids: list[int] = []
        for turn, text in enumerate(task.conversations[index]):
            ids = next_ids(self.tokenizer, ids, text) if ids else first_ids(self.tokenizer, text)
            if plain[turn] != answer.ids[turn]:
                break
            ids = ids + plain[turn]
        pairs = zip(plain[turn], answer.ids[turn])
        shared = min(len(plain[turn]), len(answer.ids[turn]))
        token = next((i for i, (one, other) in enumerate(pairs) if one != other), shared)
        margin = answerer.top_two_margin(ids + plain[turn][:token])
        return {"turn": turn, "token": token, "top_two_margin": margin}

    def result(self) -> dict[str, Any]:
        """Everything measured so far, as the result file holds it."""
        positions = min(
            self.settings.num_assistant_tokens or self.drafter.config.block_size, self.drafter.config.block_size
        )
        widths = {
            "longspark": positions,
            "longspark_auto": positions,
            "zero_acceptance": positions,
            "prompt_lookup": self.settings.num_assistant_tokens or PROMPT_LOOKUP_TOKENS,
        }
        return {
            "kind": "bench",
            "target": self.target.config._name_or_path,
            "drafter": self.drafter_name,
            "settings": self._settings(),
            "complete": all(method in self._unsupported for *_, method in self._left()),
            "rows": make_rows(self.runs, widths),
            "notes": self._notes(),
            "provenance": self._provenance,
            "runs": self.runs,
        }

    def _settings(self) -> dict[str, Any]:
        parameters = list(self.drafter.parameters())
        settings = {
            **asdict(self.settings),
            "tasks": {
                task.name: {"prompts": task.fingerprint(), "max_new_tokens": task.max_new_tokens}
                for task in self.tasks
            },
            "drafter_parameters": sum(parameter.numel() for parameter in parameters),
            "machine": {key: self._provenance[key] for key in ("device", "dtype", "threads", "torch", "transformers")},
        }
        return json.loads(json.dumps(settings))  # as it will be read back

    def _notes(self) -> list[str]:
        notes = [f"{method} is left out: {reason}" for method, reason in self._unsupported.items()]
        if "untrained" in self.drafter_name:
            notes.append("The drafter is untrained: it shows what drafting costs, not what it gains.")
        if any(run["method"] == "dflash" for run in self.runs):
            notes.append(
                "dflash is the built-in DFlash path with a drafter of the same shape, full attention and random weights: "
                "its costs only. Its own prefill comes after the first token, in draft time."
            )
        if any(run["turns"] > 1 and run["method"] in WITHOUT_WARM_CACHE for run in self.runs):
            notes.append(
                f"{' and '.join(WITHOUT_WARM_CACHE)} prefill the whole conversation in every turn, as the assisted loop of "
                "transformers cannot go on in a filled cache."
            )
        return notes

    def _resume(self, path: Path) -> None:
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            runs, settings = found["runs"], found["settings"]
            kept = {"target": found["target"], "drafter": found["drafter"], **settings}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is there but is no result of `longspark bench`. Use another --output."
            ) from error
        now = {"target": self.target.config._name_or_path, "drafter": self.drafter_name, **self._settings()}
        others = [key for key in now if kept.get(key) != now[key]]
        if others:
            key = others[0]
            raise ValueError(
                f"{path} holds results with other settings ({', '.join(others)}): {key} was {kept.get(key)}, now {now[key]}. "
                "Use the same settings to go on with it, or another --output."
            )
        self.runs = runs
        self._provenance = found["provenance"]

    def _write(self) -> None:
        """Into place whole, so that a stop never leaves half a file. One line a run keeps long files readable."""
        if self.output is None:
            return
        result = self.result()
        lines = ",\n    ".join(json.dumps(run) for run in result.pop("runs"))
        head = json.dumps(result, indent=2).removesuffix("\n}")
        scratch = self.output.with_name(self.output.name + ".part")
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_text(f'{head},\n  "runs": [\n    {lines}\n  ]\n}}\n', encoding="utf-8")
            os.replace(scratch, self.output)
        except OSError as error:
            raise ValueError(f"Cannot write the result file {self.output}: {error}") from error


def make_bench(
    target: str,
    drafter: str | None,
    tasks: list[str],
    settings: BenchSettings,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    output: Path | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> Bench:
    """
    Load what a measurement needs, what is cheap to find wrong first.

    Args:
        target (`str`): A Hub id, a folder, or `smollm2`.
        drafter (`str`, *optional*): A Hub id or a folder; by default the shipped one, or one with random weights.
        tasks (`list[str]`), num_prompts, max_new_tokens (`int`, *optional*): For `load_tasks`.
        settings ([`BenchSettings`]), output, progress: As for [`Bench`].
        device, dtype (`str`, *optional*, defaults to `"auto"`): Of both models.

    Raises:
        `ValueError`: for whatever the user can put right.
    """
    place, precision = device_and_dtype(device, dtype)
    config = load_target_config(target)
    growth = scale_rope(config, settings.rope_theta, settings.ntk_alpha)
    loaded_tasks = load_tasks(tasks, load_tokenizer(target), num_prompts, max_new_tokens, settings.seed)
    progress(f"loading {target}")
    model, tokenizer = load_target(target, precision, config)
    model = model.to(place)
    draft_model, name, _ = build_drafter(model, tokenizer, drafter)
    name = SHIPPED_DRAFTER.name if name == str(SHIPPED_DRAFTER) else name  # the same on every machine
    if growth != 1.0:
        fields = {key: getattr(draft_model.config, key) for key in ("mask_token_id", "target_layer_ids")}
        draft_model.config.rope_parameters = LongSparkConfig.from_target(model.config, **fields).rope_parameters
    progress(f"drafter: {name}")
    draft_model = draft_model.to(device=place, dtype=precision)
    return Bench(model, tokenizer, draft_model, name, loaded_tasks, settings, output, growth, progress)


def _key(run: Run) -> tuple:
    return run["task"], run["prompt"], run["temperature"], run["repeat"], run["method"]


def _numbers_of(answer: Answer) -> Run:
    numbers = asdict(answer)
    ids = numbers.pop("ids")
    checksum = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
    return {**numbers, "turns": len(ids), "new_tokens": answer.new_tokens, "output": checksum}
