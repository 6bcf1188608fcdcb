"""Where a measured number comes from: goes into every result file."""

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import longspark_hf


def provenance(dtype: torch.dtype, device: str | torch.device = "cpu") -> dict[str, Any]:
    """
    Command, versions, dtype, device, revision and date of a measurement.

    Args:
        dtype (`torch.dtype`): Of the models measured.
        device (`str` or `torch.device`, *optional*, defaults to `"cpu"`): They ran on.
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    git = ["git", "-C", str(Path(longspark_hf.__file__).parent), "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    program = "longspark" if Path(sys.argv[0]).name == "longspark" else f"python -m {_module_name()}"
    return {
        "command": " ".join([program, *sys.argv[1:]]),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "OMP_"))},
        "date": datetime.date.today().isoformat(),
        "longspark_hf": longspark_hf.__version__,
        "git_revision": revision,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dtype": str(dtype).removeprefix("torch."),
        "device": name,
        "threads": torch.get_num_threads(),
    }


def write_result(path: str | Path, result: dict[str, Any]) -> None:
    """Write a result file, readable and diffable."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name
