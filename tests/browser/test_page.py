"""The Space in headless Chromium, with SmolLM2 and with a scripted drafter: `make browser-test`."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest


PROMPT = "Name three rivers in Europe and say where they flow."


def ready(page):
    page.wait_for_selector("[data-kind=ready]")
    page.wait_for_selector("#race:not([disabled])")
    return page


def set_new_tokens(page, number):
    page.get_by_text("Settings", exact=True).first.click()
    field, slider = page.locator("#new-tokens input[type=number]"), page.locator("#new-tokens input[type=range]")
    slider.wait_for()
    for _ in range(20):  # a control that was just unfolded may not listen yet
        field.fill(str(number))
        field.press("Enter")
        field.press("Tab")
        page.wait_for_timeout(300)
        if slider.input_value() == field.input_value() == str(number):
            return
    raise AssertionError(f"new tokens stay at {slider.input_value()}")


def measure_growing_too(page):
    page.wait_for_timeout(1000)  # the box follows the target, which was chosen a moment ago
    page.locator("#growing input").check()


def race(page, prompt=PROMPT):
    page.locator("#prompt textarea").fill(prompt)
    page.locator("#race").click()


def finished(page):
    page.wait_for_selector("#longspark [data-figure=state-bytes]")
    page.wait_for_selector("#race:not([disabled])")


def figure(page, name):
    return page.locator(f"[data-figure={name}]").first.inner_text()


def text_of(page, pane):
    return page.locator(f"#{pane} .ls-text").inner_text().strip()


def luminance(color):
    """Relative luminance, as WCAG defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_the_page_is_painted_within_three_seconds_and_says_how_loading_goes(space, open_page):
    page = open_page(space[0])
    page.wait_for_selector("[data-kind=loading], [data-kind=ready]")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert paint < 3000
    ready(page)
    assert "CPU" in page.locator("[data-kind=ready]").inner_text()


def test_a_race_on_smollm2_gives_one_text_twice_and_points_in_the_charts(space, open_page):
    page = ready(open_page(space[0]))
    set_new_tokens(page, 32)
    race(page)
    page.wait_for_selector("#longspark span.ls-target")  # tokens come while it runs
    page.wait_for_selector("#plain[class], #plain .ls-text")
    finished(page)
    assert figure(page, "identical") == "yes"
    assert text_of(page, "plain") == text_of(page, "longspark") != ""
    tau = float(figure(page, "tau"))
    assert 1 <= tau <= 5 and f"{tau:.2f}" == figure(page, "lane-tau")
    assert float(figure(page, "speedup").split()[0]) > 0
    for chart in ("draft_ms", "state_bytes"):
        mark = page.locator(f"[data-chart={chart}] rect[data-method=longspark]")
        assert mark.count() == 1 and float(mark.get_attribute("data-value")) > 0
    assert page.locator("[data-chart=state_bytes] rect[data-method=target]").count() == 1
    assert "committed, 20" in page.locator("#charts").inner_text()

    page.locator("#context").get_by_text("2K", exact=True).click()
    measure_growing_too(page)
    page.locator("#measure").click()
    page.wait_for_selector("[data-chart=draft_ms] circle[data-method=dflash][data-context='2048']")
    assert page.locator("[data-chart=draft_ms] circle[data-method=longspark][data-context='2048']").count() == 1
    assert page.locator("[data-chart=draft_ms] rect").count() == 1  # points stay


def test_a_sweep_shows_its_progress_and_can_be_cancelled(space, open_page):
    page = ready(open_page(space[0]))
    measure_growing_too(page)
    page.locator("#sweep").click()
    page.wait_for_selector("#progress progress")
    page.wait_for_selector("[data-chart=draft_ms] circle[data-context='1024']")
    assert page.locator("#clear").is_disabled()  # it would bring cleared points back
    page.locator("#cancel").click()
    page.wait_for_selector("#progress >> text=Cancelled")
    page.wait_for_selector("#sweep:not([disabled])")
    assert page.locator("[data-chart=draft_ms] circle[data-context='131072']").count() == 0


