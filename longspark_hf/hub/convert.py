"""Released checkpoints as repositories that load anywhere: `longspark convert`.

Knows: the three published checkpoints and their sizes.
Does not know: how a released config or tensor is translated (configuration_longspark, weights_longspark).
"""

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.card_longspark import hub_id_of
from longspark_hf.configuration_longspark import RELEASED_MODEL_TYPE
from longspark_hf.weights_longspark import find_weights, get_file, read_header, tensor_shapes

from .card import model_card


@dataclass(frozen=True)
class Published:
    """What is known of a published checkpoint (format file, section 1.1)."""

    target: str
    tensors: int
    parameters: int
    weight_bytes: int
    config_bytes: int


_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
PUBLISHED = {
    "Hehy/LongSpark-Qwen3-4B": Published("Qwen/Qwen3-4B", 65, 641_778_432, 1_283_564_720, 1709),
    "Hehy/LongSpark-Qwen3-8B": Published("Qwen/Qwen3-8B", 65, 1_193_882_880, 2_387_773_688, 1710),
    "Hehy/LongSpark-Qwen3-14B": Published("Qwen/Qwen3-14B", 65, 1_965_736_192, 3_931_480_336, 1712),
}


def convert(
    source: str | os.PathLike,
    output: str | os.PathLike,
    repo_id: str | None = None,
    target: str | None = None,
    license: str | None = None,
    **hub_kwargs: Any,
) -> dict[str, Any]:
    r"""
    Rewrite a released checkpoint as a repository of ours: config with `auto_map`, safetensors under our names, the modules,
    a card. Then `AutoModel.from_pretrained(output, trust_remote_code=True)` loads it without this package.

    Weights are neither rounded nor changed.

    Args:
        source (`str` or `os.PathLike`): Hub id or folder of a released checkpoint.
        output (`str` or `os.PathLike`): Folder to write, new or empty.
        repo_id (`str`, *optional*): Where it is to be published, for the card.
        target (`str`, *optional*): Hub id of the target. Known for the published checkpoints, else read from the config.
        license (`str`, *optional*): For the card; by default that of the source's card, if it has one.
        hub_kwargs (`Any`): `revision`, `token`, `cache_dir` and the like.

    Returns:
        `dict`: `source`, `output`, `target`, `tensors`, `parameters`, `weight_bytes`, `published` (whether the sizes are those of
        a published checkpoint), `config_differs` (whether its config.json has another size than the published one).

    Raises:
        `ValueError`: if the source is no released checkpoint, does not fit its config or is not what was published under its name, or
            the output is not empty.
    """
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty. Give a new folder; nothing in it would be kept safely.")
    try:
        config_file = get_file(source, "config.json", **hub_kwargs)
        found, dtype = _sizes(source, config_file, **hub_kwargs)
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"Cannot read '{source}' ({reason}). Pass a Hub id or a folder with a released checkpoint."
        ) from error
    model_type = _model_type(config_file)
    if model_type == LongSparkConfig.model_type:
        raise ValueError(f"{source} is in our format already; there is nothing to convert.")
    if model_type != RELEASED_MODEL_TYPE:
        raise ValueError(
            f"{source} is a `{model_type}` model; only released LongSpark checkpoints (`{RELEASED_MODEL_TYPE}`) are converted."
        )
    config = LongSparkConfig.from_pretrained(source, **hub_kwargs)
    facts, differs = check_published(str(source), **found)

    # The name in a released config may be a path on the machine that trained it.
    config.target_name_or_path = target or (facts.target if facts else None) or hub_id_of(config.target_name_or_path)
    drafter = LongSparkDrafter.from_pretrained(source, config=config, dtype=dtype, **hub_kwargs)
    folder.mkdir(parents=True, exist_ok=True)
    card = model_card(
        drafter.config,
        repo_id or folder.absolute().name,
        license=license or _license(source, **hub_kwargs),
        origin=_origin(source, found, facts, hub_kwargs.get("revision")),
        parameters=found["parameters"],
    )
    card.save(folder / "README.md")
    drafter.save_pretrained(folder)
    _check_equal(drafter, folder)
    return {
        "source": str(source),
        "output": str(folder),
        "target": drafter.config.target_name_or_path,
        **{key: found[key] for key in ("tensors", "parameters", "weight_bytes")},
        "published": facts is not None,
        "config_differs": differs,
    }


