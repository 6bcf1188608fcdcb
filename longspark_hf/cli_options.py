"""What the subcommands of `longspark` share: options, lists of numbers, and how bad input ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from longspark_hf import console


TargetHelp = "A Hub id, a folder with a config.json, or `smollm2` (packaged SmolLM2-135M-Instruct)."
TargetOption = Annotated[str, typer.Option(help=TargetHelp)]
DrafterOption = Annotated[str | None, typer.Option(help="A Hub id or a folder; default: the shipped one.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@contextmanager
def bad_input_exits() -> Iterator[None]:
    """One line and exit code 2 for what the user can fix; a traceback stays for what only we can."""
    try:
        yield
    except ValueError as error:
        if console.is_first_process():
            typer.echo("Error: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None


def numbers(option: str, text: str, kind: type) -> list:
    """The numbers in `text`, separated by commas; a `ValueError` names the `option` where it holds others."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes numbers separated by commas, got '{text}'.") from None
