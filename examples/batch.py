"""Several prompts at once, each at its own pace: `python examples/batch.py`.

The prompts are padded on the left, as for plain `generate`, and the output is what plain `generate` gives.
"""

from longspark_hf.evaluation.demo import build_drafter
from longspark_hf.evaluation.targets import load_target


PROMPTS = ["Write a haiku about rain.", "What is 17 times 6?", "List three uses of copper."]

target, tokenizer = load_target("smollm2")
drafter, origin, _ = build_drafter(target, tokenizer)
tokenizer.padding_side = "left"

messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
batch = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
)
output = target.generate(**batch, assistant_model=drafter, max_new_tokens=32, do_sample=False)

for prompt, answer in zip(PROMPTS, output[:, batch["input_ids"].shape[1] :]):
    print(f"> {prompt}\n{tokenizer.decode(answer, skip_special_tokens=True)}\n")
stats = drafter.stats
print(
    f"{stats.tokens} tokens in {stats.rounds} rounds: {stats.mean_acceptance_length:.2f} a round, plain decoding makes 1"
)
