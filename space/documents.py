"""Uploaded files as text: what is read, what is refused. Does not know: what the text is for."""

from pathlib import Path

from limits import FILE_TYPES, MAX_CHARACTERS, MAX_FILE_BYTES, MAX_PDF_PAGES, Refusal


def read_document(path: str | Path) -> str:
    """
    The text of an uploaded file.

    Args:
        path (`str` or `Path`): Where the server put it.

    Raises:
        `Refusal`: for a file that is too large, empty, of another type, or not what its name says.
    """
    path = Path(path)
    allowed = ", ".join(FILE_TYPES)
    if path.suffix.lower() not in FILE_TYPES:
        raise Refusal(f"{path.name} is of type '{path.suffix or 'none'}'; {allowed} can be read. Upload one of these.")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise Refusal(
            f"{path.name} has {size / 2**20:.1f} MiB; up to {MAX_FILE_BYTES // 2**20} MiB can be read. Upload a part of it."
        )
    text = _pdf_text(path) if path.suffix.lower() == ".pdf" else _plain_text(path)
    text = text.replace("\r\n", "\n").strip()
    if not text:
        hint = " A scanned PDF holds pictures of text: upload the text itself." if path.suffix == ".pdf" else ""
        raise Refusal(f"{path.name} has no text in it. Upload a file with some.{hint}")
    if len(text) > MAX_CHARACTERS:
        raise Refusal(
            f"{path.name} has {len(text):,} characters of text; up to {MAX_CHARACTERS:,} can be read. Upload a part of it."
        )
    return text


def _plain_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refusal(f"{path.name} is not UTF-8 text. Save it as UTF-8 and upload it again.") from error
    if "\0" in text:
        raise Refusal(f"{path.name} is a binary file under the name of a text. Upload the text itself.")
    return text


def _pdf_text(path: Path) -> str:
    from pypdf import PdfReader

    try:
        reader = PdfReader(path)
        num_pages = len(reader.pages)
        if num_pages <= MAX_PDF_PAGES:
            return "\n\n".join(page.extract_text() for page in reader.pages)
    except Exception as error:  # pypdf raises many kinds; all mean the same here
        raise Refusal(
            f"{path.name} cannot be read as a PDF ({type(error).__name__}). If it is protected or damaged, upload its "
            "text as .txt."
        ) from error
    raise Refusal(f"{path.name} has {num_pages} pages; up to {MAX_PDF_PAGES} can be read. Upload a part of it.")
