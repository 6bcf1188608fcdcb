"""`longspark data` and `longspark train`: arguments in, exit codes out. What they do is in `longspark_hf.training`."""

import importlib.util
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from longspark_hf import console
from longspark_hf.cli_options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    bad_input_exits,
    full_disk_exits,
    numbers,
)


def data(
    output: Annotated[Path, typer.Option(help="JSONL to write; journal and report go beside it.")],
    target: TargetOption = "smollm2",
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL with `prompt` or `messages` in every line; other fields are ignored.")
    ] = None,
    documents: Annotated[
        list[Path] | None, typer.Option(help="File or folder of long documents to ask about; may be repeated.")
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option(min=1, help="Prompts to answer. Default: all; 1000 where the target makes them up.")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Of responses, one drawn for each; 0 is greedy.")] = "0,0.7,1",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Responses are cut off there.")] = 512,
    min_new_tokens: Annotated[int, typer.Option(min=2, help="Shorter responses are dropped.")] = 2,
    keep_cut: Annotated[
        bool, typer.Option("--keep-cut/--drop-cut", help="Keep responses that were cut off, marked as such.")
    ] = True,
    max_repetition: Annotated[
        float, typer.Option(min=0, max=1, help="Drop texts where more of the 4-grams than this occurred before.")
    ] = 0.4,
    thinking: Annotated[bool, typer.Option(help="Let targets that can think do so.")] = False,
    context_tokens: Annotated[str, typer.Option(help="Lengths of prompts with documents.")] = "1024,4096",
    prompt_temperature: Annotated[float, typer.Option(help="Of prompts that the target makes up.")] = 0.8,
    prompt_top_k: Annotated[int, typer.Option(min=0, help="Of prompts that the target makes up; 0: no limit.")] = 50,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Of prompts that the target makes up.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered at once; may change on the way.")] = 8,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """
    Make training data with a target.

    The target answers prompts from a file, questions about long documents, or prompts that it makes up itself from its
    open chat template. Stopped or killed, the same command goes on where it was. Exit code 1 when nothing was kept.
    """
    from longspark_hf.evaluation.targets import device_and_dtype, load_target
    from longspark_hf.training.documents import document_prompts, read_documents
    from longspark_hf.training.prompts import read_prompts
    from longspark_hf.training.samples import SynthesisSettings, room_for_prompt
    from longspark_hf.training.synthesize import synthesize

    with bad_input_exits(), console.data_progress() as (progress, message):
        # What can be wrong is read before the target, which may take minutes to load.
        if prompts is not None and documents:
            raise ValueError("Give --prompts or --documents, not both: run twice and join the two files.")
        settings = SynthesisSettings(
            temperatures=tuple(numbers("--temperatures", temperatures, float)),
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            keep_cut=keep_cut,
            max_repetition=max_repetition,
            thinking=thinking,
            prompt_temperature=prompt_temperature,
            prompt_top_k=prompt_top_k,
            max_prompt_tokens=max_prompt_tokens,
            seed=seed,
        )
        lengths = numbers("--context-tokens", context_tokens, int)
        found_device, found_dtype = device_and_dtype(device, dtype)
        texts = read_documents(documents) if documents else None
        asked = (num_samples or 1000) if prompts is None else read_prompts(prompts)[:num_samples]

        try:
            message(f"loading {target}")
            model, tokenizer = load_target(target, found_dtype)
            model.to(found_device)
            if texts is not None:
                message("packing documents")
                room = room_for_prompt(model, max_new_tokens)
                asked = document_prompts(texts, tokenizer, lengths, num_samples, room, seed, enable_thinking=thinking)
            report = synthesize(model, tokenizer, output, asked, settings, batch_size, progress)
        except KeyboardInterrupt:
            message(f"stopped; what is done is in {output}. Run the same command again to go on.")
            raise typer.Exit(130) from None

    console.show(report, as_json, console.print_data, output)
    if not report["kept"]:
        raise typer.Exit(1)


def train(
    target: TargetOption,
    data: Annotated[Path, typer.Option(help="JSONL, as `longspark data` writes it.")],
    output: Annotated[Path, typer.Option(help="Folder for checkpoints and best/, the drafter.")],
    minutes: Annotated[float | None, typer.Option(help="Fit the run, evaluations included, into this.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Times each conversation is met.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, in place of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Conversations an optimizer step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The peak of its schedule.")] = None,
    anchors: Annotated[int | None, typer.Option(min=1, help="Blocks learned of each conversation.")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Longer conversations are cut.")] = None,
    layers: Annotated[str | None, typer.Option(help="Target layers to read, as 25,27,29.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens drafted a round.")] = None,
    draft_vocab: Annotated[int | None, typer.Option(min=0, help="Frequent tokens to draft from; 0: all.")] = None,
    markov_rank: Annotated[int | None, typer.Option(help="Rank of the Markov head.")] = None,
    mask_token: Annotated[str | None, typer.Option(help="A token, or its id, the target never emits.")] = None,
    init_from: Annotated[str | None, typer.Option(help="Drafter to start from: folder or Hub id.")] = None,
    eval_prompts: Annotated[int | None, typer.Option(min=1, help="Held-out prompts to measure τ on.")] = None,
    bf16: Annotated[bool | None, typer.Option("--bf16/--fp32", help="Default: bf16 where a GPU can.")] = None,
    checkpointing: Annotated[bool, typer.Option("--gradient-checkpointing", help="Less memory, more time.")] = False,
    compile_drafter: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with the run there, or delete it.")] = True,
    seed: Annotated[int, typer.Option(help="Of weights, order and anchors.")] = 42,
    push_to_hub: Annotated[str | None, typer.Option(metavar="ID", help="Hub repository to publish best/ in.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what it takes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """
    Train a drafter for a target.

    What is not given follows the size of the target. Stopped or killed, the same command goes on from its last
    checkpoint. On several GPUs: accelerate launch -m longspark_hf.cli train ...
    """
    with bad_input_exits():
        if importlib.util.find_spec("accelerate") is None:
            raise ValueError('Training needs accelerate. Run: pip install "longspark-hf[train]"')
    from longspark_hf.training.plan import begun, make_plan
    from longspark_hf.training.run import result

    progress = console.teller("train")
    # What transformers prints on the way goes to stderr; stdout is for the result.
    with redirect_stdout(sys.stderr):
        with bad_input_exits():
            plan = make_plan(
                target,
                data,
                output,
                layers=None if layers is None else numbers("--layers", layers, int),
                block_size=block_size,
                draft_vocab=draft_vocab,
                markov_rank=markov_rank,
                mask_token=mask_token,
                init_from=init_from,
                epochs=epochs,
                steps=steps,
                learning_rate=learning_rate,
                batch=batch_size,
                anchors=anchors,
                max_length=max_length,
                eval_prompts=eval_prompts,
                minutes=minutes,
                bf16=bf16,
                gradient_checkpointing=checkpointing,
                compile=compile_drafter,
                resume=resume,
                seed=seed,
                push_to_hub=push_to_hub,
            )
            run = plan.get_ready(progress, dry_run)
        try:
            if run is not None:
                with full_disk_exits():
                    run()
        except KeyboardInterrupt:
            there = begun(output)
            where = f"with a checkpoint at step {there['step']}" if there else "before the first checkpoint"
            progress(f"stopped {where}. Run the same command again to go on.")
            raise typer.Exit(130) from None

    if not console.is_first_process():
        return
    if dry_run:
        console.show(plan.describe(), as_json, console.print_plan)
    else:
        reached = {"steps_done": begun(output)["step"], "steps": plan.options["max_steps"]}
        console.show(result(output) | reached, as_json, console.print_training)