def check_published(
    name: str, tensors: int, parameters: int, weight_bytes: int, config_bytes: int
) -> tuple[Published | None, bool]:
    r"""
    Compare a checkpoint with what was published.

    Args:
        name (`str`): Hub id or folder. Under a published Hub id, sizes must be the published ones; a folder is recognised by
            its sizes.
        tensors, parameters, weight_bytes, config_bytes (`int`): Of the checkpoint.

    Returns:
        `tuple(Published, bool)`: the published checkpoint, `None` if it is none of them; and whether config.json has another size.

    Raises:
        `ValueError`: if the name is a published one and the sizes are not.
    """
    found = {"tensors": tensors, "parameters": parameters, "weight_bytes": weight_bytes}
    facts = PUBLISHED.get(name)
    if facts is None:
        same = [f for f in PUBLISHED.values() if all(getattr(f, key) == value for key, value in found.items())]
        return (same[0], same[0].config_bytes != config_bytes) if same else (None, False)
    wrong = [
        f"{key} {value:,} (published: {getattr(facts, key):,})"
        for key, value in found.items()
        if getattr(facts, key) != value
    ]
    if wrong:
        raise ValueError(
            f"{name} is not what was published under this name: {', '.join(wrong).replace('_', ' ')}. Download it again; if the authors "
            "have published other weights since, pass their folder instead of the name."
        )
    return facts, facts.config_bytes != config_bytes


def _model_type(config_file: Path) -> str | None:
    try:
        return json.loads(config_file.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{config_file} is no JSON object ({error}). Download it again.") from error


def _sizes(source: str | os.PathLike, config_file: Path, **hub_kwargs: Any) -> tuple[dict[str, int], torch.dtype]:
    """Sizes of a checkpoint, and the one dtype that rounds none of its tensors."""
    files = find_weights(source, **hub_kwargs)
    tensors = [info for file in files for info in read_header(file).values()]
    dtypes = {_DTYPES[info.dtype] for info in tensors if info.dtype in _DTYPES}
    sizes = {
        "tensors": len(tensors),
        "parameters": sum(torch.Size(info.shape).numel() for info in tensors),
        "weight_bytes": sum(file.stat().st_size for file in files),
        "config_bytes": config_file.stat().st_size,
    }
    return sizes, functools.reduce(torch.promote_types, dtypes)


def _license(source: str | os.PathLike, **hub_kwargs: Any) -> str | None:
    """The license that the source's card names, if it has a card."""
    try:
        text = get_file(source, "README.md", **hub_kwargs).read_text(encoding="utf-8")
        return ModelCard(text).data.license
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _origin(source: str | os.PathLike, found: dict[str, int], facts: Published | None, revision: Any) -> str:
    name = next((name for name, published in PUBLISHED.items() if published is facts), None)
    name = name or (str(source) if not os.path.isdir(source) else None)
    where = f"[{name}](https://huggingface.co/{name})" if name else f"a released checkpoint, `{Path(source).name}`"
    at = f" at revision `{revision}`" if revision else ""
    return (
        f"Converted from {where}{at} by longspark_hf: {found['tensors']} tensors and {found['parameters']:,} parameters, renamed and "
        "otherwise unchanged."
    )


def _check_equal(drafter: LongSparkDrafter, folder: Path) -> None:
    """What was written must load as what was read, which its header alone can tell for names and shapes."""
    written = {name: info.shape for file in find_weights(folder) for name, info in read_header(file).items()}
    if written != tensor_shapes(drafter):
        raise RuntimeError(f"{folder} was not written as it should be; report this with the version of transformers.")
