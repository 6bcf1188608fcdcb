"""A drafter loaded as remote code, the way its users without longspark_hf load it: `python examples/from_hub.py`.

The folder stands for a repository on the Hub: with a Hub id, pass `revision="<commit>"` too, so that the code you run is the
code you read.
"""

from pathlib import Path

from transformers import AutoModel

from longspark_hf.evaluation.targets import load_target  # only to find the packaged SmolLM2


REPOSITORY = str(Path(__file__).parent / "LongSpark-SmolLM2-135M-Instruct")

target, tokenizer = load_target("smollm2")
drafter = AutoModel.from_pretrained(REPOSITORY, trust_remote_code=True, dtype="float32")
print(f"{type(drafter).__name__} from {type(drafter).__module__}")

inputs = tokenizer("The three primary colours are", return_tensors="pt")
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
print(drafter.stats)
