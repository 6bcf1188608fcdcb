"""The Space: see the speed and the memory of LongSpark, live. Layout and wiring only; what happens is in actions.py.

Run it with `make space`, or `python space/app.py`. In a Space the folder longspark_hf lies beside this file (`make space-folder`).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before gradio is imported: the page works without network
HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE):
    if (folder / "longspark_hf").is_dir() and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import hardware  # noqa: E402, I001  (before torch)
import gradio as gr  # noqa: E402
from actions import race_point, run_measure, run_race, run_sweep  # noqa: E402
from charts import COMMITTED_FOR, Committed, charts_html, has_committed  # noqa: E402
from documents import take_document  # noqa: E402
from endpoints import DOCUMENT_WORK, MODEL_WORK, add_endpoints  # noqa: E402
from limits import (  # noqa: E402
    CONTEXTS,
    MAX_BLOCK_SIZE,
    MAX_FILE_BYTES,
    MAX_NEW_TOKENS,
    MAX_QUEUE,
    Refusal,
    short_length,
)
from measuring import Measured, Point  # noqa: E402
from panes import LONGSPARK_NAME, PLAIN_NAME, pane_html, summary_html, waiting_panes  # noqa: E402
from pool import POOL  # noqa: E402
from prompts import EXAMPLES  # noqa: E402
from stopping import Stop, Stopped  # noqa: E402
from words import HEAD, HOW_IT_WORKS, document_html, notice, status_html  # noqa: E402

from longspark_hf import LongSparkDrafter  # noqa: E402


COMMITTED = Committed.read()
SYSTEM_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
THEME = gr.themes.Soft(
    primary_hue="orange", font=SYSTEM_FONTS, font_mono=["ui-monospace", "Consolas", "monospace"]
).set(  # the theme's own oranges and greys are too pale to read, and its borders too pale to see
    block_info_text_color="*neutral_600",
    block_info_text_color_dark="*neutral_300",
    block_title_text_color="*primary_800",
    block_title_text_color_dark="white",
    block_title_background_fill_dark="*primary_800",
    button_primary_background_fill="*primary_700",
    button_primary_background_fill_dark="*primary_700",
    button_primary_background_fill_hover="*primary_800",
    button_primary_background_fill_hover_dark="*primary_800",
    checkbox_label_background_fill_selected="*primary_700",
    checkbox_label_background_fill_selected_dark="*primary_700",
    button_border_width="1px",
    button_secondary_border_color="*neutral_500",
    button_secondary_border_color_hover="*neutral_700",
    input_border_width="1px",
    input_border_color="*neutral_500",
)
QUIET = {"api_visibility": "private", "show_progress": "hidden"}
AT_ONCE = QUIET | {"queue": False}
# What waits shows its place in the queue at one spot, which exists for that.
IN_QUEUE = MODEL_WORK | {"api_visibility": "private", "show_progress": "minimal"}
# Uploads are removed when they were read; this is for those that never are, as when a page is closed too early.
FORGET_FILES = (600, 600)
# Seconds that points and document of a page that stays open are kept; those of a closed one Gradio keeps for an hour.
# No page hears that its document is gone, so this is long; what limits memory is how many sessions are kept, the last used.
KEEP_STATES = 24 * 3600
MAX_SESSIONS = 256
# Switches of the page's works that have left the queue.
_RUNNING: set[str] = set()


def build_app() -> gr.Blocks:
    """The page and the named endpoints. Models are taken from `POOL` when something is asked for."""
    with gr.Blocks(title="LongSpark: speed and memory", analytics_enabled=False, delete_cache=FORGET_FILES) as app:
        points, document, stop_path = (gr.State(value, time_to_live=KEEP_STATES) for value in ([], "", ""))
        # A hidden component, not a state: that a state changed, a page only hears from events in the queue.
        withdrawn = gr.HTML("", visible="hidden")
        gr.HTML(HEAD)
        status, ticks = gr.HTML(status_html()), gr.Timer(0.5)

        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                prompt = gr.Textbox(EXAMPLES[0][1], label="Prompt", lines=3, max_lines=8, elem_id="prompt")
                with gr.Row():
                    examples = [
                        gr.Button(name, size="sm", min_width=90, elem_id=f"example-{i}")
                        for i, (name, *_) in enumerate(EXAMPLES)
                    ]
                with gr.Row():
                    race_button = gr.Button("Race", variant="primary", elem_id="race", interactive=False)
                    stop_button = gr.Button("Stop", variant="stop", elem_id="stop", interactive=False)
            with gr.Column(scale=2, min_width=320):
                context = gr.Radio(
                    [("as written", 0)],
                    value=0,
                    label="Context, tokens",
                    info="Fills up with your document, or with real Python sources, in front of the prompt.",
                    elem_id="context",
                )
                with gr.Row():
                    upload = gr.UploadButton("Upload a document", size="sm", elem_id="upload")
                    forget = gr.Button("Remove it", size="sm", elem_id="forget")
                about_document = gr.HTML(document_html(), elem_id="about-document")
        with gr.Accordion("Settings", open=False):
            with gr.Row():
                target = gr.Dropdown([], label="Target", elem_id="target")
                drafter = gr.Dropdown([], label="Drafter", elem_id="drafter")
            with gr.Row():
                temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature (0: greedy)", elem_id="temperature")
                max_new_tokens = gr.Slider(1, MAX_NEW_TOKENS, 96, step=1, label="New tokens", elem_id="new-tokens")
                block_size = gr.Slider(
                    0, MAX_BLOCK_SIZE, 0, step=1, label="Draft at most (0: no cap)", elem_id="block-size"
                )

        message = gr.HTML("", elem_id="message")
        place = gr.HTML("", elem_id="place")
        waiting = waiting_panes()
        summary = gr.HTML(waiting[0], elem_id="summary")
        with gr.Row(equal_height=True):
            with gr.Column(min_width=320):  # below each other on a phone
                plain_pane = gr.HTML(waiting[1], elem_id="plain")
            with gr.Column(min_width=320):
                longspark_pane = gr.HTML(waiting[2], elem_id="longspark")

        gr.HTML("<h2>Against context length</h2>")
        charts = gr.HTML(charts_html([], COMMITTED_FOR, COMMITTED), elem_id="charts")
        growing = gr.Checkbox(
            not has_committed(COMMITTED_FOR, COMMITTED),
            label="Measure the growing cache, too",
            info="If not, the charts show the committed sweep (thin lines), where there is one for this target.",
            elem_id="growing",
        )
        with gr.Row():
            measure_button = gr.Button("Measure at this context", elem_id="measure", interactive=False)
            sweep_button = gr.Button("Sweep all lengths", elem_id="sweep", interactive=False)
            cancel_button = gr.Button("Cancel", variant="stop", elem_id="cancel", interactive=False)
            clear_button = gr.Button("Clear points", elem_id="clear")
        progress = gr.HTML("", elem_id="progress")
        gr.HTML(HOW_IT_WORKS)

        starters, stoppers = [race_button, measure_button, sweep_button], [stop_button, cancel_button]
        buttons = [*starters, clear_button, *stoppers]  # see `_buttons`
        settings = [prompt, document, context, target, drafter, temperature, max_new_tokens, block_size]
        race_outputs = [message, summary, plain_pane, longspark_pane, charts, points]
        loading = [status, ticks, target, drafter, block_size, context, growing, *starters]

        app.load(_show_loading, None, loading, **AT_ONCE)
        ticks.tick(_show_loading, None, loading, **AT_ONCE)
        chosen_target = [drafter, block_size, context, growing, charts]
        target.change(_choose_target, [target, context, block_size, points], chosen_target, **AT_ONCE)
        drafter.change(_choose_drafter, [target, drafter, block_size], block_size, **AT_ONCE)
        for button, (_, text, length, tokens) in zip(examples, EXAMPLES):
            chosen = _example(text, length, tokens)
            button.click(chosen, [target], [prompt, context, max_new_tokens], **AT_ONCE)
        upload.upload(_read, upload, [document, about_document, message], **QUIET, **DOCUMENT_WORK)
        forgotten = [document, about_document, upload, message]
        forget.click(lambda: ("", document_html(), None, ""), None, forgotten, **AT_ONCE)
        clear_button.click(lambda name: ([], charts_html([], name, COMMITTED)), target, [points, charts], **AT_ONCE)

        runs = []
        works = [
            (race_button, _race, [*settings, points, stop_path], race_outputs),
            (
                measure_button,
                _measure,
                [target, drafter, context, growing, points, stop_path],
                [message, progress, charts, points],
            ),
            (
                sweep_button,
                _sweep,
                [target, drafter, growing, points, stop_path],
                [message, progress, charts, points],
            ),
        ]
        for button, work, inputs, outputs in works:
            begun = button.click(_begin, None, [stop_path, message, *buttons], **AT_ONCE)
            run = begun.then(work, inputs, outputs, show_progress_on=place, **IN_QUEUE)
            runs.append(run)
            run.failure(_failed, [stop_path, withdrawn], [message, *buttons], **AT_ONCE)
            run.then(_end, None, buttons, **AT_ONCE)  # not after a failure
        for button in stoppers:
            # Past the queue: in a full one, what runs could not be stopped, and what waits not be withdrawn.
            button.click(_stop, stop_path, [message, withdrawn, *buttons], **AT_ONCE)
        withdrawn.change(None, None, None, cancels=runs)
        add_endpoints()
    return app.queue(max_size=MAX_QUEUE, default_concurrency_limit=1)


def _show_loading() -> list[Any]:
    """Progress of loading; when it is done, what there is to choose from."""
    if not POOL.ready:
        return [status_html(), gr.Timer(active=POOL.error is None), *[gr.skip()] * 8]
    name, loaded = next(iter(POOL.targets.items()))
    drafter, *_ = loaded.drafters
    return [
        status_html(hardware.device_name()),
        gr.Timer(active=False),
        gr.Dropdown(list(POOL.targets), value=name),
        gr.Dropdown(list(loaded.drafters), value=drafter),
        _caps(loaded.drafters[drafter], 0),
        gr.Radio(_contexts(name)),
        gr.Checkbox(value=not has_committed(name, COMMITTED)),
        *[gr.Button(interactive=True)] * 3,
    ]


def _contexts(target: str) -> list[tuple[str, int]]:
    loaded, _ = POOL.get(target)
    ntk = {context: " (NTK)" if context > loaded.own_limit else "" for context in loaded.contexts()}
    return [("as written", 0), *((short_length(context) + note, context) for context, note in ntk.items())]


def _caps(drafter: LongSparkDrafter, chosen: int) -> gr.Slider:
    """Caps that make a difference: a drafter never proposes more than its own block."""
    own = drafter.config.block_size
    return gr.Slider(maximum=own, value=min(chosen, own))


def _choose_target(target: str, context: int, block_size: int, points: list[Point]) -> list[Any]:
    loaded, drafter = POOL.get(target)
    choices = _contexts(target)
    return [
        gr.Dropdown(list(loaded.drafters), value=next(iter(loaded.drafters))),
        _caps(drafter, block_size),
        gr.Radio(choices, value=context if context in dict(choices).values() else 0),
        gr.Checkbox(value=not has_committed(target, COMMITTED)),
        charts_html(points, target, COMMITTED),
    ]


def _choose_drafter(target: str, drafter: str, block_size: int) -> Any:
    try:
        return _caps(POOL.get(target, drafter)[1], block_size)
    except Refusal:  # the page is on its way to another target, and hears of that, too
        return gr.skip()


def _example(text: str, length: int, tokens: int) -> Any:
    def choose(target: str) -> tuple[str, int, int]:
        offered = [context for _, context in _contexts(target)] if POOL.ready else [0]
        return text, max(context for context in offered if context <= length), tokens

    return choose


def _read(file: str) -> list[Any]:
    try:
        text = take_document(file)
    except Refusal as refusal:
        return [gr.skip(), gr.skip(), notice(str(refusal), error=True)]
    return [text, document_html(text, Path(file).name), ""]


def _begin() -> list[Any]:
    """A stop switch for what begins now; no second start until it ends."""
    waiting = "Waiting for the device: one visitor's work runs at a time, and another visitor's may be ahead."
    return [Stop().path, notice(waiting), *_buttons(working=True)]


def _end() -> list[Any]:
    return _buttons(working=False)


def _buttons(working: bool) -> list[Any]:
    """Those that start, and Clear, as points on their way would bring cleared ones back; then those that stop."""
    return [*[gr.Button(interactive=not working)] * 4, *[gr.Button(interactive=working)] * 2]


def _failed(stop_path: str, withdrawn: str) -> list[Any]:
    if stop_path == withdrawn:  # to the page, what was cancelled has failed
        return [notice("Stopped before it began."), *_end()]
    text = "This did not run to its end: the queue is full, or something failed. Try again, or reload the page."
    return [notice(text, error=True), *_end()]


def _stop(stop_path: str) -> list[Any]:
    """What runs is told and ends by itself; what is still in the queue is withdrawn, whoever is before it."""
    if stop_path in _RUNNING:
        Stop(stop_path).set()
        return [notice("Stopping …"), *[gr.skip()] * 7]
    return [notice("Stopped before it began."), stop_path, *_end()]


@contextmanager
def _running(stop_path: str) -> Iterator[Stop]:
    """Around work of the page that has left the queue."""
    _RUNNING.add(stop_path)
    try:
        yield Stop(stop_path)
    finally:
        _RUNNING.discard(stop_path)
        Stop(stop_path).clear()


def _race(*values: Any) -> Iterator[list[Any]]:
    *settings, points, stop_path = values
    target = settings[3]
    try:
        with _running(stop_path) as stop:
            for view in run_race(*settings, stop):
                panes = pane_html(PLAIN_NAME, view.plain), pane_html(LONGSPARK_NAME, view.longspark, view)
                if not view.finished:
                    yield ["", summary_html(view), *panes, gr.skip(), gr.skip()]
        point = race_point(view, target)
        points = [*points, point] if point else points
        yield ["", summary_html(view), *panes, charts_html(points, target, COMMITTED), points]
    except Stopped:
        yield [notice("Stopped before it began."), *[gr.skip()] * 5]
    except Refusal as refusal:
        yield [notice(str(refusal), error=True), *[gr.skip()] * 5]


def _measure(
    target: str, drafter: str, context: int, growing: bool, points: list[Point], stop_path: str
) -> Iterator[list[Any]]:
    note = "" if context else " “As written” is no length, so this was 1K: choose a context for another."
    with _running(stop_path) as stop:
        measuring = run_measure(target, drafter, context or CONTEXTS[0], growing, stop)
        yield from _fill_charts(measuring, target, points, note)


def _sweep(target: str, drafter: str, growing: bool, points: list[Point], stop_path: str) -> Iterator[list[Any]]:
    with _running(stop_path) as stop:
        yield from _fill_charts(run_sweep(target, drafter, growing, stop), target, points)


def _fill_charts(
    measuring: Iterator[Measured], target: str, points: list[Point], note: str = ""
) -> Iterator[list[Any]]:
    found: list[Point] = []
    try:
        for measured in measuring:
            bar = (
                f"<label>{short_length(measured.context)} tokens, pass {measured.done} of {measured.total} "
                f"<progress value='{measured.done}' max='{measured.total}'></progress></label>"
            )
            if len(measured.points) > len(found):
                found = list(measured.points)
                yield ["", bar, charts_html(points + found, target, COMMITTED), points + found]
            else:
                yield ["", bar, gr.skip(), gr.skip()]
        yield ["", f"{len(found)} points measured.{note}", gr.skip(), gr.skip()]
    except Stopped:
        yield ["", f"Cancelled; {len(found)} points were measured and stay.", gr.skip(), gr.skip()]
    except Refusal as refusal:
        yield [notice(str(refusal), error=True), "", gr.skip(), gr.skip()]


def main(app: gr.Blocks | None = None, **options: Any) -> Any:
    """
    Start loading and serve.

    Args:
        app (`gr.Blocks`, *optional*): From [`build_app`].
        options: For `launch`.
    """
    defaults = {
        "theme": THEME,
        "css_paths": HERE / "style.css",
        "max_file_size": MAX_FILE_BYTES,
        "state_session_capacity": MAX_SESSIONS,
        "footer_links": ["api", "settings"],
        "show_error": True,
        "ssr_mode": False,
        "quiet": False,
    }
    if not POOL.ready:
        POOL.load_in_background()
    return (app or build_app()).launch(**(defaults | options))


if __name__ == "__main__":
    main()
