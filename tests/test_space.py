"""The Space without a browser: numbers, refusals, stopping, memory and visitors, on tiny models."""

import contextlib
import io
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest
import torch


pytest.importorskip("gradio", reason="the Space needs gradio: pip install longspark-hf[space]")

from .browser.scripted import DRAFTER, NAME, NEW_TOKENS, PDF, PROMPT, RANDOM, SPACE  # noqa: E402, I001
from .browser.scripted import FailingDrafter, byte_tokenizer, fill_pool, run, scripted_target  # noqa: E402
from .targets import left_on  # noqa: E402

import httpx  # noqa: E402
import actions  # noqa: E402
import app  # noqa: E402
import documents  # noqa: E402
import endpoints  # noqa: E402
from baton import Baton  # noqa: E402
from charts import COMMITTED_FOR, Committed, charts_html, has_committed  # noqa: E402
from documents import read_document, take_document  # noqa: E402
from limits import MAX_CHARACTERS, MAX_FILE_BYTES, MAX_QUEUE, Refusal  # noqa: E402
from measuring import PASSES, Point, measure  # noqa: E402
from panes import pane_html, summary_html, waiting_panes  # noqa: E402
from pieces import Pieces  # noqa: E402
from pool import CATALOGUE, POOL, Pool, own_copy, wanted_targets  # noqa: E402
from prompts import build_prompt  # noqa: E402
from racing import LaneView, RaceView, _take_stats  # noqa: E402
from stopping import Stop, Stopped  # noqa: E402
from words import document_html, status_html  # noqa: E402

from longspark_hf.stats_longspark import LongSparkStats  # noqa: E402


@pytest.fixture(autouse=True)
def pool():
    yield POOL
    POOL.targets.clear()
    POOL.left_out.clear()
    POOL.ready, POOL.error = False, None


@pytest.mark.parametrize("wrong_at, tau", [([0], 1.0), ([2], 3.0), ([3], 4.0), ([1, 3], 3.0)])
def test_the_page_shows_exactly_the_scripted_acceptance_and_state(wrong_at, tau):
    loaded = scripted_target(wrong_at)
    fill_pool(loaded)
    view = run()
    drafter = loaded.drafters[DRAFTER]
    state = drafter.config.state_bytes(torch.float32)

    assert view.finished and view.identical
    assert view.longspark.tau == tau
    assert view.longspark.rounds == (NEW_TOKENS - 1) / tau
    assert view.state_bytes == state
    assert 0 < view.draft_ms < view.verify_ms  # the script costs nothing, and turns of the other lane do not count
    origins = [origin for _, origin in view.longspark.pieces]
    assert origins.count("draft") == sum(view.longspark.accepted_by_position) == NEW_TOKENS - 1 - view.longspark.rounds
    assert origins.count("first") == 1 and origins.count("target") == view.longspark.rounds
    page = summary_html(view) + pane_html("LongSpark", view.longspark, view)
    assert f"data-figure='tau' title='mean tokens committed per verification'>{tau:.2f}<" in page
    assert f"data-value='{state}'>{state:,}<" in page
    point = actions.race_point(view, NAME)
    assert (point.context, point.state_bytes) == (7 + NEW_TOKENS, state)
    assert point.target_bytes == (7 + NEW_TOKENS - 1) * loaded.row_bytes  # the newest token is not cached yet


def test_both_lanes_say_what_plain_generate_says():
    loaded = scripted_target([1])
    fill_pool(loaded)
    view = run(block_size=1)
    ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = loaded.model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
    assert view.plain.ids == view.longspark.ids == expected
    assert view.longspark.tau == 2.0 and sum(view.longspark.accepted_by_position[1:]) == 0  # the cap holds


def test_draft_time_is_of_rounds_that_drafted():
    view = RaceView(LaneView(), LaneView(seconds=1.0, prefill_seconds=0.2), "plain", 7, 0.0, 4)
    _take_stats(view, 0, 3, 0.3, LongSparkStats(rounds=4, tokens=9))
    assert view.draft_ms == pytest.approx(100) and view.verify_ms == pytest.approx(125)


def test_a_draft_that_ends_the_answer_is_coloured_as_one():
    loaded = scripted_target()
    fill_pool(loaded)
    ids = run().plain.ids
    last = next(i for i in range(2, loaded.drafters[DRAFTER].config.block_size) if ids[i] not in ids[:i])
    loaded.model.generation_config.eos_token_id = ids[last]
    view = run()
    assert view.longspark.ids == view.plain.ids == ids[: last + 1]
    assert [origin for _, origin in view.longspark.pieces] == ["first"] + ["draft"] * last
    assert sum(view.longspark.accepted_by_position) == last