def test_stop_ends_a_race_in_the_middle(space, open_page):
    page = ready(open_page(space[0]))
    page.locator("#context").get_by_text("4K", exact=True).click()
    race(page)
    page.wait_for_selector("#plain progress, #longspark progress")  # in the middle of a prefill
    start = time.monotonic()
    page.locator("#stop").click()
    page.wait_for_selector("#summary >> text=Stopped")
    assert time.monotonic() - start < 15
    page.wait_for_selector("#race:not([disabled])")
    page.locator("#context").get_by_text("as written").click()
    set_new_tokens(page, 200)
    race(page)
    page.wait_for_selector("#longspark span.ls-target")  # in the middle of the answer
    page.locator("#stop").click()
    page.wait_for_selector("#summary >> text=Stopped")
    assert page.locator("#longspark span.ls-target").count() > 0  # what was generated stays


def test_stop_takes_a_race_out_of_the_queue_at_once(space, open_page):
    before, page = ready(open_page(space[0])), ready(open_page(space[0]))
    before.locator("#context").get_by_text("8K", exact=True).click()
    race(before)
    before.wait_for_selector("#plain progress, #longspark progress")
    race(page)
    page.wait_for_selector("#message >> text=Waiting for the device")
    page.wait_for_timeout(500)
    start = time.monotonic()
    page.locator("#stop").click()
    page.wait_for_selector("#race:not([disabled])")
    assert time.monotonic() - start < 3
    assert "Stopped" in page.locator("#message").inner_text()
    before.locator("#stop").click()
    before.wait_for_selector("#summary >> text=Stopped")
    before.wait_for_selector("#race:not([disabled])")
    page.wait_for_timeout(1000)
    assert page.locator("#plain .ls-text").count() == 0  # it never ran
    set_new_tokens(page, 8)
    race(page)
    finished(page)


def test_documents_are_taken_or_refused(space, open_page, tmp_path):
    page = ready(open_page(space[0]))
    good, bad = tmp_path / "notes.md", tmp_path / "notes.docx"
    good.write_text("Glaciers are rivers of ice. " * 20)
    bad.write_text("x")
    upload = page.locator("#upload ~ input[type=file], #upload input[type=file], input[type=file]").first
    upload.set_input_files(good)
    page.wait_for_selector("#about-document >> text=notes.md, 559 characters")
    upload.set_input_files(bad)
    page.wait_for_selector(
        "#message [role=alert] >> text=notes.docx is of type '.docx'; .txt, .md, .py, .pdf can be read"
    )
    assert "559 characters" in page.locator("#about-document").inner_text()
    page.locator("#forget").click()
    page.wait_for_selector("#about-document >> text=No document")
    race(page, "  ")
    page.wait_for_selector("#message [role=alert] >> text=The prompt is empty")


def test_the_page_works_by_keyboard_and_every_control_has_a_name(space, open_page):
    page = ready(open_page(space[0]))
    page.locator("#prompt textarea").focus()
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.closest('[id]')?.id"))
    assert {"example-0", "race", "growing", "measure", "sweep", "clear"} <= reached
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, textarea, select, input:not([type=file])')].filter(e => e.offsetParent"
        " && !(e.innerText || e.getAttribute('aria-label') || e.labels?.length || e.title)).map(e => e.outerHTML)"
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_readable(space, open_page, scheme):
    page = ready(open_page(space[0], color_scheme=scheme))
    style = "e => [getComputedStyle(document.body).backgroundColor, getComputedStyle(e).{}]"
    for selector, what in (
        ("h1", "color"),
        ("#charts svg text", "fill"),
        (".ls-how text", "fill"),
        (".ls-empty", "color"),
        (".ls-head a", "color"),
    ):
        background, ink = page.locator(selector).first.evaluate(style.format(what))
        assert (luminance(background) < 0.2) == (scheme == "dark")
        assert contrast(background, ink) >= 4.5, selector


def test_a_narrow_screen_shows_everything_below_each_other(space, open_page):
    page = ready(open_page(space[0], viewport={"width": 375, "height": 800}, has_touch=True))
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    plain, drafted = page.locator("#plain").bounding_box(), page.locator("#longspark").bounding_box()
    assert drafted["y"] >= plain["y"] + plain["height"] and plain["width"] > 280
    charts = [page.locator("#charts svg").nth(i).bounding_box() for i in (0, 1)]
    assert charts[1]["y"] >= charts[0]["y"] + charts[0]["height"]


