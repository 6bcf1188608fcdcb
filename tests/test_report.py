"""README's numbers are those of the committed result files."""

import json

import pytest

from longspark_hf.evaluation.report import RESULTS, ROOT, fill


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="not a source tree")
def test_readme_shows_the_committed_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert fill(text) == text, "run: python -m longspark_hf.evaluation.report"


def test_every_result_says_where_it_comes_from():
    files = sorted(RESULTS.glob("*.json"))
    assert files
    for file in files:
        source = json.loads(file.read_text(encoding="utf-8"))["provenance"]
        assert {"command", "date", "torch", "transformers", "dtype", "device"} <= set(source), file
