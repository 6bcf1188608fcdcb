"""
The `longspark` command: arguments in, exit codes out. What it does is in `longspark_hf.evaluation` and
`longspark_hf.training`, how it shows that in `console`.
"""

import sys
from pathlib import Path
from typing import Annotated


try:
    import typer

    from longspark_hf import console
    from longspark_hf.cli_options import (
        DeviceOption,
        DrafterOption,
        DtypeOption,
        JsonOption,
        TargetHelp,
        TargetOption,
        bad_input_exits,
        numbers,
    )
    from longspark_hf.cli_training import data, train
except ImportError:
    print('The `longspark` command needs typer and rich. Run: pip install "longspark-hf[demo]"', file=sys.stderr)
    raise SystemExit(2) from None


app = typer.Typer(
    name="longspark",
    help="Speculative decoding for transformers at a fixed cost.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def info(
    target: Annotated[str, typer.Argument(help=TargetHelp)],
    drafter: Annotated[
        str | None, typer.Argument(help="A Hub id or a folder. Without it: the drafter that `from_target` builds.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """
    Tell whether a drafter fits and what it costs.

    Reads configs only, no weights. Exit code 1 when the drafter does not fit the target.
    """
    from longspark_hf import LongSparkConfig
    from longspark_hf.evaluation.info import describe
    from longspark_hf.evaluation.targets import load_drafter_config, load_target_config

    with bad_input_exits():
        target_config = load_target_config(target)
        if drafter is None:
            # Which token masks changes neither fit nor cost, and the config alone cannot tell a good one.
            drafter_config = LongSparkConfig.from_target(target_config, mask_token_id=0)
        else:
            drafter_config = load_drafter_config(drafter)
        found = {"drafter": drafter, **describe(target_config, drafter_config)}

    console.show(found, as_json, console.print_info)
    if not found["fits"]:
        raise typer.Exit(1)


@app.command()
def demo(
    target: TargetOption = "smollm2",
    drafter: DrafterOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 48,
    long_tokens: Annotated[int, typer.Option(min=64, help="Length of the long prompt.")] = 3072,
    as_json: JsonOption = False,
) -> None:
    """
    Compare generation with and without a drafter.

    Answers a short and a long prompt on this CPU, greedily, and prints one table.
    """
    from longspark_hf.evaluation.demo import build_drafter, build_prompts, run
    from longspark_hf.evaluation.targets import load_target

    progress = console.teller("demo")
    with bad_input_exits():
        progress(f"loading {target}")
        model, tokenizer = load_target(target)
        draft_model, origin, trained = build_drafter(model, tokenizer, drafter)
        progress(f"drafter: {origin}")
        prompts = build_prompts(model, tokenizer, long_tokens, max_new_tokens)
    report = {
        "target": model.config._name_or_path,
        "drafter": origin,
        "trained": trained,
        **run(model, draft_model, prompts, max_new_tokens, progress=progress),
    }
    console.show(report, as_json, console.print_demo)


app.command()(data)
app.command()(train)


@app.command()
def bench(
    target: TargetOption = "smollm2",
    drafter: DrafterOption = None,
    tasks: Annotated[
        str, typer.Option(help="By commas: gsm8k, ...; stdlib-1k to stdlib-128k; JSONL files of `turns` lists.")
    ] = "stdlib-1k",
    prompts: Annotated[int | None, typer.Option(min=1, help="Of each task. Default: all; 4 of stdlib.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="Of an answer. Default: the task's.")] = None,
    temperatures: Annotated[str, typer.Option(help="By commas; 0 is greedy.")] = "0",
    repeats: Annotated[int, typer.Option(min=1, help="Of every prompt and method.")] = 3,
    methods: Annotated[str | None, typer.Option(help="By commas, with or without plain. Default: all.")] = None,
    num_assistant_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens drafted a round.")] = None,
    rope_theta: Annotated[float | None, typer.Option(help="Another rotary base, for both models.")] = None,
    ntk_alpha: Annotated[float | None, typer.Option(help="Or the factor by which the context grows.")] = None,
    concurrency: Annotated[int, typer.Option(help="Prompts at once; this benchmark asks one by one.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the draw of prompts and of sampling.")] = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    output: Annotated[Path | None, typer.Option(help="Result file; the same command goes on with it.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: JsonOption = False,
) -> None:
    """
    Measure speedup, acceptance and costs on tasks.

    All methods answer the same prompts in one process, turn about; the baseline is plain `generate`. Stopped, it shows
    what is done, and with --output the same command goes on from there.
    """
    from longspark_hf.evaluation.answering import METHODS
    from longspark_hf.evaluation.bench import BenchSettings, make_bench
    from longspark_hf.evaluation.bench_rows import markdown, warning

    progress = console.teller("bench")
    with bad_input_exits():
        settings = BenchSettings(
            methods=tuple(methods.split(",")) if methods else METHODS,
            temperatures=tuple(numbers("--temperatures", temperatures, float)),
            repeats=repeats,
            seed=seed,
            num_assistant_tokens=num_assistant_tokens,
            rope_theta=rope_theta,
            ntk_alpha=ntk_alpha,
            concurrency=concurrency,
        )
        measured = make_bench(
            target, drafter, tasks.split(","), settings, prompts, max_new_tokens, device, dtype, output, progress
        )
    stopped = False
    try:
        measured.run()
    except KeyboardInterrupt:
        stopped = True
        kept = f"{output} keeps them; the same command goes on." if output else "Without --output, they are not kept."
        progress(f"stopped; {len(measured.runs)} runs are done. {kept}")

    result = measured.result()
    if as_markdown and not as_json:
        print(markdown(result))
    else:
        console.show(result, as_json, console.print_bench)
    if line := warning(result["rows"]):
        console.warn(line)
    if stopped:
        raise typer.Exit(130)


@app.command()
def sweep(
    output: Annotated[Path, typer.Option(help="Result file; the same command goes on with it.")],
    contexts: Annotated[str, typer.Option(help="Lengths by commas.")] = "1024,8192,32768,131072",
    shape: Annotated[
        str, typer.Option(help="Of the target: smollm2, qwen3-4b, qwen3-8b, qwen3-14b; a Hub id or a folder.")
    ] = "smollm2",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer decoder layers, where not all fit.")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Whose shape to take: Hub id or folder. Default: the shipped one for smollm2.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="By commas; dflash is the growing peer, dflash_sliding a flat one.")
    ] = "longspark,window,dflash,dflash_sliding",
    repeats: Annotated[int, typer.Option(min=1, help="Passes over everything, turn about.")] = 15,
    prefill_to: Annotated[int, typer.Option(min=0, help="Measure real prefills too, of contexts up to this.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """
    Measure drafting against context length.

    Draft time, verification, drafter state and memory for LongSpark and for the DFlash path of transformers, over
    synthetic K/V rows and random weights. Stopped, it keeps its finished passes and goes on with the same command.
    """
    from longspark_hf.evaluation.sweep import Sweep, run

    progress = console.teller("sweep")
    with bad_input_exits():
        settings = Sweep(
            contexts=numbers("--contexts", contexts, int),
            shape=shape,
            layers=layers,
            drafter=drafter,
            methods=methods.split(","),
            repeats=repeats,
            prefill_to=prefill_to,
            device=device,
            dtype=dtype,
        )
        try:
            result = run(settings, output, progress)
        except KeyboardInterrupt:
            progress(f"stopped. What is done lies in {output}.passes; the same command goes on.")
            raise typer.Exit(130) from None
    console.show(result, as_json, console.print_sweep, output)


@app.command()
def profile(
    target: TargetOption = "smollm2",
    drafter: DrafterOption = None,
    contexts: Annotated[str, typer.Option(help="Prompt lengths by commas.")] = "1024,6144",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 64,
    prompts: Annotated[int, typer.Option(min=1, help="Of each length.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    output: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
    as_json: JsonOption = False,
) -> None:
    """
    Take a round apart: where its milliseconds go.

    Answers prompts with the drafter and times the parts of every round, beside what this machine needs for them at least.
    """
    from longspark_hf.evaluation.profile import ProfileSettings, run

    with bad_input_exits():
        settings = ProfileSettings(
            tuple(numbers("--contexts", contexts, int)), max_new_tokens, prompts, repeats, temperature
        )
        result = run(target, drafter, settings, device, dtype, output, console.teller("profile"))
    console.show(result, as_json, console.print_profile)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Result files of bench, sweep and ablations.")],
    output: Annotated[
        Path, typer.Option(help="page.html, in one file; or page.md, with its plots in a folder beside it.")
    ],
) -> None:
    """Turn result files into one page with plots and tables."""
    from longspark_hf.evaluation.page import write_page

    with bad_input_exits():
        for path in write_page(files, output):
            print(path)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Hub id or folder of a released checkpoint (Hehy/LongSpark-Qwen3-*).")],
    output: Annotated[Path, typer.Argument(help="Folder to write, new or empty.")],
    repo: Annotated[str | None, typer.Option(help="user/name it will be published as, for its card.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Hub id of its target. Default: as published, or as its config says.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="For its card. Default: as the source's card says.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the source.")] = None,
    as_json: JsonOption = False,
) -> None:
    """
    Rewrite a released checkpoint so that it loads anywhere.

    The folder then holds config, safetensors, the modules as remote code, and a card; weights are renamed, not changed.
    """
    from longspark_hf.hub import convert

    with bad_input_exits():
        report = convert(source, output, repo_id=repo, target=target, license=license, revision=revision)
    console.show(report, as_json, console.print_convert)


@app.command()
def push(
    folder: Annotated[
        Path, typer.Argument(help="Saved by `save_pretrained`, `longspark train` or `longspark convert`.")
    ],
    repo: Annotated[str, typer.Argument(help="user/name; made where it does not exist.")],
    upload: Annotated[bool, typer.Option("--upload", help="Do it. Without, it is only shown.")] = False,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository. Default: the account's setting.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to upload to, made where it does not exist.")] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Another file of the folder, by name; may be repeated.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="For the card, such as apache-2.0.")] = None,
    training_data: Annotated[str | None, typer.Option(help="For the card: trained on what, in a sentence.")] = None,
    as_json: JsonOption = False,
) -> None:
    """
    Publish a drafter, after showing what would be published.

    Shows files, sizes and the card, with figures from the result files in the folder. Refuses pickles, stray files and secrets.
    """
    from longspark_hf.hub import plan_push, push

    with bad_input_exits():
        plan = plan_push(
            folder,
            repo,
            private=private,
            revision=revision,
            commit_message=message,
            include=tuple(include or ()),
            license=license,
            training_data=training_data,
        )
        report = plan.to_dict()
        if upload:
            if not as_json:
                console.print_push(report)
            report["commit_url"] = push(plan)
    console.show(report, as_json, console.print_pushed if upload else console.print_push)


def main() -> None:
    """Entry point of the `longspark` command."""
    app()


if __name__ == "__main__":
    main()