def test_a_cap_beyond_the_drafters_block_is_that_block():
    loaded = scripted_target()
    fill_pool(loaded)
    own = loaded.drafters[DRAFTER].config.block_size
    view = run(block_size=16)
    assert view.block_size == own < 16
    assert f"axis 0 to {own + 1}" in pane_html("LongSpark", view.longspark, view)
    caps = app._choose_drafter(NAME, RANDOM, 16)
    assert (caps.maximum, caps.value) == (own, own)
    assert app._choose_target(NAME, 0, 16, [])[1].maximum == app._show_loading()[4].maximum == own


def test_a_difference_is_put_down_to_half_precision_only_where_it_was_used():
    view = RaceView(LaneView(), LaneView(), "plain", 7, 0.0, 4, identical=False, first_difference=3)
    assert "In float32 this is rare" in summary_html(view) and "half precision" not in summary_html(view)
    view.dtype = "bfloat16"
    assert "In half precision (bfloat16)" in summary_html(view)
    assert "At temperature 0 in float32" in " ".join(app.HEAD.split())


def test_the_page_says_how_long_the_prompt_is_and_what_was_cut_or_added():
    fill_pool(scripted_target())
    for document, origin in (("", "sources of Python"), ("w1 w2 " * 5000, "your document, cut")):
        view = run(document=document, context=512)
        assert f"Prompt: {view.prompt_tokens:,} tokens ({origin}" in summary_html(view)
        assert origin in actions.race_values(view)["prompt_origin"]
    assert "Prompt: 7 tokens (your prompt)" in summary_html(run())


def test_where_nothing_was_drafted_there_is_no_draft_time_and_no_point():
    fill_pool(scripted_target())
    view = run(new_tokens=2)  # one round, with room for the target's own token only
    assert view.longspark.rounds == 1 and view.draft_ms is actions.race_point(view, NAME) is None
    assert "A round: no draft, verification" in pane_html("LongSpark", view.longspark, view)


def test_sampling_is_not_called_identical():
    fill_pool(scripted_target())
    view = run(temperature=1.0)
    assert view.finished and view.identical is None and "sampled" in summary_html(view)


def test_lanes_begin_turn_about():
    fill_pool(scripted_target())
    assert {run().first, run().first} == {"plain", "longspark"}


