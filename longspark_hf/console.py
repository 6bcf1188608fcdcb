"""What the `longspark` command shows: results on stdout, how far it is on stderr.

Knows: how a result looks on a terminal, and to machines. Does not know: how it came about.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def is_first_process() -> bool:
    """The one that prints, where `accelerate launch` started several."""
    return os.environ.get("RANK", "0") == "0"


def teller(command: str, console: Console | None = None) -> Callable[[str], None]:
    """A function that tells on stderr what a command is doing."""
    console = console or _stderr()

    def tell(message: str) -> None:
        if is_first_process():
            console.print(f"[dim]longspark {command}:[/dim] {message}", soft_wrap=True)

    return tell


def warn(line: str) -> None:
    """A line on stderr."""
    _stderr().print(line, soft_wrap=True)


@contextmanager
def data_progress() -> Iterator[tuple[Callable[[float, int, int], None], Callable[[str], None]]]:
    """How `longspark data` tells how far it is: a bar on a terminal, now and then a line elsewhere; and messages."""
    console = _stderr()
    message = teller("data", console)  # on the bar's own console, which moves the bar out of the way
    columns = ("longspark data", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), "left")
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", start=False, visible=False, speed="")
    begun = told = None

    def progress(done: float, total: int, tokens: int) -> None:
        nonlocal begun, told
        now = time.monotonic()
        if begun is None:
            begun = told = now
            bar.reset(task, total=total, completed=done, visible=True)
        speed = f"{tokens / max(now - begun, 1e-9):,.1f} tokens/s"
        bar.update(task, completed=done, speed=speed)
        if not console.is_terminal and now - told > 30:
            told = now
            message(f"{done:.0f} of {total}, {speed}")

    with bar:
        yield progress, message


def show(found: dict[str, Any], as_json: bool, for_people: Callable[..., None], *arguments: Any) -> None:
    """A result, as JSON for machines or by the function that prints it for people."""
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for_people(found, *arguments)


def print_info(found: dict[str, Any]) -> None:
    """Fit and cost of a drafter."""
    table = _fields_table()
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
    _stdout().print(table)


def print_demo(report: dict[str, Any]) -> None:
    """Generation with and without a drafter, and from which acceptance on it pays."""
    columns = [
        ("prompt\ntokens", lambda row: f"{row['prompt_tokens']:,}"),
        ("\nidentical", lambda row: "yes" if row["identical"] else "NO"),
        ("plain\ntok/s", lambda row: f"{row['tokens_per_second_plain']:.1f}"),
        ("drafter\ntok/s", lambda row: f"{row['tokens_per_second_drafter']:.1f}"),
        ("\nspeedup", lambda row: f"{row['speedup']:.2f}x"),
        ("\nτ", lambda row: f"{row['mean_acceptance_length']:.2f}"),
        ("prefill s\nplain", lambda row: f"{row['first_token_seconds_plain']:.2f}"),
        ("prefill s\ndrafter", lambda row: f"{row['first_token_seconds_drafter']:.2f}"),
        ("draft\nms/round", lambda row: f"{row['draft_ms_per_round']:.1f}"),
        ("state\nMiB", lambda row: _mib(row["state_bytes"])),
    ]
    console = _stdout()
    console.print(_columns_table(columns, report["rows"], title=f"{report['target']}, {_conditions(report)}"))
    console.print(f"Drafter: {report['drafter']}.")
    for row in report["rows"]:
        round_ms = row["draft_ms_per_round"] + row["verify_ms_per_round"]
        break_even = round_ms / 1e3 * row["tokens_per_second_plain"]
        console.print(f"At {row['prompt_tokens']:,} tokens a drafter pays here from τ = {break_even:.2f} on.")
    if not report["trained"]:
        console.print("It accepts almost nothing, so this shows what drafting costs, not what it gains.")


def print_data(report: dict[str, Any], output: Path) -> None:
    """What became of the prompts of `longspark data`."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("samples", justify="right")
    table.add_column("share", justify="right")

    def row(name: str, count: int) -> None:
        table.add_row(name, f"{count:,}", f"{count / max(report['prompts'], 1):.1%}")

    row("prompts", report["prompts"])
    row("kept", report["kept"])
    for temperature, count in report["kept_by_temperature"].items():
        row(f"  at temperature {temperature}", count)
    row(f"  cut off at {report['settings']['max_new_tokens']} tokens", report["kept_cut_off"])
    row("dropped", report["prompts"] - report["kept"])
    for reason, count in report["dropped"].items():
        row(f"  {reason}", count)
    console = _stdout()
    console.print(table)
    mean, speed = report["response_tokens"] / max(report["kept"], 1), report["tokens_per_second"]
    console.print(f"{report['response_tokens']:,} response tokens, {mean:,.0f} a sample; {speed:,.1f} tokens/s.")
    console.print(f"Written to {output}, the report to {output}.report.json.", soft_wrap=True)


