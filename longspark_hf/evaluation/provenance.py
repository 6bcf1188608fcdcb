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
    """Write a result file, readable and diffable. A kill leaves the old file or the new one, never half of it."""
    path, text = Path(path).resolve(), json.dumps(result, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    scratch = path.with_name(f".{path.name}.new")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def read_result(path: str | Path, fix: str = "Delete or restore it.") -> dict[str, Any]:
    """
    Read a result file.

    Args:
        path (`str`): Of the file.
        fix (`str`, *optional*): What to do about a damaged one.

    Raises:
        `ValueError`: naming the file, if it is damaged.
    """
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"The file {path} is damaged ({error}). {fix}") from error


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name