def test_a_clock_runs_in_its_own_turns_only():
    baton, took = Baton(["slow", "fast"]), {"slow": 0.02, "fast": 0.004}
    gaps = []

    def lane(name, steps):
        for _ in range(steps):
            baton.take(name)
            time.sleep(took[name])
            baton.put_down(name)
            gaps.append(abs(baton.seconds["slow"] - baton.seconds["fast"]))
        baton.leave(name)

    with ThreadPoolExecutor(2) as threads:
        start = time.perf_counter()
        list(threads.map(lane, ["slow", "fast"], [5, 25]))
        elapsed = time.perf_counter() - start
    assert sum(baton.seconds.values()) <= elapsed
    assert baton.seconds["slow"] >= 5 * 0.02 and baton.seconds["fast"] >= 25 * 0.004
    assert sorted(gaps)[len(gaps) // 2] < 0.03  # side by side, a step apart


def test_a_clock_shows_the_turn_that_goes_on():
    baton = Baton(["lane"])
    baton.take("lane")
    time.sleep(0.02)
    assert baton.elapsed("lane") >= 0.02 and baton.seconds["lane"] == 0


NO_LENGTHS = ["abc", float("nan"), float("inf"), [1], [], {}, True, None, 1.5, -1]
REFUSED = {
    "empty": ({"prompt": " \n"}, "empty.*Write a question"),
    "too many characters": ({"prompt": "w" * (MAX_CHARACTERS + 1)}, "1,500,001 characters; up to 1,500,000"),
    "too many tokens": ({"prompt": "w1 " * 5000}, "5,000 tokens.*up to 4,096 here. Shorten the prompt"),
    "no room for the prompt": ({"prompt": "w1 " * 600, "context": 512}, "alone has 60. tokens.*longer context"),
    "context": ({"context": 10**6}, "context is 1000000; it can be 256 to 4,096"),
    "new tokens": ({"new_tokens": 10**6}, "new tokens is 1000000; it can be 1 to 256"),
    "no new tokens": ({"new_tokens": 0}, "new tokens is 0"),
    "temperature": ({"temperature": -1}, "temperature is -1; it can be 0 to 2"),
    "temperature of another kind": ({"temperature": "hot"}, "temperature is 'hot'"),
    "temperature that overflows": ({"temperature": 1e-40}, "1e-40; it can be 0 .greedy., or 0.01 to 2"),
    "temperature not a number": ({"temperature": float("nan")}, "temperature is nan"),
    "half a token": ({"new_tokens": 1.5}, "new tokens is 1.5; it has to be a whole number"),
    "half a character": ({"prompt": "ab\ud800"}, "prompt has half a character at position 3"),
    "half a character in a name": ({"target": "\ud800"}, "name of the target has half a character"),
    "a list of targets": ({"target": ["a"]}, r"name of the target is \['a'\]; it has to be a text"),
    "a long name": ({"target": "x" * 10**6}, "no target 'x{30,60}[.]{3}x{30,60}' here"),
    **{f"prompt {x}": ({"prompt": x}, "The prompt is .*has to be a text") for x in (5, None, ["x"])},
    **{f"document {x}": ({"document": x}, "The document is .*has to be a text") for x in (3, None, ["x"])},
    **{f"context {x}": ({"context": x}, "The context is .*; it") for x in NO_LENGTHS},
    "block size": ({"block_size": -3}, "cap on the draft is -3"),
    "target": ({"target": "gpt"}, "no target 'gpt' here. Choose one of: tiny"),
    "drafter": ({"drafter": "other"}, "no drafter 'other' for tiny. Choose one of: scripted, random"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_what_is_not_accepted_is_refused_with_what_is(arguments, message):
    fill_pool(scripted_target())
    with pytest.raises(Refusal, match=message):
        run(**arguments)


def test_before_the_models_are_loaded_a_call_says_so():
    with pytest.raises(Refusal, match="still being loaded .step 1 of .* Try again"):
        run()


@pytest.mark.parametrize("document, origin", [("", "sources of Python"), ("w1 w2 w3", "your document and sources")])
def test_a_prompt_is_filled_up_to_the_context_with_room_for_the_answer(document, origin):
    loaded = scripted_target()
    built = build_prompt(loaded, PROMPT, document, 512, 40)
    assert 512 - 40 - 4 <= len(built.ids) <= 512 - 40 and origin in built.origin
    assert loaded.tokenizer.decode(built.ids).endswith(PROMPT)


def test_a_long_document_is_cut_to_the_context():
    built = build_prompt(scripted_target(), PROMPT, "w1 w2 " * 5000, 512, 40)
    assert len(built.ids) == 512 - 40 and "cut" in built.origin


@pytest.mark.parametrize("new_tokens", [60, 61, 62])
def test_a_chosen_context_is_served_wherever_it_cuts_the_document(new_tokens):
    loaded = scripted_target()
    loaded.tokenizer = byte_tokenizer()  # three tokens a snowman; a part of one comes back as three
    limit = loaded.max_context
    built = build_prompt(loaded, "What?", "☃" * limit, limit, new_tokens)
    assert limit - new_tokens - 4 <= len(built.ids) <= limit - new_tokens
    assert loaded.tokenizer.decode(built.ids).endswith("What?")


@pytest.fixture
def catalogue(tmp_path, monkeypatch):
    """Two tiny targets with their drafters in folders, and one that is not there, as all that the pool knows."""
    entries = {}
    for name in ("other", "smollm2"):
        loaded = scripted_target()
        target, drafter = str(tmp_path / f"{name}-target"), str(tmp_path / f"{name}-drafter")
        loaded.model.save_pretrained(target)
        loaded.tokenizer.save_pretrained(target)
        loaded.drafters[RANDOM].save_pretrained(drafter)
        entries[name] = (target, drafter)
    entries["missing"] = (str(tmp_path / "missing"), entries["other"][1])
    monkeypatch.setattr("pool.CATALOGUE", entries)
    monkeypatch.delenv("LONGSPARK_TARGETS", raising=False)
    return entries


@pytest.mark.parametrize(
    "asked, loaded, left_out",
    [
        (None, ["smollm2-target"], {}),
        ("other, smollm2", ["other-target", "smollm2-target"], {}),
        ("missing,smollm2", ["smollm2-target"], {"missing": "missing"}),
        ("smollm2,missing", ["smollm2-target"], {"missing": "missing"}),
    ],
)
def test_targets_that_can_be_loaded_serve_whatever_becomes_of_others(catalogue, monkeypatch, asked, loaded, left_out):
    if asked is not None:
        monkeypatch.setenv("LONGSPARK_TARGETS", asked)
    pool = Pool()
    pool.load()
    assert pool.ready and pool.error is None and list(pool.targets) == loaded
    assert pool.left_out.keys() == left_out.keys() and all(left_out[name] in pool.left_out[name] for name in left_out)
    target, drafter = pool.get()
    assert target.name == loaded[0] and drafter.config.block_size > 0


def test_a_target_without_memory_is_left_out(catalogue, monkeypatch):
    import pool as module

    def load_target(name, dtype):
        if name == catalogue["other"][0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return module_load_target(name, dtype)

    module_load_target = module.load_target
    monkeypatch.setattr(module, "load_target", load_target)
    monkeypatch.setenv("LONGSPARK_TARGETS", "other,smollm2")
    pool = Pool()
    pool.load()
    assert list(pool.targets) == ["smollm2-target"] and pool.left_out == {"other": "not enough memory"}


def test_where_nothing_can_be_loaded_the_page_says_why(catalogue, monkeypatch):
    monkeypatch.setenv("LONGSPARK_TARGETS", "missing")
    pool = Pool()
    with pytest.raises(ValueError, match="missing: "):
        pool.load()
    assert not pool.ready
    with pytest.raises(Refusal, match="could not be loaded: missing: "):
        pool.get()


def test_which_targets_are_loaded(monkeypatch):
    monkeypatch.delenv("LONGSPARK_TARGETS", raising=False)
    assert wanted_targets("cuda") == list(CATALOGUE) and wanted_targets("cpu") == ["smollm2"]
    monkeypatch.setenv("LONGSPARK_TARGETS", "qwen3-8b, smollm2")
    assert wanted_targets("cuda") == wanted_targets("cpu") == ["qwen3-8b", "smollm2"]
    monkeypatch.setenv("LONGSPARK_TARGETS", "gpt")
    with pytest.raises(ValueError, match=r"LONGSPARK_TARGETS names \['gpt'\]; it takes qwen3-4b, qwen3-8b, smollm2"):
        wanted_targets("cpu")


def test_what_was_left_out_is_shown():
    POOL.left_out["qwen3-4b"] = "no <network>"
    assert "Left out: qwen3-4b (no &lt;network&gt;)" in status_html("a CPU")
    assert actions.server_limits()["left_out"] == {"qwen3-4b": "no <network>"}


@pytest.mark.parametrize("context", [*NO_LENGTHS, 0, 131073])
def test_a_measurement_is_of_one_length(context):
    fill_pool(scripted_target())
    with pytest.raises(Refusal, match="The context is .*; it"):
        next(actions.run_measure(NAME, RANDOM, context, True, Stop()))


@pytest.mark.parametrize("growing", [-1, 0, 1, 10**9, "x", [], None])
def test_growing_is_true_or_false_and_nothing_to_calculate_with(growing):
    fill_pool(scripted_target())
    asked = {"target": NAME, "drafter": RANDOM, "growing": growing, "stop": Stop()}
    for begun in (actions.run_measure(context=1024, **asked), actions.run_sweep(**asked)):
        with pytest.raises(Refusal, match="`growing` is .*; it can be true or false"):
            next(begun)


@pytest.mark.parametrize(
    "name, data, text",
    [
        ("a.txt", b"plain\r\ntext\n", "plain\ntext"),
        ("a.MD", "\ufeff# Straße".encode(), "# Straße"),
        ("a.py", b"x = 1\n", "x = 1"),
        ("a.pdf", PDF, "A glacier flows."),
    ],
)
def test_documents_are_read_as_text(tmp_path, name, data, text):
    (tmp_path / name).write_bytes(data)
    assert read_document(tmp_path / name) == text


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("a.exe", b"text", r"a.exe is of type '.exe'; .txt, .md, .py, .pdf can be read"),
        ("a", b"text", "type 'none'"),
        ("a.txt", b"x" * (MAX_FILE_BYTES + 1), "up to 2 MiB can be read"),
        ("a.txt", b" \n", "no text in it"),
        ("a.txt", b"\xff\xfe\xfa", "not UTF-8"),
        ("a.py", b"MZ\0\0", "binary file"),
        ("a.pdf", b"not a pdf", "cannot be read as a PDF"),
        ("a.txt", b"x" * (MAX_CHARACTERS + 1), "more than 1,500,000 characters"),
    ],
)
def test_bad_documents_are_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(Refusal, match=message):
        read_document(tmp_path / name)


@pytest.mark.parametrize(
    "limit, value, message, pages_read",
    [
        ("MAX_PDF_PAGES", 2, "has 3 pages; up to 2", 0),
        ("MAX_PDF_SECONDS", -1, "takes longer than -1 seconds", 1),
        ("MAX_CHARACTERS", 20, "more than 20 characters", 2),
    ],
)
def test_a_pdf_is_not_read_further_than_it_is_accepted(tmp_path, monkeypatch, limit, value, message, pages_read):
    from pypdf import PageObject, PdfWriter

    writer, read, extract = PdfWriter(), [], PageObject.extract_text
    for _ in range(3):
        writer.append(io.BytesIO(PDF))
    writer.write(tmp_path / "a.pdf")
    monkeypatch.setattr(documents, limit, value)
    monkeypatch.setattr(PageObject, "extract_text", lambda page, **how: read.append(page) or extract(page, **how))
    with pytest.raises(Refusal, match=message):
        read_document(tmp_path / "a.pdf")
    assert len(read) == pages_read


def test_uploads_are_removed_when_they_were_read_or_refused(tmp_path):
    for nothing in (None, 3, ["x"]):
        with pytest.raises(Refusal, match="The file is .*Upload one"):
            take_document(nothing)
    for reader in (app._read, endpoints.read_file):
        for path in (tmp_path / "a.md", tmp_path / "a.gif"):
            path.write_text("text")
            with contextlib.suppress(app.gr.Error):
                reader(str(path))
            assert not path.exists()
    assert app.build_app().delete_cache == (600, 600)


def test_the_page_names_the_document_and_the_lanes():
    shown = document_html("text", "<b>" + "n" * 500)
    assert "Document: &lt;b&gt;n" in shown and len(shown) < 250
    assert [re.findall("<h3>(.*)</h3>", pane) for pane in waiting_panes()] == [[], ["plain generate"], ["LongSpark"]]


def test_stop_withdraws_what_waits_and_tells_what_runs():
    stop = Stop()
    _, withdrawn, *buttons = app._stop(stop.path)
    assert withdrawn == stop.path and not stop.is_set()
    assert [button.interactive for button in buttons] == [True] * 4 + [False] * 2
    with app._running(stop.path):
        assert app._stop(stop.path)[1] != stop.path and stop.is_set()
    assert not stop.is_set()
    fns = app.build_app().fns.values()
    assert [fn.queue for fn in fns if fn.name == "_stop"] == [False] * 2
    assert [len(fn.cancels) for fn in fns if fn.cancels] == [3]
    assert [fn.concurrency_limit for fn in fns if fn.concurrency_id == "documents"] == [1, 1]  # one is read at a time


def test_nothing_is_cleared_while_points_are_on_their_way():
    page = app.build_app()
    clear = next(block for block in page.blocks.values() if block.elem_id == "clear")
    assert [button.interactive for button in app._begin()[2:]] == [False] * 4 + [True] * 2
    for work in ("_begin", "_end", "_failed"):
        wired = [fn.outputs[-6:] for fn in page.fns.values() if fn.name == work]
        assert len(wired) == 3 and all(outputs[3] is clear for outputs in wired)


def test_what_failed_or_was_refused_can_be_tried_again():
    for withdrawn in ("this", "another"):
        _, *buttons = app._failed("this", withdrawn)
        assert [button.interactive for button in buttons] == [True] * 4 + [False] * 2


def test_the_growing_cache_is_measured_when_asked():
    fill_pool(scripted_target())
    for growing, methods in ((False, ["longspark"]), (True, ["longspark", "dflash"])):
        for work in (
            app._measure(NAME, RANDOM, 1024, growing, [], Stop().path),
            app._sweep(NAME, RANDOM, growing, [], Stop().path),
        ):
            found = next(points for *_, points in work if isinstance(points, list))
            work.close()
            assert list(dict.fromkeys(point.method for point in found)) == methods
    assert app._choose_target(NAME, 0, 0, [])[3].value is app._show_loading()[6].value is True
    assert has_committed(COMMITTED_FOR, Committed.read()) and not has_committed(NAME, Committed.read())
    box = next(block for block in app.build_app().blocks.values() if block.elem_id == "growing")
    assert box.value is False and box.label


def test_what_visitors_left_is_not_kept_for_ever(monkeypatch):
    states = [block for block in app.build_app().blocks.values() if isinstance(block, app.gr.State)]
    assert [state.time_to_live for state in states] == [app.KEEP_STATES] * 3
    fill_pool(scripted_target())
    monkeypatch.setattr(app.gr.Blocks, "launch", lambda self, **options: options)
    assert app.main()["state_session_capacity"] == app.MAX_SESSIONS <= 256


def test_a_measurement_ends_when_its_client_leaves():
    fill_pool(scripted_target())
    points = endpoints.measure(1024, drafter=RANDOM)
    assert next(points) == []
    points.close()
    assert [point["method"] for point in list(endpoints.measure(1024, drafter=RANDOM))[-1]] == ["longspark", "dflash"]


def test_a_race_stops_in_the_middle_of_a_round_and_leaves_nothing():
    loaded = scripted_target([2], FailingDrafter)
    fill_pool(loaded)
    stop = Stop()
    loaded.drafters[DRAFTER].act = stop.set  # within the draft of the second round: the verification must not run
    view = run(stop)
    assert view.stopped and view.finished and view.longspark.phase == view.plain.phase == "stopped"
    assert len(view.longspark.ids) == 1 + 3 and view.draft_ms is None
    assert actions.race_point(view, NAME) is None
    assert left_on(loaded.model) == [] and not stop.is_set()
    loaded.drafters[DRAFTER].act = None
    assert run().identical


def test_a_race_stopped_in_the_queue_does_not_begin():
    fill_pool(scripted_target())
    stop = Stop()
    stop.set()
    with pytest.raises(Stopped):
        run(stop)


def test_a_race_ends_when_its_visitor_leaves():
    fill_pool(scripted_target())
    stop = Stop()
    views = actions.run_race(PROMPT, "", 0, NAME, DRAFTER, 0.0, NEW_TOKENS, 0, stop)
    next(views)
    views.close()
    stop.clear()
    assert left_on(POOL.targets[NAME].model) == []
    assert run().identical


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
    ],
    ids=["MemoryError", "gpu", "cpu"],
)
def test_running_out_of_memory_is_told_and_the_next_call_works(failure):
    loaded = scripted_target([2], FailingDrafter)
    fill_pool(loaded)
    loaded.drafters[DRAFTER].failure = failure
    with pytest.raises(Refusal, match="ran out of memory for 7 tokens of prompt and 25 new ones.*shorter context"):
        run()
    loaded.drafters[DRAFTER].failure = None
    assert run().longspark.tau == 3.0


