"""A folder that is a complete Space: these files, the package, the shipped drafter and the committed sweep.

    python space/assemble.py build/space
    hf upload you/longspark build/space --repo-type=space

The package is not on PyPI, so it travels along. Not part of the Space itself.
"""

import shutil
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
DRAFTER = "examples/LongSpark-SmolLM2-135M-Instruct"
FILES = [
    f"{DRAFTER}/README.md",
    f"{DRAFTER}/config.json",
    f"{DRAFTER}/model.safetensors",
    "examples/results/sweep_smollm2.json",
    "LICENSE",
]


def assemble(folder: str | Path) -> Path:
    """
    Write the folder.

    Args:
        folder (`str` or `Path`): Made anew; must not exist, or be an earlier result of this script.

    Returns:
        `Path`: the folder.

    Raises:
        `ValueError`: if it exists and is something else.
    """
    folder = Path(folder)
    if folder.exists():
        if not (folder / "app.py").is_file() or not (folder / "longspark_hf").is_dir():
            raise ValueError(f"{folder} exists and is no assembled Space. Name another folder, or remove it.")
        shutil.rmtree(folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "assemble.py", "screenshots")
    shutil.copytree(ROOT / "space", folder, ignore=ignored)
    shutil.copytree(ROOT / "longspark_hf", folder / "longspark_hf", ignore=ignored)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python space/assemble.py FOLDER")
    try:
        print(assemble(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
