"""The `longspark` command: reads arguments, prints tables. What it shows is computed in `longspark_hf.evaluation`."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any


try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.table import Table
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

TargetHelp = "A Hub id, a folder with a config.json, or `smollm2` (packaged SmolLM2-135M-Instruct)."
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


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

    with _bad_input_exits():
        target_config = load_target_config(target)
        if drafter is None:
            # Which token masks changes neither fit nor cost, and the config alone cannot tell a good one.
            drafter_config = LongSparkConfig.from_target(target_config, mask_token_id=0)
        else:
            drafter_config = load_drafter_config(drafter)
        found = {"drafter": drafter, **describe(target_config, drafter_config)}

    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _console().print(_info_table(found))
    if not found["fits"]:
        raise typer.Exit(1)


@app.command()
def demo(
    target: Annotated[str, typer.Option(help=TargetHelp)] = "smollm2",
    drafter: Annotated[str | None, typer.Option(help="A Hub id or a folder; default: the shipped one.")] = None,
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

    stderr = Console(stderr=True, highlight=False)

    def progress(message: str) -> None:
        stderr.print(f"[dim]longspark demo:[/dim] {message}")

    with _bad_input_exits():
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

    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = _console()
    console.print(_demo_table(report))
    console.print(f"Drafter: {origin}.")
    for row in report["rows"]:
        round_ms = row["draft_ms_per_round"] + row["verify_ms_per_round"]
        break_even = round_ms / 1e3 * row["tokens_per_second_plain"]
        console.print(f"At {row['prompt_tokens']:,} tokens a drafter pays here from τ = {break_even:.2f} on.")
    if not trained:
        console.print("It accepts almost nothing, so this shows what drafting costs, not what it gains.")


def main() -> None:
    """Entry point of the `longspark` command."""
    app()


@contextmanager
def _bad_input_exits() -> Iterator[None]:
    """One line and exit code 2 for what the user can fix; a traceback stays for what only we can."""
    try:
        yield
    except ValueError as error:
        typer.echo("Error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None


def _console() -> Console:
    # Rich assumes 80 columns where there is no terminal, too few for the tables.
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


def _info_table(found: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    peers = ", ".join(f"{_mib(size)} MiB at {label}" for label, size in found["peer_state_bytes"].items())
    table.add_row("target", f"{found['target']}, {found['num_target_layers']} layers")
    table.add_row("drafter", found["drafter"] or "a new one, LongSparkConfig.from_target")
    table.add_row("fits", "yes" if found["fits"] else f"no. {found['misfit']}")
    table.add_row("target layer ids", ", ".join(map(str, found["target_layer_ids"])))
    table.add_row(
        "block, window, summary",
        f"{found['block_size']} tokens, {found['window_size']} rows, {found['num_summary_queries']} queries a head",
    )
    table.add_row("parameters", f"{found['parameters']:,}")
    table.add_row("state (bf16)", f"{_mib(found['state_bytes'])} MiB at any context length")
    table.add_row("peer's KV cache (bf16)", f"{peers}: a growing drafter cache of the same shape")
    return table


def _demo_table(report: dict[str, Any]) -> Table:
    table = Table(
        title=f"{report['target']}, {_conditions(report)}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("prompt\ntokens", justify="right")
    table.add_column("identical", justify="center")
    for header in (
        "plain\ntok/s",
        "drafter\ntok/s",
        "speedup",
        "τ",
        "prefill s\nplain",
        "prefill s\ndrafter",
        "draft\nms/round",
        "state\nMiB",
    ):
        table.add_column(header, justify="right")
    for row in report["rows"]:
        table.add_row(
            f"{row['prompt_tokens']:,}",
            "yes" if row["identical"] else "NO",
            f"{row['tokens_per_second_plain']:.1f}",
            f"{row['tokens_per_second_drafter']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['first_token_seconds_plain']:.2f}",
            f"{row['first_token_seconds_drafter']:.2f}",
            f"{row['draft_ms_per_round']:.1f}",
            _mib(row["state_bytes"]),
        )
    return table


def _conditions(report: dict[str, Any]) -> str:
    conditions = report["measured_with"]
    threads = f"{conditions['threads']} thread" + "s" * (conditions["threads"] > 1)
    return (
        f"greedy, {conditions['max_new_tokens']} new tokens, {conditions['dtype']}, {conditions['device']}, {threads}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


if __name__ == "__main__":
    main()