def test_other_errors_are_not_called_out_of_memory():
    loaded = scripted_target([2], FailingDrafter)
    fill_pool(loaded)
    loaded.drafters[DRAFTER].failure = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        run()
    assert left_on(loaded.model) == []


def test_measured_points_hold_what_was_measured():
    loaded = scripted_target()
    fill_pool(loaded)
    last = list(measure(NAME, RANDOM, [256, 2048], True, Stop()))[-1]
    assert (last.done, last.total) == (2 * PASSES, 2 * PASSES)
    assert [(point.method, point.context) for point in last.points] == [
        ("longspark", 256),
        ("dflash", 256),
        ("longspark", 2048),
        ("dflash", 2048),
    ]
    ours, peer = [[p.state_bytes for p in last.points if p.method == name] for name in ("longspark", "dflash")]
    assert ours == [loaded.drafters[DRAFTER].config.state_bytes(torch.float32)] * 2
    assert peer[1] > 6 * peer[0] and all(point.draft_ms > 0 for point in last.points)


def test_a_cancelled_sweep_keeps_its_points():
    fill_pool(scripted_target())
    stop, found = Stop(), []
    with pytest.raises(Stopped):
        for measured in actions.run_sweep(NAME, RANDOM, True, stop):
            found = list(measured.points)
            if found:
                stop.set()
    stop.clear()
    assert [point.context for point in found] == [1024, 1024]


