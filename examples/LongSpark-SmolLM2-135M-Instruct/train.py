"""How the drafter in this folder was trained: SmolLM2-135M-Instruct on one CPU core.

    OMP_NUM_THREADS=1 python examples/LongSpark-SmolLM2-135M-Instruct/train.py --data smollm2_synthetic.jsonl --output runs/smollm2

Started again, it goes on from the newest complete checkpoint. To end early with a clean decay of the learning rate, start
it again with a smaller `--steps`.
"""

import argparse

import torch

from longspark_hf.evaluation.targets import load_target, mask_token_id
from longspark_hf.training.run import train


# Four late layers, started as the target's own on fitted inputs, with the last boundary state added to those; short blocks,
# since this drafter is rarely right for longer.
CONFIG = {
    "target_layer_ids": [26, 27, 28, 29],
    "block_size": 4,
    "qk_norm": False,
    "boundary_residual": -1,
    "markov_rank": 40,
}
DRAFT_VOCAB_SIZE = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="JSONL of prompt, response, temperature")
    parser.add_argument("--eval-share", type=float, default=0.05, help="of the data, from its end, held out")
    parser.add_argument("--output", required=True, help="folder for checkpoints and best/")
    parser.add_argument("--steps", type=int, default=9000, help="optimizer steps")
    parser.add_argument("--decay-steps", type=int, default=2700, help="of these, the last so many decay")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--eval-steps", type=int, default=1500, help="between evaluations")
    parser.add_argument("--init-from", help="drafter to start from, the one shipped before for instance")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--minutes", type=float, help="stop with a checkpoint after so many minutes")
    options = parser.parse_args()

    torch.set_num_threads(1)
    target, tokenizer = load_target("smollm2")
    train(
        target,
        tokenizer,
        options.data,
        options.output,
        mask_token_id=mask_token_id(tokenizer, target.config.vocab_size),
        config=CONFIG,
        draft_vocab_size=DRAFT_VOCAB_SIZE if options.init_from is None else None,
        init_from=options.init_from,
        eval_share=options.eval_share,
        max_response_length=159,  # the data's responses were cut at 160 tokens
        long_share=0.1,  # contexts of about 3,000 tokens
        long_characters=12000,
        num_simulated=16,
        num_eval_prompts=8,
        num_anchors=512,
        steps_per_batch=6,
        markov_lr_scale=10.0,
        boundary_lr_scale=0.0,
        save_minutes=10,
        max_minutes=options.minutes,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        warmup_steps=100,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": options.decay_steps, "decay_type": "linear"},
        eval_strategy="steps",
        eval_steps=options.eval_steps,
        save_strategy="steps",
        save_steps=options.eval_steps,
        save_total_limit=2,
        logging_steps=60,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=options.seed,
    )


if __name__ == "__main__":
    main()
