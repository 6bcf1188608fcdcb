"""From a target to a drafter of its own, in Python: `python examples/train_your_own.py`, a quarter of an hour on a CPU.

The same as `longspark data` and `longspark train`, for those who want to change what happens between.
"""

import argparse
from pathlib import Path

from longspark_hf import LongSparkDrafter
from longspark_hf.evaluation.targets import load_target
from longspark_hf.training.recipe import recipe, schedule
from longspark_hf.training.run import train
from longspark_hf.training.samples import SynthesisSettings
from longspark_hf.training.synthesize import synthesize


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--output", type=Path, default=Path("my-drafter"))
parser.add_argument("--samples", type=int, default=100, help="conversations to make up")
parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
parser.add_argument("--max-new-tokens", type=int, default=96, help="of a response")
options = parser.parse_args()

target, tokenizer = load_target("smollm2")
data = options.output / "data.jsonl"
options.output.mkdir(parents=True, exist_ok=True)
report = synthesize(target, tokenizer, data, options.samples, SynthesisSettings(max_new_tokens=options.max_new_tokens))
print(f"{report['kept']} conversations kept")

settings = recipe(target)  # what suits a target of this size
for name in ("epochs", "batch_size"):
    del settings[name]
settings |= {"num_eval_prompts": min(4, report["kept"] // 20 or 1), "eval_share": 0.1}
trainer = train(
    target,
    tokenizer,
    str(data),
    options.output / "run",
    **settings,
    **schedule(options.steps, settings["steps_per_batch"]),
    max_steps=options.steps,
    per_device_train_batch_size=1,
    eval_strategy="steps",
    eval_steps=options.steps,
    save_strategy="steps",
    save_steps=options.steps,
    report_to=[],
)

drafter = LongSparkDrafter.from_pretrained(options.output / "run" / "best")
inputs = tokenizer("The three primary colours are", return_tensors="pt")
target.generate(**inputs, assistant_model=drafter, max_new_tokens=32, do_sample=False)
print(f"{drafter.stats.mean_acceptance_length:.2f} tokens a round, from {options.output / 'run' / 'best'}")