def test_a_length_that_does_not_fit_is_refused(monkeypatch):
    fill_pool(scripted_target())
    monkeypatch.setattr("measuring.free_memory", lambda device: 2**20)
    with pytest.raises(Refusal, match="131,072 tokens need more memory.*up to [0-9,]+ can"):
        list(actions.run_measure(NAME, DRAFTER, 131072, True, Stop()))


def test_charts_show_every_point_and_the_committed_sweep_with_its_date():
    points = [
        Point(COMMITTED_FOR, "longspark", 4096, 12.5, 2**20, 2**24, "race"),
        Point(COMMITTED_FOR, "dflash", 4096, 50.0, 2**23, 2**24, "alone"),
        Point("another target", "dflash", 8192, 99.0, 2**24, 2**25, "alone"),
    ]
    committed = Committed.read()
    page = charts_html(points, COMMITTED_FOR, committed)
    assert f"committed, {committed.date}" in page and committed.row_bytes == 46080
    assert "data-method='longspark' data-context='4096' data-value='12.5' data-source='race'" in page
    assert "data-method='dflash' data-context='4096' data-value='8' data-source='alone'" in page
    assert "8192'" not in page
    labels = re.findall(r"<text( class='ls-second')? x='[^>]*middle'>(\d+K)<", page)
    assert labels and [bool(second) for second, _ in labels[:4]] == [False, True, False, True]  # a phone drops those
    assert "committed" not in charts_html(points, "another target", committed)


