"""Uploaded files as text: what is read, what is refused. Does not know: what the text is for."""

import time
from pathlib import Path
from typing import Any

from limits import (
    FILE_TYPES,
    MAX_CHARACTERS,
    MAX_FILE_BYTES,
    MAX_PDF_PAGES,
    MAX_PDF_SECONDS,
    Refusal,
    cut,
    shown,
)


def take_document(path: Any) -> str:
    """
    [`read_document`] of an upload, which is off the disk afterwards, read or refused: Gradio would keep and serve it.

    Raises:
        `Refusal`: see [`read_document`].
    """
    try:
        return read_document(path)
    finally:
        if isinstance(path, str) and Path(path).is_file():
            Path(path).unlink(missing_ok=True)


def read_document(path: str | Path) -> str:
    """
    The text of an uploaded file.

    Args:
        path (`str` or `Path`): Where the server put it.

    Raises:
        `Refusal`: for a file that is too large, empty, of another type, or not what its name says.
    """
    if not isinstance(path, (str, Path)):
        raise Refusal(f"The file is {shown(path)}; one uploaded file is read at a time. Upload one.")
    path = Path(path)
    name, kind, allowed = cut(path.name), path.suffix.lower(), ", ".join(FILE_TYPES)
    if kind not in FILE_TYPES:
        raise Refusal(f"{name} is of type '{cut(path.suffix) or 'none'}'; {allowed} can be read. Upload one of these.")
    # Another visitor's upload of the very same file has the same place, and may have been read and removed first.
    if not path.is_file():
        raise Refusal(f"{name} did not arrive. Upload it again.")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise Refusal(
            f"{name} has {size / 2**20:.1f} MiB; up to {MAX_FILE_BYTES // 2**20} MiB can be read. Upload a part of it."
        )
    text = _pdf_text(path, name) if kind == ".pdf" else _plain_text(path, name)
    text = text.replace("\r\n", "\n").strip()
    if not text:
        hint = " A scanned PDF holds pictures of text: upload the text itself." if kind == ".pdf" else ""
        raise Refusal(f"{name} has no text in it. Upload a file with some.{hint}")
    if len(text) > MAX_CHARACTERS:
        raise Refusal(
            f"{name} has more than {MAX_CHARACTERS:,} characters of text, the most that can be read. Upload a part of it."
        )
    return text


def _plain_text(path: Path, name: str) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refusal(f"{name} is not UTF-8 text. Save it as UTF-8 and upload it again.") from error
    if "\0" in text:
        raise Refusal(f"{name} is a binary file under the name of a text. Upload the text itself.")
    return text


def _pdf_text(path: Path, name: str) -> str:
    from pypdf import PdfReader

    deadline = time.monotonic() + MAX_PDF_SECONDS

    def look_at_the_clock(*_: Any) -> None:  # before every operation of a page: one page can be work for hours
        if time.monotonic() > deadline:
            raise Refusal(
                f"{name} takes longer than {MAX_PDF_SECONDS} seconds to read, the most there is for a PDF. Upload its text "
                "as .txt."
            )

    try:
        reader = PdfReader(path)
        num_pages = len(reader.pages)
        if num_pages > MAX_PDF_PAGES:
            raise Refusal(f"{name} has {num_pages} pages; up to {MAX_PDF_PAGES} can be read. Upload a part of it.")
        texts, length = [], 0
        for page in reader.pages:
            texts.append(page.extract_text(visitor_operand_before=look_at_the_clock))
            look_at_the_clock()  # pypdf goes on after an error within a picture or form
            length += len(texts[-1])
            if length > MAX_CHARACTERS:  # enough to be refused
                break
    except Refusal:
        raise
    except Exception as error:  # pypdf raises many kinds; all mean the same here
        raise Refusal(
            f"{name} cannot be read as a PDF ({type(error).__name__}). If it is protected or damaged, upload its text as "
            ".txt."
        ) from error
    return "\n\n".join(texts)
