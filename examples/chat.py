"""A chat whose turns continue in one cache, streamed: `python examples/chat.py`, or with questions of your own as arguments."""

import argparse

from transformers import DynamicCache, TextStreamer

from longspark_hf.compat import cache_argument
from longspark_hf.evaluation.demo import build_drafter
from longspark_hf.evaluation.targets import load_target


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("questions", nargs="*", default=["What is a glacier?", "Where in Europe can I see one?"])
parser.add_argument("--max-new-tokens", type=int, default=48)
options = parser.parse_args()

target, tokenizer = load_target("smollm2")
drafter, origin, _ = build_drafter(target, tokenizer)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
cache = DynamicCache(config=target.config)
messages = []

for question in options.questions:
    print(f"\n> {question}")
    messages.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    # The whole conversation goes in; only what is new to the cache is processed, by the target and by the drafter.
    output = target.generate(
        **inputs,
        assistant_model=drafter,
        streamer=streamer,
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        **{cache_argument(target): cache},
    )
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
    print(
        f"[{inputs['input_ids'].shape[1]} tokens in, first answer token after {drafter.stats.prefill_seconds:.2f} s, "
        f"{drafter.stats.mean_acceptance_length:.2f} tokens a round]"
    )
