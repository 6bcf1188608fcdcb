"""From training runs to the files of this folder: weights in bf16, measured τ, and the card.

    python examples/LongSpark-SmolLM2-135M-Instruct/export.py --run runs/smollm2 --eval-data DIR --data smollm2_synthetic.jsonl

`--eval-data` holds `eval_NAME.jsonl` files of `{"turns": [...]}`; first turns are used. The last 5% of `--data` was held out, and
the last 8 of those chose the checkpoint: τ is measured on those before them. Several runs after `--run` are those that started
from each other's newest checkpoint, in order. Without `--run`, τ of the drafter that is here is measured anew; `--card` makes only
the card anew.
"""

import argparse
import json
from pathlib import Path

import torch

from longspark_hf import LongSparkDrafter
from longspark_hf.configuration_longspark import tokenizer_fingerprint
from longspark_hf.evaluation.provenance import provenance, write_result
from longspark_hf.evaluation.targets import SMOLLM2_HUB_ID, load_drafter, load_target
from longspark_hf.evaluation.tasks import first_ids
from longspark_hf.hub.card import model_card, read_results
from longspark_hf.hub.push import MODULES
from longspark_hf.training.data import read_samples
from longspark_hf.training.metrics import generated_tau
from longspark_hf.training.trainer import COMPLETE, complete_checkpoints


FOLDER = Path(__file__).parent
SELECTING = 8  # prompts at the end of the data, by whose τ train.py chose the checkpoint
TRAINING_DATA = (
    "Conversations of the target with itself: prompts sampled from its chat template, word problems and Python tasks from "
    "`prompts.py`, questions about long documents, all answered by the target at temperatures 0, 0.7 and 1; a tenth joined to contexts "
    "of about 3,000 tokens. Trained on one CPU core by `train.py`, beside this card."
)
ABLATIONS = """
## What each part is worth

{ablation_steps} optimizer steps ({ablation_anchors:,} anchors) for every variant; simulated τ on held-out conversations of some
hundred and of about {long_tokens:,} tokens:

| variant | τ, short | τ, long | first draft token accepted, short | long | parameters |
|---|--:|--:|--:|--:|--:|
{ablations}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", help="output folder of train.py")
    parser.add_argument("--eval-data")
    parser.add_argument("--data")
    parser.add_argument("--prompts", type=int, default=5, help="per set")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--card", action="store_true", help="make only the card anew, from the result files")
    options = parser.parse_args()
    if options.card:
        write_card(LongSparkDrafter.from_pretrained(FOLDER))
        return
    if not (options.eval_data and options.data):
        parser.error("--eval-data and --data are needed, or --card")

    target, tokenizer = load_target("smollm2")
    if options.run:
        trained = LongSparkDrafter.from_pretrained(Path(options.run[-1]) / "best", dtype=torch.bfloat16)
        trained.config.target_model_type = target.config.model_type
        trained.config.target_tokenizer = tokenizer_fingerprint(tokenizer)
        save(trained)
        training, evaluations = training_history([Path(run) for run in options.run])
    else:
        before = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
        training, evaluations = before["training"], before["evaluations"]
    drafter = load_drafter(str(FOLDER))  # what is shipped, rounded to bf16, computed in fp32

    sets = {}
    for path in sorted(Path(options.eval_data).glob("eval_*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()[: options.prompts]
        sets[path.stem.removeprefix("eval_")] = [json.loads(line)["turns"][0] for line in lines]
    held_out = read_samples(options.data)[:-SELECTING]
    sets["held-out"] = [s.messages[-1]["content"] for s in held_out[-options.prompts :]]

    taus: dict[str, dict[str, float]] = {}
    for name, texts in sets.items():
        prompts = [torch.tensor([first_ids(tokenizer, text)]) for text in texts]
        taus[name] = {}
        for temperature, sampling in (("0", {"do_sample": False}), ("1", {"do_sample": True, "top_k": 0})):
            torch.manual_seed(980426)
            taus[name][temperature] = generated_tau(target, drafter, prompts, options.new_tokens, **sampling)
            print(name, "T =", temperature, round(taus[name][temperature], 3), flush=True)

    result = {
        "target": SMOLLM2_HUB_ID,
        "tau": taus,
        "prompts_per_set": options.prompts,
        "new_tokens": options.new_tokens,
        "training": training,
        "evaluations": evaluations,
        "provenance": provenance(drafter.dtype),
    }
    write_result(FOLDER / "results.json", result)
    write_card(drafter)


def save(drafter: LongSparkDrafter) -> None:
    """Weights and config alone: the modules that a repository on the Hub brings along lie in this one already."""
    drafter.save_pretrained(FOLDER)
    for module in MODULES:
        (FOLDER / module).unlink()
    config = json.loads((FOLDER / "config.json").read_text())
    del config["auto_map"]
    (FOLDER / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def training_history(runs: list[Path]) -> tuple[dict, list[dict]]:
    """Provenance and evaluations of runs that started from each other, steps and anchors counted from the first one's start."""
    best = json.loads((runs[-1] / "best" / "metrics.json").read_text())["step"]
    evaluations, steps, anchors = [], 0, 0
    for run in runs:
        before = steps
        for line in (run / "evaluations.jsonl").read_text().splitlines():
            e = json.loads(line)
            evaluations.append(e | {"step": steps + e["step"], "eval_anchors_seen": anchors + e["eval_anchors_seen"]})
        step, folder = max(complete_checkpoints(run).items())
        steps, anchors = steps + step, anchors + json.loads((Path(folder) / COMPLETE).read_text())["num_anchors_seen"]
    provenances = [json.loads((run / "provenance.json").read_text()) for run in runs]
    training = {
        "metrics_of_the_best_checkpoint": next(e for e in evaluations if e["step"] == before + best),
        "provenance": provenances[-1],
        "earlier_runs": provenances[:-1],
    }
    return training, evaluations


def write_card(drafter: LongSparkDrafter) -> None:
    """The card, from result files alone."""
    ablations = FOLDER / "ablations.json"
    card = model_card(
        drafter.config,
        f"longspark-hf/{FOLDER.name}",
        read_results(FOLDER).values(),
        license="apache-2.0",
        training_data=TRAINING_DATA,
        parameters=drafter.num_parameters(),
        sections=ablations_section(json.loads(ablations.read_text())) if ablations.exists() else "",
    )
    card.save(FOLDER / "README.md")


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