def test_a_stretched_copy_shares_weights_and_leaves_the_model_as_it_was():
    model = scripted_target().model
    before = model.model.rotary_emb.inv_freq.clone()
    own = own_copy(model, 4)
    assert all(a is b for a, b in zip(model.parameters(), own.parameters()))
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert own.model.rotary_emb.inv_freq[-1] < before[-1] and own.model.rotary_emb.inv_freq[0] == before[0]
    assert (model.config.max_position_embeddings, own.config.max_position_embeddings) == (1024, 4096)


def test_a_prompt_beyond_the_targets_limit_runs_stretched():
    fill_pool(scripted_target())
    view = run(context=1536, new_tokens=8)
    assert view.identical and view.prompt_tokens > 1500


def test_pieces_of_a_character_come_when_it_is_whole():
    tokenizer = byte_tokenizer()
    pieces = Pieces(tokenizer)
    assert [pieces.add(token) for token in tokenizer("aé☃")["input_ids"]] == ["a", "", "é", "", "", "☃"]


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The Space on a free port, with a scripted drafter."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    fill_pool(scripted_target([2]))
    _, url, _ = app.main(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    yield url
    app.gr.close_all()


def test_named_endpoints_serve_two_visitors_without_mixing_them(served):
    from gradio_client import Client

    def ask(prompt):
        client = Client(served, verbose=False)
        return client.predict(prompt, max_new_tokens=NEW_TOKENS, drafter=DRAFTER, api_name="/race")

    prompts = [PROMPT, "w80 w3 w22 w9", PROMPT, "w80 w3 w22 w9"]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, prompts))
    texts = [answer["longspark"]["text"] for answer in answers]
    assert texts[0] == texts[2] != texts[1] == texts[3]
    assert all(answer["finished"] and answer["identical"] for answer in answers)
    assert answers[0]["tau"] == 3.0 and answers[0]["accepted_by_position"][:3] == [8, 8, 0]
    assert [answer["prompt_tokens"] for answer in answers] == [7, 4, 7, 4]


