"""One answer, plainly and with a drafter, on the CPU: `python examples/quickstart.py` (after `make demo`, which sets up)."""

import time

import torch

from longspark_hf.evaluation.demo import build_drafter
from longspark_hf.evaluation.targets import load_target


# The packaged SmolLM2-135M-Instruct. With your own: AutoModelForCausalLM.from_pretrained(...) and
# LongSparkDrafter.from_pretrained(...).
target, tokenizer = load_target("smollm2")
drafter, origin, _ = build_drafter(target, tokenizer)

messages = [{"role": "user", "content": "Name three rivers in Europe and say where they flow."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
options = {"max_new_tokens": 48, "do_sample": False}

start = time.perf_counter()
plain = target.generate(**inputs, **options)
middle = time.perf_counter()
drafted = target.generate(**inputs, assistant_model=drafter, **options)
end = time.perf_counter()

print(tokenizer.decode(drafted[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(
    f"\nidentical: {torch.equal(plain, drafted)}; plain {middle - start:.1f} s, with the drafter {end - middle:.1f} s"
)
print(f"drafter: {origin}; {drafter.stats}")
