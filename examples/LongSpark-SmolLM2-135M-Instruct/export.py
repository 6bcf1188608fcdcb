"""From a training run to the files of this folder: weights in bf16, measured τ, and the card.

    python examples/LongSpark-SmolLM2-135M-Instruct/export.py --run runs/smollm2 --eval-data DIR --data smollm2_synthetic.jsonl

`--eval-data` holds `eval_NAME.jsonl` files of `{"turns": [...]}`; first turns are used. The last 5% of `--data` was held out.
"""

import argparse
import json
from pathlib import Path

import torch

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.evaluation.provenance import provenance, write_result
from longspark_hf.evaluation.targets import SMOLLM2_HUB_ID, load_drafter, load_target
from longspark_hf.training.data import read_samples
from longspark_hf.training.metrics import generated_tau


FOLDER = Path(__file__).parent
CARD = """---
library_name: transformers
base_model: {target}
license: apache-2.0
pipeline_tag: text-generation
tags: [longspark, speculative-decoding]
---
# LongSpark drafter for {target}

A small demonstration drafter: {parameters:.1f}M parameters, trained on one CPU core with `train.py` beside this card. It is
no standalone model; pass it to the target's `generate` as `assistant_model`, with longspark_hf installed. Output stays the
target's, whatever it proposes.

| prompts | τ at T = 0 | τ at T = 1 |
|---|--:|--:|
{rows}

τ is the mean number of tokens committed per round of `generate`, at most {most}; here over {prompts} prompts a set and
{new_tokens} new tokens each. All figures on this page: the JSON files beside it, {dtype} on {device}, torch {torch},
transformers {transformers}, {date}.

## Training

{anchors:,} anchors in {steps:,} optimizer steps over self-generated conversations of the target, the last 5% held out. Draft
layers read target layers {layers}; the drafter proposes only the {vocabulary:,} most frequent tokens of the data.

| steps | anchors seen | τ at T = 0 on 8 held-out prompts | simulated τ at T = 0.7 and 1 |
|--:|--:|--:|--:|
{progress}
"""
ABLATIONS = """
What each part is worth, {ablation_steps} steps ({ablation_anchors:,} anchors) for every variant; simulated τ on held-out
conversations of some hundred and of about {long_tokens:,} tokens:

| variant | τ, short | τ, long | first draft token accepted, short | long | parameters |
|---|--:|--:|--:|--:|--:|
{ablations}
"""


def prompt_ids(tokenizer, text: str) -> torch.LongTensor:
    messages = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="output folder of train.py")
    parser.add_argument("--eval-data", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=5, help="per set")
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()

    best = Path(options.run) / "best"
    LongSparkDrafter.from_pretrained(best, dtype=torch.bfloat16).save_pretrained(FOLDER)
    target, tokenizer = load_target("smollm2")
    drafter = load_drafter(str(FOLDER))  # what is shipped, rounded to bf16, computed in fp32

    sets = {}
    for path in sorted(Path(options.eval_data).glob("eval_*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()[: options.prompts]
        sets[path.stem.removeprefix("eval_")] = [json.loads(line)["turns"][0] for line in lines]
    held_out = read_samples(options.data)
    sets["held-out"] = [s.messages[-1]["content"] for s in held_out[-options.prompts :]]

    taus: dict[str, dict[str, float]] = {}
    for name, texts in sets.items():
        prompts = [prompt_ids(tokenizer, text) for text in texts]
        taus[name] = {}
        for temperature, sampling in (("0", {"do_sample": False}), ("1", {"do_sample": True, "top_k": 0})):
            torch.manual_seed(980426)
            taus[name][temperature] = generated_tau(target, drafter, prompts, options.new_tokens, **sampling)
            print(name, "T =", temperature, round(taus[name][temperature], 3), flush=True)

    metrics = json.loads((best / "metrics.json").read_text())
    training = json.loads((Path(options.run) / "provenance.json").read_text())
    source = provenance(drafter.dtype)
    evaluations = [json.loads(line) for line in (Path(options.run) / "evaluations.jsonl").read_text().splitlines()]
    result = {
        "target": SMOLLM2_HUB_ID,
        "tau": taus,
        "prompts_per_set": options.prompts,
        "new_tokens": options.new_tokens,
        "training": {"metrics_of_the_best_checkpoint": metrics, "provenance": training},
        "evaluations": evaluations,
        "provenance": source,
    }
    write_result(FOLDER / "results.json", result)
    write_card(drafter.config, drafter.num_parameters(), result)


def write_card(config: LongSparkConfig, parameters: int, result: dict) -> None:
    """The card, from result files alone."""
    metrics, source = result["training"]["metrics_of_the_best_checkpoint"], result["provenance"]
    card = CARD.format(
        target=SMOLLM2_HUB_ID,
        parameters=parameters / 1e6,
        rows="\n".join(f"| {name} | {t['0']:.2f} | {t['1']:.2f} |" for name, t in result["tau"].items()),
        most=config.block_size + 1,
        prompts=result["prompts_per_set"],
        new_tokens=result["new_tokens"],
        anchors=metrics["eval_anchors_seen"],
        steps=metrics["step"],
        layers=", ".join(map(str, config.target_layer_ids)),
        vocabulary=config.draft_vocab_size,
        progress="\n".join(
            f"| {e['step']:,} | {e['eval_anchors_seen']:,} | {e['eval_tau']:.2f} | {e['eval_simulated_tau']:.2f} |"
            for e in result["evaluations"]
        ),
        **{key: source[key] for key in ("device", "dtype", "torch", "transformers", "date")},
    )
    if (FOLDER / "ablations.json").exists():
        card += ablations_section(json.loads((FOLDER / "ablations.json").read_text()))
    (FOLDER / "README.md").write_text(card, encoding="utf-8")


def ablations_section(ablations: dict) -> str:
    """What each part is worth, as Markdown."""
    long = ablations["long_conversations"]
    return ABLATIONS.format(
        ablation_steps=ablations["steps"],
        ablation_anchors=ablations["rows"][0]["anchors"],
        long_tokens=round(sum(long["tokens"]) / long["number"]),
        ablations="\n".join(
            f"| {r['variant']} | {r['short_simulated_tau']:.2f} | {r['long_simulated_tau']:.2f} | "
            f"{r['short_accepted_1']:.3f} | {r['long_accepted_1']:.3f} | {r['parameters'] / 1e6:.1f}M |"
            for r in ablations["rows"]
        ),
    )


if __name__ == "__main__":
    main()