def test_endpoints_refuse_politely_and_tell_their_limits(served, tmp_path, capfd):
    from gradio_client import Client, handle_file

    client = Client(served, verbose=False)
    limits = client.predict(api_name="/limits")
    assert limits["ready"] and limits["targets"][NAME]["max_context"] == 4096
    with pytest.raises(Exception, match="The prompt is empty"):
        client.predict("", api_name="/race")
    with pytest.raises(Exception, match="`growing` is -1"):
        client.predict(8192, -1, api_name="/measure")
    with pytest.raises(Exception, match="The document is None"):
        client.predict("w1", document=None, api_name="/race")
    assert "Traceback" not in capfd.readouterr().err
    points = client.predict(1024, drafter=RANDOM, api_name="/measure")
    assert [point["method"] for point in points] == ["longspark", "dflash"]
    (tmp_path / "a.md").write_text("some text")
    (tmp_path / "a.gif").write_text("GIF89a")
    assert client.predict(handle_file(tmp_path / "a.md"), api_name="/read_document") == "some text"
    with pytest.raises(Exception, match="can be read"):
        client.predict(handle_file(tmp_path / "a.gif"), api_name="/read_document")
    assert [path for path in (tmp_path / "uploads").rglob("*") if path.is_file() and path.stat().st_size] == []


