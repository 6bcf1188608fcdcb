"""A JSONL file that grows batch by batch and survives a kill at any moment.

Knows: what was committed, what a kill left torn, whether a run is resumed as it was begun.
Does not know: what the records mean.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class ResumableJsonl:
    r"""
    Records in one file and, beside it, a journal: the settings in its first line, then a line for every committed batch
    with the length of the file and whatever state its writer needs to go on.

    A batch is written to the file first and to the journal afterwards. What a kill leaves behind the last committed batch,
    whole lines or half ones, is cut off when the file is opened again, so a writer that makes the same batches again
    ends with the same file.

    Args:
        path (`str`): Of the records; the journal is `path` + `.journal`.
        settings (`dict`): What the records depend on. To be opened again only with the same.

    Raises:
        `ValueError`: if the file was begun with other settings, or was written or changed by something else, or cannot be
            written.

    Use as a context manager. `state` is that of the last committed batch, empty at the start.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]):
        self.path = Path(path)
        self.journal = self.path.with_name(self.path.name + ".journal")
        self.state: dict[str, Any] = {}
        self.num_bytes = 0
        settings = json.loads(json.dumps(settings))  # as it will be read again
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._records = self.path.open("ab")
            self._journal = self.journal.open("ab")
        except OSError as error:
            raise ValueError(f"Cannot write {error.filename}: {error.strerror}.") from error
        try:
            self._resume(settings)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "ResumableJsonl":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close both files."""
        self._records.close()
        self._journal.close()

    def records(self) -> Iterator[dict[str, Any]]:
        """The committed records."""
        with self.path.open("rb") as file:
            while file.tell() < self.num_bytes:
                yield json.loads(file.readline())

    def append(self, records: list[dict[str, Any]], state: dict[str, Any]) -> None:
        """
        Commit a batch.

        Args:
            records (`list[dict]`): One line each.
            state (`dict`): To be found in `state` when the file is opened again. `finished=True` seals the file.

        Raises:
            `ValueError`: if something else has written to the file meanwhile.
        """
        if os.fstat(self._records.fileno()).st_size != self.num_bytes:
            raise ValueError(
                f"Something else writes to {self.path}, perhaps the same command a second time. Stop one of them."
            )
        self._write(self._records, *records)
        self.num_bytes = os.fstat(self._records.fileno()).st_size
        self._write(self._journal, {"bytes": self.num_bytes, **state})
        self.state = state

    @staticmethod
    def _write(file: Any, *objects: dict[str, Any]) -> None:
        file.write(b"".join(json.dumps(o, ensure_ascii=False).encode() + b"\n" for o in objects))
        file.flush()
        os.fsync(file.fileno())  # the order of the two files must outlive a power cut as well

    def _resume(self, settings: dict[str, Any]) -> None:
        size = os.fstat(self._records.fileno()).st_size
        ends, entries = [], []
        with self.journal.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # else torn
                    ends.append(file.tell())
                    entries.append(self._parse(line))
        if not entries:
            if size:
                raise ValueError(
                    f"{self.path} exists, but not its journal {self.journal.name}, so what is done cannot be told. "
                    "Choose another output, or move the file away."
                )
            self._journal.truncate(0)
            self._write(self._journal, settings)
            return

        if entries[0] != settings:
            raise ValueError(self._difference(entries[0], settings))
        # A committed batch can miss in the file only if the file was cut by hand: then it is made again.
        last = max((i for i, entry in enumerate(entries) if entry.get("bytes", 0) <= size), default=0)
        if last:
            self.state = dict(entries[last])
            self.num_bytes = self.state.pop("bytes")
        with self.path.open("rb") as file:
            file.seek(max(self.num_bytes - 1, 0))
            if self.num_bytes and file.read(1) != b"\n":
                raise ValueError(f"{self.path} was changed by something else. Choose another output, or move it away.")
        self._journal.truncate(ends[last])
        if not self.state.get("finished"):  # lines that were added to a finished file are none of our business
            self._records.truncate(self.num_bytes)

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{self.journal} is damaged ({error}). Choose another output, or move both away."
            ) from error

    def _difference(self, begun: dict[str, Any], settings: dict[str, Any]) -> str:
        names = [n for n in {**begun, **settings} if begun.get(n) != settings.get(n)]
        changes = "; ".join(f"{n} was {begun.get(n)!r}, now {settings.get(n)!r}" for n in names)
        return (
            f"{self.path} was begun with other settings: {changes}. Go on with the old ones, or choose another output, or "
            f"delete it and {self.journal.name} to begin anew."
        )