def test_twenty_calls_at_once_are_answered_or_refused_and_memory_returns(space, open_page):
    from gradio_client import Client

    url, process = space
    ready(open_page(url))
    prompts = ["What is a glacier?", "Write a haiku about rain.", "What is 12 times 12?", "Name a river."]
    arguments = {"max_new_tokens": 12, "api_name": "/race"}
    alone = {prompt: Client(url, verbose=False).predict(prompt, **arguments) for prompt in prompts}
    memory = psutil.Process(process.pid).memory_info
    before = memory().rss

    def ask(number):
        prompt = prompts[number % len(prompts)]
        try:
            return prompt, Client(url, verbose=False).predict(prompt, **arguments)
        except Exception as refusal:
            return prompt, str(refusal)

    with ThreadPoolExecutor(20) as threads:
        results = list(threads.map(ask, range(20)))
    answered = [(prompt, result) for prompt, result in results if isinstance(result, dict)]
    refused = [result for _, result in results if isinstance(result, str)]
    assert len(answered) >= 10 and all("Queue is full" in message for message in refused), refused
    for prompt, result in answered:
        assert result["finished"] and result["identical"]
        assert result["longspark"]["text"] == alone[prompt]["longspark"]["text"]
        assert result["accepted_by_position"] == alone[prompt]["accepted_by_position"]
    after = memory().rss
    print(
        f"{len(answered)} answered, {len(refused)} refused; {before / 2**20:.0f} MiB before, {after / 2**20:.0f} after"
    )
    assert after < 1.05 * before


def test_two_tabs_do_not_see_each_other(space, open_page, tmp_path):
    mine, other = ready(open_page(space[0])), ready(open_page(space[0]))
    (tmp_path / "secret.txt").write_text("a secret of mine")
    mine.locator("input[type=file]").first.set_input_files(tmp_path / "secret.txt")
    mine.wait_for_selector("#about-document >> text=16 characters")
    mine.locator("#measure").click()
    mine.wait_for_selector("[data-chart=draft_ms] circle")
    other.wait_for_timeout(1000)
    assert "No document" in other.locator("#about-document").inner_text()
    assert other.locator("#charts circle").count() == 0


def test_the_page_shows_exactly_what_the_scripted_drafter_does(open_page):
    from . import scripted

    app = scripted.space_app()
    loaded = scripted.scripted_target([2])
    scripted.fill_pool(loaded)
    _, url, _ = app.main(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    try:
        page = ready(open_page(url.rstrip("/")))
        set_new_tokens(page, scripted.NEW_TOKENS)
        race(page, scripted.PROMPT)
        finished(page)
        state = loaded.drafters[scripted.DRAFTER].config.state_bytes(loaded.model.dtype)
        assert figure(page, "tau") == figure(page, "lane-tau") == "3.00"
        assert figure(page, "state-bytes") == f"{state:,}"
        assert figure(page, "identical") == "yes"
        assert page.locator("#longspark .ls-text span.ls-draft").count() == 16
        assert page.locator("#longspark .ls-text span.ls-target").count() == 8
        kept = page.locator("#longspark .ls-bars li span:last-child").all_inner_texts()
        assert kept == ["100%", "100%"] + ["0%"] * (len(kept) - 2)
        mark = page.locator("[data-chart=state_bytes] [data-method=longspark][data-source=race]")
        assert float(mark.get_attribute("data-value")) == pytest.approx(state / 2**20, rel=1e-5)
    finally:
        app.gr.close_all()
        app.POOL.targets.clear()
        app.POOL.ready = False


@pytest.mark.skipif(
    "LONGSPARK_SCREENSHOTS" not in os.environ, reason="LONGSPARK_SCREENSHOTS names no folder for pictures"
)
@pytest.mark.parametrize("name, width, scheme", [("desktop", 1280, "light"), ("phone", 390, "dark")])
def test_pictures_of_the_page(space, open_page, name, width, scheme):
    page = ready(open_page(space[0], viewport={"width": width, "height": 900}, color_scheme=scheme))
    measure_growing_too(page)
    page.locator("#sweep").click()
    page.wait_for_selector("#progress >> text=points measured")
    race(page, "What is a glacier, and where in Europe can I see one?")
    finished(page)
    page.wait_for_timeout(500)
    page.screenshot(path=Path(os.environ["LONGSPARK_SCREENSHOTS"]) / f"{name}.png", full_page=True)
