"""`longspark report`: result files as one page, and the plots in it."""

import copy
import json
import re
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from longspark_hf.cli import app
from longspark_hf.evaluation import plots
from longspark_hf.evaluation.page import kind_of, read_results, sections, to_html


pytest.importorskip("matplotlib")

PROVENANCE = {"command": "longspark bench", "date": "2026-11-29", "torch": "2.13", "device": "CPU <x>", "threads": 2}
BENCH = {
    "kind": "bench",
    "target": "a target",
    "drafter": "a drafter",
    "settings": {},
    "rows": [
        {
            "task": task,
            "method": method,
            "temperature": 0.0,
            "prompts": 2,
            "prompt_tokens": 100,
            "new_tokens": 64,
            "tokens_per_second": 10.0 * speedup,
            "tpot_ms": 100 / speedup,
            "prefill_ms": 50.0,
            "speedup": speedup,
            "speedup_low": 0.9 * speedup,
            "speedup_high": 1.1 * speedup,
            "tau": tau,
            "accepted_by_position": [0.8, 0.5, 0.2] if tau else None,
            "peak_memory_bytes": 2**30,
            "state_bytes": 2**21 if tau else None,
            "draft_ms_per_round": 20.0 if tau else None,
            "verify_ms_per_round": 120.0 if tau else None,
            "model_tpot_ms": 140 / tau if tau else None,
            "break_even_tau": 1.4 if tau else None,
        }
        for task in ("gsm8k", "<b>code</b>")
        for method, speedup, tau in (("plain", 1.0, None), ("longspark", 1.8, 2.5), ("prompt_lookup", 1.2, 1.4))
    ],
    "provenance": PROVENANCE,
}
SWEEP = {
    "kind": "sweep",
    "shape": "smollm2",
    "rows": [
        {
            "method": method,
            "context": context,
            "draft_ms": 50.0 + slope * context,
            "verify_ms": 200.0,
            "plain_ms": 100.0,
            "plain_in_place_ms": 80.0,
            "state_bytes": 10**6 + int(10**4 * slope * context),
            "total_bytes": 10**9,
        }
        for method, slope in (("longspark", 0.0), ("dflash", 0.01))
        for context in (1024, 8192)
    ],
    "provenance": PROVENANCE,
}
ABLATION = {
    "target": "a target",
    "steps": 600,
    "rows": [
        {"variant": "full", "parameters": 1000, "short_simulated_tau": 1.9, "long_simulated_tau": 1.8},
        {"variant": "no summary", "parameters": 900, "short_simulated_tau": 1.7, "long_simulated_tau": None},
    ],
    "provenance": PROVENANCE,
}


@pytest.fixture
def files(tmp_path):
    paths = []
    for name, result in (("bench", BENCH), ("sweep", SWEEP), ("ablations", ABLATION)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(result))
    return paths


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def assert_bad_input(result, *hints):
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    for hint in hints:
        assert hint in line


def test_html_page_needs_no_other_file(files, tmp_path):
    result = report(*files, "--output", tmp_path / "page.html")

    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(tmp_path / "page.html")]
    page = (tmp_path / "page.html").read_text()
    # speedup, acceptance, rounds; draft and state, rounds by context; two measures of the ablation
    assert page.count("<svg") == 7
    assert not re.search(r'(src|href)="(?!#)(?!http://www\.w3\.org)', page), "refers to something outside"
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        ElementTree.fromstring(svg)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for text in ("gsm8k", "no summary", "the growing peer", "Figure 1", "longspark bench", "&lt;b&gt;code&lt;/b&gt;"):
        assert text in page
    assert "<b>code" not in page


def test_markdown_page_has_its_plots_beside_it(files, tmp_path):
    result = report(*files, "--output", tmp_path / "new" / "page.md")

    assert result.exit_code == 0, result.output
    page = (tmp_path / "new" / "page.md").read_text()
    links = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page)
    assert len(links) == 7
    assert all((tmp_path / "new" / link).read_text().startswith("<?xml") for link in links)
    assert "| method |" in page and "## Context sweep: sweep" in page


def test_same_results_make_the_same_page(files):
    pages = [to_html(sections(read_results(files))) for _ in range(2)]
    assert pages[0] == pages[1]


def test_numbers_of_the_page_are_those_of_the_results(files):
    bench, sweep, ablation = sections(read_results(files))
    table = bench.parts[[str(part).startswith("gsm8k") for part in bench.parts].index(True) + 1]
    longspark = dict(zip(table.header, table.rows[1]))
    assert longspark["τ"] == "2.50" and longspark["TPOT ms"] == "55.6"
    (lines,) = [part for part in sweep.parts if isinstance(part, list)]
    assert "8,192 tokens" in lines[1] and "2.6 times as long" in lines[1]
    assert ablation.parts[-1].rows[1] == ["no summary", "900", "1.700", "-"]


def test_rows_that_were_not_measured_are_left_out_of_plots():
    result = copy.deepcopy(BENCH)
    for row in result["rows"]:
        row.update(speedup=None, accepted_by_position=None, draft_ms_per_round=None, tau=None)
    page = to_html(sections([("bench", result)]))
    assert "<svg" not in page and "gsm8k" in page


def test_plots_show_every_method_under_its_name():
    figure = plots.draft_and_state(SWEEP["rows"])
    time_axes, state_axes = figure.axes
    assert [text.get_text() for text in state_axes.get_legend().get_texts()] == [
        plots.LABELS[m] for m in ("longspark", "dflash")
    ]
    assert time_axes.get_xscale() == time_axes.get_yscale() == state_axes.get_yscale() == "log"
    assert list(time_axes.lines[1].get_ydata()) == [row["draft_ms"] for row in SWEEP["rows"][2:]]


def test_bad_input_is_one_line(files, tmp_path):
    out = ("--output", tmp_path / "page.html")
    assert_bad_input(report(tmp_path / "missing.json", *out), "missing.json")
    (tmp_path / "broken.json").write_text('{"kind": "bench", "rows": [')
    assert_bad_input(report(tmp_path / "broken.json", *out), "broken.json")
    for content in (
        '{"rows": []}',
        '{"kind": "sweep", "rows": [{"method": "longspark"}]}',
        "[1]",
        '{"kind": "bench"}',
    ):
        (tmp_path / "other.json").write_text(content)
        assert_bad_input(report(tmp_path / "other.json", *out), "other.json", "longspark sweep")
    assert_bad_input(report(*files, "--output", tmp_path / "page.pdf"), ".html", "page.pdf")
    (tmp_path / "file").write_text("")
    assert_bad_input(report(*files, "--output", tmp_path / "file" / "page.html"), "Cannot write")
    assert report("--output", "page.html").exit_code == 2


def test_kind_is_told_from_the_rows():
    assert [kind_of(result) for result in (BENCH, SWEEP, ABLATION)] == ["bench", "sweep", "ablation"]
    assert kind_of({"kind": "other", "rows": []}) is None and kind_of(None) is None
