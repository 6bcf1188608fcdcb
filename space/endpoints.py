"""The named endpoints for `gradio_client`, documented in README.md. Does not know: the page (app)."""

from collections.abc import Iterator

import gradio as gr
from actions import point_values, race_values, run_measure, run_race, run_sweep, server_limits
from documents import take_document
from limits import Refusal
from measuring import Measured
from stopping import Stop, Stopped


# One at a time on the device, with a queue in front, shared by the page and all clients.
MODEL_WORK = {"concurrency_limit": 1, "concurrency_id": "models"}
# Unpacking a document takes memory and time of its own: one at a time, too, beside the models.
DOCUMENT_WORK = {"concurrency_limit": 1, "concurrency_id": "documents"}


def race(
    prompt: str,
    context: int = 0,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    block_size: int = 0,
    document: str = "",
    target: str = "",
    drafter: str = "",
) -> Iterator[dict]:
    """Plain `generate` against `generate` with a drafter. Every yield has all values so far; the last is finished."""
    stop = Stop()
    view = None
    try:
        for view in run_race(
            prompt, document, context, target, drafter, temperature, max_new_tokens, block_size, stop
        ):
            if not view.finished:
                yield race_values(view)
        yield race_values(view)
    except Refusal as refusal:
        raise gr.Error(str(refusal), print_exception=False) from None
    finally:
        stop.clear()


def measure(context: int = 8192, growing: bool = True, target: str = "", drafter: str = "") -> Iterator[list]:
    """
    Draft time and state at one context length: LongSpark, and with `growing` the DFlash drafter of the same shape.

    Every yield has the points so far, so that it ends when its client is gone.
    """
    stop = Stop()
    for values in _points(run_measure(target, drafter, context, growing, stop), stop):
        yield values["points"]


def sweep(growing: bool = True, target: str = "", drafter: str = "") -> Iterator[dict]:
    """The same at all lengths that fit. Every yield has the passes done, their number, and the points so far."""
    stop = Stop()
    yield from _points(run_sweep(target, drafter, growing, stop), stop)


def _points(measuring: Iterator[Measured], stop: Stop) -> Iterator[dict]:
    try:
        for measured in measuring:
            yield {"done": measured.done, "total": measured.total, "points": point_values(measured.points)}
    except (Refusal, Stopped) as refusal:
        raise gr.Error(str(refusal), print_exception=False) from None
    finally:
        stop.clear()


def read_file(file: str) -> str:
    """The text of an uploaded .txt, .md, .py or .pdf, as `race` takes it for `document`."""
    try:
        return take_document(file)
    except Refusal as refusal:
        raise gr.Error(str(refusal), print_exception=False) from None


def add_endpoints() -> None:
    """Inside `gr.Blocks`: offer the endpoints."""
    gr.api(race, api_name="race", **MODEL_WORK)
    gr.api(measure, api_name="measure", **MODEL_WORK)
    gr.api(sweep, api_name="sweep", **MODEL_WORK)
    gr.api(server_limits, api_name="limits", queue=False)
    # Files come through components only; these are not on the page.
    file, text = gr.File(label="file", visible=False), gr.Textbox(label="text", visible=False)
    file.upload(read_file, file, text, api_name="read_document", **DOCUMENT_WORK)
