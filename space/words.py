"""Texts of the page. Does not know: what they stand beside."""

import html
import os
from pathlib import Path

from limits import FILE_TYPES, MAX_FILE_BYTES, cut
from pool import POOL


_SPACE = os.environ.get("SPACE_ID")
_PACKAGE = (
    f"<a href='https://huggingface.co/spaces/{_SPACE}/tree/main/longspark_hf'>longspark_hf</a>"
    if _SPACE
    else "longspark_hf"
)
_MODEL = "<a href='https://huggingface.co/{0}'>{0}</a>"

HEAD = f"""<div class="ls-head"><h1>LongSpark: the draft costs the same at any length</h1>
<p>Plain <code>generate</code> and <code>generate</code> with a LongSpark drafter answer the same prompt. At temperature 0 in float32 the
text is the same; in half precision a near-tie can end it otherwise, and sampled answers are two draws from one distribution. Watch
speed, accepted drafts and memory. Targets and drafters: {_MODEL.format("HuggingFaceTB/SmolLM2-135M-Instruct")},
{_MODEL.format("Hehy/LongSpark-Qwen3-4B")}, {_MODEL.format("Hehy/LongSpark-Qwen3-8B")}. Paper: LongSpark (2026). Package: {_PACKAGE}.</p>
</div>"""

HOW_IT_WORKS = f"""<div class="ls-how-text"><h2>How it works</h2>
<p>A small drafter proposes a few tokens, the target checks them all in one pass and keeps those it would have written itself, plus
one of its own. Other drafters keep a cache that grows with the prompt; this one reads the prompt through three views of fixed
size, taken from the target's own passes.</p>
{Path(__file__).with_name("how_it_works.svg").read_text(encoding="utf-8")}
<p>Paper: LongSpark (2026), whose drafters are published as {_MODEL.format("Hehy/LongSpark-Qwen3-8B")}. This page and {_PACKAGE} are an
independent implementation. A drafter pays when it is accepted often enough: with a target as small as SmolLM2-135M on a CPU, plain
<code>generate</code> is mostly faster, and the page says so.</p></div>"""


def status_html(device: str | None = None) -> str:
    """Loading, step by step; then what the numbers are measured on."""
    if POOL.error is not None:
        return f"<div class='ls-status' role='alert' data-kind='error'>The models could not be loaded: {html.escape(POOL.error)}</div>"
    if device is not None:
        return f"<div class='ls-status' role='status' data-kind='ready'>Ready. Measured here, now, on {html.escape(device)}.{_left_out()}</div>"
    done, total, now, seconds = POOL.progress()
    return (
        f"<div class='ls-status' role='status' data-kind='loading'><label>Loading models, step {min(done + 1, total)} of {total}: "
        f"{html.escape(now)} … {seconds:.0f} s <progress value='{done}' max='{total}'></progress></label></div>"
    )


def _left_out() -> str:
    reasons = "; ".join(f"{name} ({reason})" for name, reason in POOL.left_out.items())
    return f" Left out: {html.escape(reasons)}" if reasons else ""


def document_html(text: str = "", name: str = "") -> str:
    """Which document stands in front of the prompt."""
    if not text:
        return f"<p>No document. {', '.join(FILE_TYPES)} up to {MAX_FILE_BYTES // 2**20} MiB; in memory only, until an hour after the page is closed.</p>"
    size = f"{len(text):,} characters, about {len(text) // 4:,} tokens"
    return f"<p>Document: {html.escape(cut(name))}, {size}, in front of the prompt.</p>"


def notice(text: str, error: bool = False) -> str:
    """A line for the visitor."""
    kind = "role='alert' data-kind='error'" if error else "role='status' data-kind='note'"
    return f"<div class='ls-status' {kind}>{html.escape(text)}</div>"
