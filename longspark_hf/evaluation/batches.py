"""What a drafter brings at each batch size: `python -m longspark_hf.evaluation.batches`.

Knows: which drafters a batch is generated with, in turn and in one process.
Does not know: how a batch is decoded (decoding_longspark), how the result is shown (report).
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from longspark_hf import InPlaceCache, LongSparkDrafter
from longspark_hf.compat import cache_argument
from longspark_hf.modeling_longspark import LongSparkDraft

from .answering import UNASSISTED, never_accepted
from .demo import build_drafter
from .provenance import provenance, write_result
from .targets import SMOLLM2_HUB_ID, load_target
from .tasks import load_tasks


# What a batch is generated with, and its `num_assistant_tokens`. The second is plain `generate` with the cache that ours has,
# the third our loop and cache without any draft.
METHODS = {
    "plain": None,
    "plain_in_place": None,
    "no_drafts": 0,
    "longspark": None,
    "longspark_auto": "auto",
    "oracle": None,
    "zero_acceptance_auto": "auto",
}


@contextlib.contextmanager
def oracle(drafter: LongSparkDrafter, prompts: int, answers: torch.LongTensor) -> Iterator[None]:
    """
    Every draft is made in full and then replaced by what the target will say: what a round costs when all is accepted.

    Args:
        drafter ([`LongSparkDrafter`]): Drafts.
        prompts (`int`): Columns of the prompts.
        answers (`torch.LongTensor` of shape `(batch_size, prompts + new)`): Plain output; rows differ in their first token.
    """
    draft = drafter.draft
    rows = [row[prompts:].tolist() for row in answers]

    def knowing(
        anchor_ids: torch.LongTensor, position_ids: torch.LongTensor, *args: Any, **kwargs: Any
    ) -> LongSparkDraft:
        made = draft(anchor_ids, position_ids, *args, **kwargs)
        # All sequences advance by whole blocks, so what was said is the same number of tokens for each.
        for place, row in enumerate(made.token_ids):
            told = rows[place][knowing.told + 1 : knowing.told + 1 + len(row)]
            row[: len(told)] = torch.tensor(told)
        knowing.told += made.token_ids.shape[1] + 1
        return made

    knowing.told, drafter.draft = 0, knowing
    try:
        yield
    finally:
        del drafter.draft


def measure(
    target: PreTrainedModel,
    drafter: LongSparkDrafter,
    batch: dict[str, torch.Tensor],
    max_new_tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """
    Generate a batch greedily by every method, in turn, and take medians.

    Args:
        target (`PreTrainedModel`): The target; it never stops before `max_new_tokens`.
        drafter ([`LongSparkDrafter`]): One that fits it.
        batch (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask`, padded on the left.
        max_new_tokens (`int`): Of every sequence.
        repeats (`int`): Of every method.

    Returns:
        `list[dict]`: a row for each method.
    """
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    rows: dict[str, dict[str, Any]] = {}
    truth = None
    for _ in range(repeats):
        for name, tokens in METHODS.items():
            context = contextlib.nullcontext()
            if name == "oracle":
                context = oracle(drafter, batch["input_ids"].shape[1], truth)
            elif name == "zero_acceptance_auto":
                context = never_accepted(drafter)
            with context:
                cache = {cache_argument(target): InPlaceCache(target.config)} if name == "plain_in_place" else {}
                start = time.perf_counter()
                output = target.generate(
                    **batch,
                    **cache,
                    assistant_model=None if name in UNASSISTED else drafter,
                    num_assistant_tokens=tokens,
                    do_sample=False,
                    max_new_tokens=max_new_tokens,
                    return_dict_in_generate=True,
                )
                seconds[name].append(time.perf_counter() - start)
            truth = output.sequences if truth is None else truth
            layer = next(value for value in output.values() if hasattr(value, "layers")).layers[0]
            rows[name] = {
                "identical": bool(torch.equal(output.sequences, truth)),
                "tau": None if name in UNASSISTED else drafter.stats.mean_acceptance_length,
                "cache_rows": int(layer.get_seq_length()),
            }
    new = len(batch["input_ids"]) * max_new_tokens
    plain = statistics.median(seconds["plain"])
    return [
        {
            "batch_size": len(batch["input_ids"]),
            "method": name,
            **rows[name],
            "tokens_per_second": new / statistics.median(times),
            "speedup": plain / statistics.median(times),
            "seconds": times,
        }
        for name, times in seconds.items()
    ]


def measure_proposals(
    target: PreTrainedModel, drafter: LongSparkDrafter, batch: dict[str, torch.Tensor], max_new_tokens: int, seeds: int
) -> list[dict[str, Any]]:
    """
    How much is accepted when the target samples, by what the drafter proposes.

    Args:
        target, drafter, batch, max_new_tokens: As for [`measure`].
        seeds (`int`): Times that the batch is sampled.

    Returns:
        `list[dict]`: a row for each temperature and proposal.
    """
    rows, own = [], drafter.config.proposal
    try:
        for temperature in (0.7, 1.0):
            for proposal in ("sampled", "likeliest"):
                drafter.config.proposal = proposal
                rounds = tokens = 0
                for seed in range(seeds):
                    torch.manual_seed(seed)
                    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
                    target.generate(**batch, assistant_model=drafter, max_new_tokens=max_new_tokens, **sampling)
                    rounds, tokens = rounds + drafter.stats.rounds, tokens + drafter.stats.tokens
                rows.append(
                    {"temperature": temperature, "proposal": proposal, "tokens": tokens, "tau": tokens / rounds}
                )
    finally:
        drafter.config.proposal = own
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="../shared/data/eval_gsm8k.jsonl", help="prompts, see `longspark bench`")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sampled", type=int, default=0, help="times to sample the last batch with every proposal")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    target, tokenizer = load_target("smollm2")
    drafter, _, _ = build_drafter(target, tokenizer)
    tokenizer.padding_side = "left"
    target.generation_config.eos_token_id = None  # every sequence says as much
    task = load_tasks([options.task], tokenizer, max(options.batch_sizes))[0]
    prompts = [turns[0] for turns in task.conversations]
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rows, proposals = [], []
    for size in options.batch_sizes:
        batch = tokenizer.apply_chat_template(
            messages[:size],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        rows += measure(target, drafter, batch, options.max_new_tokens, options.repeats)
        print(
            *(f"{r['batch_size']} {r['method']} {r['speedup']:.2f} {r['tau']}" for r in rows[-len(METHODS) :]),
            sep="\n",
        )
        if options.sampled and size == options.batch_sizes[-1]:
            proposals = measure_proposals(target, drafter, batch, options.max_new_tokens, options.sampled)
        result = {
            "kind": "batches",
            "target": SMOLLM2_HUB_ID,
            "task": Path(options.task).name,
            "max_new_tokens": options.max_new_tokens,
            "repeats": options.repeats,
            "rows": rows,
            "proposals": proposals,
            "provenance": provenance(target.dtype),
        }
        write_result(options.output, result)


if __name__ == "__main__":
    main()