def print_plan(report: dict[str, Any]) -> None:
    """What a training run takes, before it is begun."""
    drafter, data, settings = report["drafter"], report["data"], report["settings"]
    memory, disk, seconds = report["memory"], report["disk"], report["time"]
    table = _fields_table()

    def parts(sizes: dict[str, int], scale: float, digits: int) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {size / scale:,.{digits}f}" for name, size in sizes.items())

    vocabulary = "the whole vocabulary"
    if drafter["draft_vocab_size"] is not None:
        share = f"{data['draft_vocab_coverage']:.1%} of held-out response tokens"
        vocabulary = f"{drafter['draft_vocab_size']:,} tokens, {share}"
    dropped = "".join(f"; dropped {count:,}: {reason}" for reason, count in data["dropped"].items())
    table.add_row("target", f"{report['target']}, {report['target_parameters'] / 1e6:,.1f}M parameters")
    table.add_row("drafter", f"{drafter['parameters'] / 1e6:,.1f}M parameters: {parts(drafter['split'], 1e6, 2)}")
    table.add_row("", f"started from {settings['started_from']}, Markov rank {drafter['markov_rank']}")
    table.add_row("reads", f"target layers {', '.join(map(str, drafter['target_layer_ids']))}")
    table.add_row("drafts", f"{drafter['block_size']} tokens a round, from {vocabulary}")
    table.add_row("data", f"{data['conversations']:,} conversations, {data['held_out']:,} held out{dropped}")
    table.add_row(
        "",
        f"{data['response_tokens']:,} response tokens; longest {data['longest']:,} tokens, {data['cut']:,} cut there",
    )
    table.add_row(
        "steps",
        f"{report['steps']:,} with {settings['batch_size']} conversations each, {settings['steps_per_batch']} a batch; "
        f"learning rate {settings['learning_rate']:g}",
    )
    *sizes, free = memory.items()
    shown = parts({name: size for name, size in sizes if name != "total"}, 2**30, 2)
    table.add_row("memory (estimated)", f"{memory['total'] / 2**30:,.2f} GiB of {free[1] / 2**30:,.1f} free; {shown}")
    table.add_row(
        "disk",
        f"{disk['total'] / 2**30:,.2f} GiB of {disk['free'] / 2**30:,.1f} free: "
        f"checkpoints of {_mib(disk['checkpoint'])} MiB, drafter {_mib(disk['best'])} MiB",
    )
    if seconds is None:
        table.add_row("time", "not measured, as it does not fit into memory")
    else:
        table.add_row(
            "time (measured)",
            f"{_duration(seconds['total_seconds'])}: {seconds['step_seconds']:.2g} s a step, "
            f"{_duration(seconds['evaluation_seconds'])} an evaluation; from {seconds['measured']}",
        )
    _stdout().print(table)


def print_training(report: dict[str, Any]) -> None:
    """How far a training run is, what it gained, and how its drafter is used."""
    console = _stdout()
    done, steps = report["steps_done"], report["steps"]
    go_on = "--steps with more goes on" if done >= steps else "the same command does the rest"
    console.print(f"{done:,} of {steps:,} steps are done; {go_on}.")
    if report["tau_after"] is not None:
        before = "" if report["tau_before"] is None else f"{report['tau_before']:.2f} before, "
        console.print(f"τ on held-out prompts: {before}{report['tau_after']:.2f} after {report['step']:,} steps.")
    if report["step"] == 0 and done < steps:
        console.print("The drafter below is the untrained start: no evaluation came out above it so far.")
    elif report["step"] == 0:
        console.print(
            "The drafter below is the untrained start: nothing came out above it. Train longer, or on more data."
        )
    console.print(f"Drafter: {report['drafter']}", soft_wrap=True)
    console.print(
        f"""
from longspark_hf import LongSparkDrafter
drafter = LongSparkDrafter.from_pretrained("{report["drafter"]}")
target.generate(**inputs, assistant_model=drafter)""",
        soft_wrap=True,
        markup=False,
    )