class Visitor:
    """What a page sends, into the queue or past it, as the app tells it to."""

    def __init__(self, url, name):
        self.url, self.name, self.fns = f"{url}gradio_api/", name, app.build_app().fns

    def send(self, work, *data):
        number, fn = next((number, fn) for number, fn in self.fns.items() if fn.name == work)
        to = "queue/join" if fn.queue else "run/predict"
        body = {"fn_index": number, "data": data, "session_hash": self.name}
        return httpx.post(self.url + to, json=body, timeout=20)

    def at_once(self, work, *data):
        return self.send(work, *data).raise_for_status().json()["data"]

    def start_race(self):
        self.at_once("_show_loading")
        self.at_once("_begin")
        return self.send("_race", PROMPT, None, 0, NAME, DRAFTER, 0, NEW_TOKENS, 0, None, None)

    def withdraw(self, event_id):
        number = next(number for number, fn in self.fns.items() if fn.name == "_race")
        body = {"session_hash": self.name, "fn_index": number, "event_id": event_id}
        httpx.post(self.url + "cancel", json=body).raise_for_status()

    def heard(self):
        return httpx.get(self.url + "queue/data", params={"session_hash": self.name}, timeout=60).text


def test_a_full_queue_stops_nobody_from_stopping(served):
    held, reached = threading.Event(), threading.Event()
    drafter = POOL.targets[NAME].drafters[DRAFTER]
    drafter.__class__ = FailingDrafter
    drafter.act = lambda: (reached.set(), held.wait(60))  # within the second round
    runs, waits, others = (Visitor(served, name) for name in ("runs", "waits", "others"))
    try:
        assert runs.start_race().is_success and reached.wait(30)
        waiting = waits.start_race()
        empty = ["", 0, 64, 0.0, 0, "", "", ""]  # refused when its turn comes
        answers = [others.send("race", *empty).status_code for _ in range(MAX_QUEUE)]
        assert answers == [200] * (MAX_QUEUE - 1) + [503]  # with the one that waits: one runs, twelve wait

        message, withdrawn, *buttons = waits.at_once("_stop", None)
        assert "Stopped before it began" in message and withdrawn.startswith("/") and buttons[0]["interactive"]
        waits.withdraw(waiting.json()["event_id"])
        assert others.send("race", *empty).status_code == 200  # there is room again
        assert "Stopping" in runs.at_once("_stop", None)[0]
    finally:
        held.set()
    assert "Stopped. What was generated until then stays." in runs.heard()
    assert "prompt is empty" in others.heard()  # all have had their turn


def test_every_endpoint_is_documented():
    readme = (SPACE / "README.md").read_text(encoding="utf-8")
    endpoints = {d["api_name"] for d in app.build_app().config["dependencies"] if d.get("api_visibility") == "public"}
    assert {"race", "measure", "sweep", "limits", "read_document"} == endpoints
    assert all(f"`/{name}`" in readme for name in endpoints)
    fill_pool(scripted_target())
    race, limits = actions.race_values(run()), actions.server_limits()
    point = [field.name for field in fields(Point)]
    returned = [*race, *race["plain"], *point, *limits, *limits["targets"][NAME], "done", "total", "points"]
    assert [name for name in returned if f"`{name}`" not in readme] == []


def test_the_folder_for_a_space_is_complete(tmp_path):
    import gradio
    from assemble import assemble
    from packaging.requirements import Requirement

    folder = assemble(tmp_path / "space")
    torch_range = next(
        Requirement(line.strip()) for line in (folder / "requirements.txt").open() if line.startswith("torch")
    )
    assert [torch_range.specifier.contains(f"2.{minor}.0") for minor in (7, 8, 11, 12)] == [False, True, True, False]
    front = (folder / "README.md").read_text(encoding="utf-8").split("---")[1]
    assert f"sdk_version: {gradio.__version__.split('.')[0]}." in front and "app_file: app.py" in front
    for name in ("app.py", "requirements.txt", "style.css", "longspark_hf/modeling_longspark.py"):
        assert (folder / name).is_file()
    examples = folder / "examples"
    assert (examples / "LongSpark-SmolLM2-135M-Instruct" / "model.safetensors").is_file()
    assert (examples / "results" / "sweep_smollm2.json").is_file()
    assert not list(folder.rglob("__pycache__"))
