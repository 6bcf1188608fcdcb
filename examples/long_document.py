"""Several questions on one document that is read once: `python examples/long_document.py [FILE]`, on the CPU."""

import argparse
import copy
import inspect
import json
from pathlib import Path

from transformers import DynamicCache

from longspark_hf.compat import cache_argument
from longspark_hf.evaluation.demo import build_drafter
from longspark_hf.evaluation.targets import load_target


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "file", nargs="?", default=inspect.getsourcefile(json), help="A text; the source of `json` by default."
)
text = Path(parser.parse_args().file).read_text(encoding="utf-8")[:6000]

target, tokenizer = load_target("smollm2")
drafter, origin, _ = build_drafter(target, tokenizer)
name = cache_argument(target)

# The document alone, up to where the questions will follow.
beginning = f"<|im_start|>user\n{text}\n\n"
document = tokenizer(beginning, return_tensors="pt")
read = DynamicCache(config=target.config)
target.generate(**document, assistant_model=drafter, max_new_tokens=1, **{name: read})
print(f"read {read.get_seq_length()} tokens; the drafter keeps {drafter.stats.state_bytes / 2**20:.1f} MiB of them\n")

for question in ("What is this text about?", "Which names does it define?"):
    inputs = tokenizer(f"{beginning}{question}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    # A deep copy takes the drafter's state along, so a question costs its own tokens only.
    output = target.generate(
        **inputs, assistant_model=drafter, max_new_tokens=40, do_sample=False, **{name: copy.deepcopy(read)}
    )
    print(f"> {question}\n{tokenizer.decode(output[0, inputs['input_ids'].shape[1] :], skip_special_tokens=True)}\n")
    print(f"first token after {drafter.stats.prefill_seconds:.2f} s\n")