def print_bench(result: dict[str, Any]) -> None:
    """A table for each task and temperature of a bench."""
    from longspark_hf.evaluation.bench_rows import COLUMNS, LEGEND, groups, remarks

    console = _stdout()
    for title, rows in groups(result["rows"]).items():
        console.print(_columns_table(COLUMNS, rows, title=title, padding=0))
        for line in remarks(rows):
            console.print(line)
    for line in (f"{result['target']} with {result['drafter']}.", LEGEND, *result["notes"]):
        console.print(f"[dim]{line}[/dim]")


def print_profile(result: dict[str, Any]) -> None:
    """The budget of a round at each context, and what it says."""
    from longspark_hf.evaluation.profile_rows import COLUMNS, LEGEND, describe, part_rows, remarks, title

    console = _stdout()
    for row in result["rows"]:
        console.print(_columns_table(COLUMNS, part_rows(row), title=title(row)))
        for line in remarks(row):
            console.print(line)
    for line in (LEGEND, describe(result)):
        console.print(f"[dim]{line}[/dim]")


def print_sweep(result: dict[str, Any], output: Path) -> None:
    """A sweep's rows, and what they say beside the paper."""
    from longspark_hf.evaluation.findings import COLUMNS, LEGEND, describe, finding_lines

    console = _stdout()
    console.print(_columns_table(COLUMNS, result["rows"], padding=(0, 1, 0, 0)))
    for line in finding_lines(result):
        console.print(line)
    for line in (describe(result), LEGEND, f"Written to {output}."):
        console.print(f"[dim]{line}[/dim]", soft_wrap=line.startswith("Written"))


def print_convert(report: dict[str, Any]) -> None:
    """A converted checkpoint, and how it is loaded."""
    table = _fields_table()
    table.add_row("from", report["source"])
    table.add_row("target", report["target"] or "not known: pass --target")
    table.add_row("weights", f"{report['tensors']} tensors, {report['parameters']:,} parameters, unchanged")
    sizes = "those of a published checkpoint" if report["published"] else "of no published checkpoint"
    table.add_row("sizes", sizes + ("; its config.json has another size" if report["config_differs"] else ""))
    table.add_row("written to", report["output"])
    _stdout().print(table)
    _stdout().print(
        f'\ndrafter = AutoModel.from_pretrained("{report["output"]}", trust_remote_code=True)',
        soft_wrap=True,
        markup=False,
    )


def print_push(report: dict[str, Any]) -> None:
    """What a push uploads, file by file, and the card."""
    columns = [("file", lambda row: row[0]), ("bytes", lambda row: f"{row[1]:,}")]
    rows = [*report["files"].items(), ("in all", report["total_bytes"])]
    _stdout().print(_columns_table(columns, rows))
    if report["left_out"]:
        _stdout().print(f"Left out: {', '.join(report['left_out'])}.", soft_wrap=True, markup=False)
    _stdout().print("README.md:\n", soft_wrap=True)
    _stdout().print(report["card"], soft_wrap=True, markup=False, highlight=False)
    visible = {None: "", True: ", private if new", False: ", public if new"}[report["private"]]
    where = f"{report['repo_id']}, branch {report['revision'] or 'main'}{visible}"
    _stdout().print(f"This goes to {where}, as '{report['commit_message']}'.", soft_wrap=True, markup=False)
    if report["commit_url"] is None:
        _stdout().print("Nothing has been uploaded yet; --upload does it.", soft_wrap=True)


def print_pushed(report: dict[str, Any]) -> None:
    """Where the upload went; the rest was shown before it."""
    _stdout().print(f"Uploaded: {report['commit_url']}", soft_wrap=True)


def _stdout() -> Console:
    # Rich assumes 80 columns where there is no terminal, too few for the tables.
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)


def _fields_table() -> Table:
    """A name and a value in each row."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _columns_table(columns: list[tuple[str, Callable]], rows: list[dict[str, Any]], **look: Any) -> Table:
    """Text in the first column, numbers in the others."""
    table = Table(title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, **look)
    for index, (header, _) in enumerate(columns):
        table.add_column(header, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def _conditions(report: dict[str, Any]) -> str:
    conditions = report["measured_with"]
    threads = f"{conditions['threads']} thread" + "s" * (conditions["threads"] > 1)
    return (
        f"greedy, {conditions['max_new_tokens']} new tokens, {conditions['dtype']}, {conditions['device']}, {threads}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
