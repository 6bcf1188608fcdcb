"""What the subcommands of `longspark` share: options, lists of numbers, and how bad input ends."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

from longspark_hf import console


TargetHelp = "A Hub id, a folder with a config.json, or `smollm2` (packaged SmolLM2-135M-Instruct)."
TargetOption = Annotated[str, typer.Option(help=TargetHelp)]
DrafterOption = Annotated[str | None, typer.Option(help="A Hub id or a folder; default: the shipped one.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


@contextmanager
def bad_input_exits() -> Iterator[None]:
    """One line and exit code 2 for what the user can fix; a traceback stays for what only we can."""
    with full_disk_exits():
        try:
            yield
        except ValueError as error:
            _exit(str(error))


@contextmanager
def full_disk_exits() -> Iterator[None]:
    """One line and exit code 2 where there is no room to write."""
    try:
        yield
    except Exception as error:
        # Only Python's own writers raise `OSError`; those of safetensors and torch put it in words.
        words = (*(f"(os error {code})" for code in _FULL), "PytorchStreamWriter", "unexpected pos", "iostream error")
        full = error.errno in _FULL if isinstance(error, OSError) else any(word in str(error) for word in words)
        if not full:
            raise
        reason = str(error).partition("\n")[0]
        _exit(f"The disk or its quota is full ({reason}). Make room, and run the same command again.")


def _exit(message: str) -> NoReturn:
    if console.is_first_process():
        typer.echo("Error: " + " ".join(message.split()), err=True)
    raise typer.Exit(2) from None


def numbers(option: str, text: str, kind: type) -> list:
    """The numbers in `text`, separated by commas; a `ValueError` names the `option` where it holds others."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes numbers separated by commas, got '{text}'.") from None
