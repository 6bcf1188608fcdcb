"""The weight files of a drafter, before any weight is read: where they are, and whether they hold what a config asks for.

Knows: the safetensors layout, the tensor names of the released checkpoints, what is refused and why.
Does not know: what the tensors mean, or how they get into a model (modeling_longspark).
"""

import json
import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import cached_file, has_file


# Names in the released checkpoints -> ours (format file, section 1.2).
RELEASED_NAMES = {
    r"^draft_state_encoder\.proj\.net\.0\.": "boundary_fusion.fc1.",
    r"^draft_state_encoder\.proj\.net\.2\.": "boundary_fusion.fc2.",
    r"^draft_state_encoder\.norm\.": "boundary_fusion.norm.",
    r"^parallel_shifted_input\.position_embedding\.": "position_embedding.",
    r"^parallel_shifted_input\.proj\.net\.0\.": "input_mapping.fc1.",
    r"^parallel_shifted_input\.proj\.net\.2\.": "input_mapping.fc2.",
    r"^parallel_shifted_input\.norm\.": "input_mapping.norm.",
    r"^parallel_qwen_layers\.": "layers.",
    r"^global16_raw256_reference\.global_query_generator\.learned_query$": "summary_queries",
    r"^parallel_markov_head\.markov_w1\.": "markov_head.w1.",
    r"^parallel_markov_head\.markov_w2\.": "markov_head.w2.",
}
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2}
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
# What `transformers` would read, or follow, in a folder of weights beside or instead of safetensors.
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_ADAPTER = "adapter_config.json"
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


@dataclass(frozen=True)
class TensorInfo:
    """Data type, as safetensors writes it, and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


def our_name(name: str) -> str:
    """Our name of a tensor of a released checkpoint; any other name stays as it is."""
    for pattern, ours in RELEASED_NAMES.items():
        name = re.sub(pattern, ours, name)
    return name


def tensor_shapes(drafter: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a drafter stores, by name."""
    return {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments of a `from_pretrained` that say where files come from."""
    return {name: kwargs[name] for name in _HUB_ARGUMENTS if kwargs.get(name) is not None}


def check_weights(
    source: str | os.PathLike, expected: dict[str, tuple[int, ...]], variant: str | None = None, **hub_kwargs: Any
) -> dict[str, TensorInfo]:
    r"""
    Find the weight files of a drafter and compare their headers with what is expected. No weight is read.

    Args:
        source (`str` or `os.PathLike`): Hub id, whose files are downloaded, or local folder.
        expected (`dict[str, tuple[int, ...]]`): Shape of every tensor, by our names.
        variant (`str`, *optional*): Of the file names, `model.<variant>.safetensors`.
        hub_kwargs (`Any`): `revision`, `token`, `subfolder` and the like.

    Returns:
        `dict[str, TensorInfo]`: every stored tensor, by its name in the file.

    Raises:
        `ValueError`: if there are only pickles, a file is damaged or truncated, or tensors are missing, unknown or of
            another shape or kind.
        `OSError`: if there are no weights.
    """
    stored: dict[str, TensorInfo] = {}
    for file in find_weights(source, variant, **hub_kwargs):
        header = read_header(file)
        if twice := sorted(set(header) & set(stored)):
            raise ValueError(f"{file} holds {_listed(twice)} a second time; another file of {source} has it already.")
        stored |= header

    found: dict[str, TensorInfo] = {}
    for name, info in stored.items():
        if our_name(name) in found:
            raise ValueError(f"The weights of {source} hold {our_name(name)} under two names. Remove one of them.")
        found[our_name(name)] = info
    floating = {name: shape for name, shape in found.items() if name != "draft_token_ids"}
    problems = {
        "missing": sorted(set(expected) - set(found)),
        "unexpected": sorted(set(found) - set(expected)),
        "of another shape": [
            f"{name} {found[name].shape}, not {shape}"
            for name, shape in sorted(expected.items())
            if name in found and found[name].shape != shape
        ],
        "of another kind": [f"{name} {info.dtype}" for name, info in sorted(floating.items()) if info.dtype == "I64"],
    }
    if any(problems.values()):
        raise ValueError(
            f"The weights of {source} do not fit their config. "
            + "; ".join(f"{kind}: {_listed(names)}" for kind, names in problems.items() if names)
            + ". The repository is incomplete or its config.json belongs to another one."
        )
    return stored


def find_weights(source: str | os.PathLike, variant: str | None = None, **hub_kwargs: Any) -> list[Path]:
    r"""
    The safetensors files of a drafter, one or all shards. Those of a Hub repository are downloaded.

    Args:
        source (`str` or `os.PathLike`): Hub id or local folder.
        variant (`str`, *optional*): Of the file names.
        hub_kwargs (`Any`): `revision`, `token`, `subfolder` and the like.

    Raises:
        `ValueError`: if there are only pickles, or something that would make `transformers` follow a path.
        `OSError`: if there are no weights.
    """
    suffix = f".{variant}" if variant else ""
    names = (f"model{suffix}.safetensors", f"model.safetensors.index{suffix}.json")
    if os.path.isdir(source):
        folder = Path(source, hub_kwargs.get("subfolder", ""))
        _refuse_other_files(source, [path.name for path in folder.iterdir()] if folder.is_dir() else [], names)
        found = [folder / name for name in names if (folder / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{folder} holds no {names[0]} and no {names[1]}.")
        file = found[0]
    else:
        file = _download_first(source, names, hub_kwargs)
    if file.name == names[0]:
        return [file]

    shards = _shards_of(file)
    if os.path.isdir(source):
        absent = [name for name in shards if not (file.parent / name).is_file()]
        if absent:
            raise FileNotFoundError(f"{file} asks for {_listed(absent)}, which {file.parent} does not hold.")
        return [file.parent / name for name in shards]
    return [get_file(source, name, **hub_kwargs) for name in shards]


def get_file(source: str | os.PathLike, name: str, **hub_kwargs: Any) -> Path:
    """
    A file of a repository, downloaded where it is on the Hub.

    Args:
        source (`str` or `os.PathLike`): Hub id or local folder.
        name (`str`): Of the file.
        hub_kwargs (`Any`): `revision`, `token`, `subfolder` and the like.

    Raises:
        `OSError`: if there is none.
    """
    path = cached_file(str(source), name, **hub_kwargs)
    if path is None:
        raise FileNotFoundError(f"{source} holds no {name}.")
    return Path(path)


def _shards_of(index: Path) -> list[str]:
    """File names in an index, which must lie beside it: a path that leads elsewhere is never followed."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files ({error!r}). Save the drafter again.") from error
    for name in shards:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise ValueError(f"{index} names {name!r}; only safetensors files in its own folder are read.")
    if not shards:
        raise ValueError(f"{index} names no file. Save the drafter again.")
    return shards


