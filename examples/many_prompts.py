"""Many prompts, one after another, with what the drafter did over all of them: `python examples/many_prompts.py`.

A drafter works for one sequence at a time; `generate` refuses a batch of several with a message that says so.
"""

from longspark_hf.evaluation.demo import build_drafter
from longspark_hf.evaluation.targets import load_target


PROMPTS = ["Write a haiku about rain.", "What is 17 times 6?", "List three uses of copper."]

target, tokenizer = load_target("smollm2")
drafter, origin, _ = build_drafter(target, tokenizer)
rounds = tokens = 0

for prompt in PROMPTS:
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=32, do_sample=False)
    print(f"> {prompt}\n{tokenizer.decode(output[0, inputs['input_ids'].shape[1] :], skip_special_tokens=True)}\n")
    rounds, tokens = rounds + drafter.stats.rounds, tokens + drafter.stats.tokens

print(f"{tokens} tokens in {rounds} rounds: {tokens / rounds:.2f} a round, where plain decoding makes 1")
