"""A stop that reaches model work wherever it runs. Does not know: what is stopped, or who asks for it."""

import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path


class Stopped(Exception):
    """Raised inside model work after a visitor pressed Stop."""


def _new_path() -> str:
    return str(Path(tempfile.gettempdir()) / f"longspark-stop-{uuid.uuid4().hex}")


@dataclass
class Stop:
    """
    One visitor's stop switch for one piece of work: a file that appears.

    A file and not a `threading.Event`, because ZeroGPU runs model work in a process of its own: the switch is pickled on
    the way there. The name cannot be guessed, so nobody stops the work of somebody else.
    """

    path: str = field(default_factory=_new_path)

    def set(self) -> None:
        Path(self.path).touch()

    def is_set(self) -> bool:
        return Path(self.path).exists()

    def check(self) -> None:
        """
        Raises:
            `Stopped`: if the switch is set.
        """
        if self.is_set():
            raise Stopped

    def clear(self) -> None:
        Path(self.path).unlink(missing_ok=True)