def _refuse_other_files(source: Any, present: list[str], wanted: tuple[str, str]) -> None:
    if _ADAPTER in present:
        raise ValueError(
            f"{source} holds {_ADAPTER}, which would load another model and change it. Merge the adapter into the drafter "
            "(`merge_and_unload()` of PEFT), save it, and load that."
        )
    distributed = sorted(name for name in present if re.match(r"shard-\d+-model-.*\.safetensors$", name))
    if distributed:
        raise ValueError(
            f"{source} is a distributed checkpoint ({_listed(distributed)}). Gather it and save it by "
            "`drafter.save_pretrained(folder)`."
        )
    pickles = sorted(name for name in present if name in _PICKLES or re.search(r"\.(bin|pt|pth|ckpt|pkl)$", name))
    if pickles and not set(wanted) & set(present):
        raise ValueError(_pickle_message(source, pickles))


def _pickle_message(source: Any, pickles: list[str]) -> str:
    return (
        f"{source} holds its weights as a pickle ({_listed(pickles)}), which can run code when it is read; only safetensors are "
        "loaded. Ask for model.safetensors, or convert the file yourself where you trust it."
    )


def _download_first(source: Any, names: tuple[str, str], hub_kwargs: dict[str, Any]) -> Path:
    if os.path.isfile(source):
        raise ValueError(f"{source} is a file. Pass the folder that holds it, with its config.json.")
    place = {
        key: hub_kwargs[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in hub_kwargs
    }
    place["local_files_only"] = place.get("local_files_only", False)
    error: OSError | None = None
    for name in names:
        try:
            file = get_file(source, name, **hub_kwargs)
        except OSError as missing:
            error = error or missing
            continue
        if _has_file(source, _ADAPTER, place):
            _refuse_other_files(source, [_ADAPTER], names)
        return file
    pickles = [name for name in _PICKLES if _has_file(source, name, place)]
    if pickles:
        raise ValueError(_pickle_message(source, pickles)) from error
    raise error


def _has_file(source: Any, name: str, place: dict[str, Any]) -> bool:
    try:
        return has_file(str(source), name, **place)
    except OSError:
        return False


def read_header(path: str | os.PathLike) -> dict[str, TensorInfo]:
    """
    Names, types and shapes in a safetensors file, whose size is compared with what its header promises.

    Args:
        path (`str` or `os.PathLike`): The file.

    Raises:
        `ValueError`: if it is no safetensors file, is damaged, truncated or longer than it should be.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        first = file.read(8)
        if first.startswith(b"version"):
            raise ValueError(
                f"{path} is a pointer of Git LFS, not the file itself. Run `git lfs pull` in its repository."
            )
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} is no safetensors file, or was cut off in its header: it has {size:,} bytes and asks for a header of "
                f"{length:,}. Download it again."
            )
        text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        infos = {name: TensorInfo(e["dtype"], tuple(e["shape"])) for name, e in entries.items()}
        spans = sorted((*e["data_offsets"], name) for name, e in entries.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"The header of {path} is damaged ({error!r}). Download it again.") from error

    position = 0
    for start, end, name in spans:
        info = infos[name]
        if info.dtype not in _ITEM_BYTES:
            raise ValueError(
                f"{path} stores {name} as {info.dtype}; a drafter is stored as one of {', '.join(_ITEM_BYTES)}. Load it with "
                "what wrote it and save it as bfloat16."
            )
        if not all(isinstance(n, int) and n >= 0 for n in (start, end, *info.shape)):
            raise ValueError(f"The header of {path} is damaged: {name} has shape {info.shape}. Download it again.")
        if start != position or end - start != math.prod(info.shape) * _ITEM_BYTES[info.dtype]:
            raise ValueError(
                f"The header of {path} is damaged: {name}, {info.dtype} of shape {info.shape}, is to lie at bytes {start:,} to "
                f"{end:,} after {position:,}. Download it again."
            )
        position = end
    if size != 8 + length + position:
        raise ValueError(
            f"{path} has {size:,} bytes, its header promises {8 + length + position:,}. "
            f"{'It was truncated' if size < 8 + length + position else 'It was changed'}: download it again."
        )
    return infos


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
