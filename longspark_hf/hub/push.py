"""Upload of a drafter's folder, after saying exactly what would be uploaded: `longspark push`.

Knows: which files belong to a drafter's repository, and what must never leave a machine.
Does not know: what a card says (card), or whether weights fit a config (weights_longspark).
"""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.utils import HFValidationError, validate_repo_id

from longspark_hf import LongSparkConfig, LongSparkDrafter
from longspark_hf.card_longspark import CARD_MARK, hub_id_of, is_stock_card
from longspark_hf.weights_longspark import check_weights, tensor_shapes

from .card import check_card, model_card, read_results


MODULES = {path.name: path for path in Path(__file__).parents[1].glob("*_longspark.py")}
_WEIGHTS = r"model(-\d{5}-of-\d{5})?\.safetensors"
_FILES = rf"config\.json|{_WEIGHTS}|model\.safetensors\.index\.json|README\.md|\.gitattributes|(LICENSE|NOTICE)(\.txt|\.md)?"
_OTHER_WEIGHTS = r".*\.(bin|pt|pth|ckpt|pkl|pickle|npy|npz|h5|msgpack|onnx|gguf|safetensors|joblib)"
# Left behind by git, Python and huggingface_hub: never uploaded, and said to be left out.
_LEFT_OUT = (".git", ".cache", "__pycache__", ".ipynb_checkpoints", ".DS_Store")
_SECRET_NAMES = (
    r"\.env(\..*)?|.*\.env|\.?_?netrc|\.git-credentials|\.npmrc|\.pypirc|id_(rsa|dsa|ecdsa|ed25519)(\.pub)?"
    r"|.*\.(pem|key|p12|pfx|keystore)|(credentials|secrets?|token)(\..*)?"
)
_SECRETS = {
    "a Hugging Face token": rb"\b(hf|api_org)_[A-Za-z0-9]{30,}",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a GitHub token": rb"\b(gh[opusr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})",
    "an AWS key": rb"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "an API key": rb"\b(sk-[A-Za-z0-9_-]{32,}|AIza[A-Za-z0-9_-]{35}|xox[abprs]-[A-Za-z0-9-]{20,})",
    "a password in an address": rb"[a-z][a-z0-9+.-]*://[^\s/:@]+:[^\s/:@]{3,}@",
    "a netrc entry": rb"\bmachine\s+\S+\s+login\s+\S+\s+password\s+\S+",
}


@dataclass
class PushPlan:
    r"""
    What a push uploads, and nothing else.

    Args:
        repo_id (`str`): `user/name`.
        folder (`Path`): The drafter's.
        files (`dict[str, int]`): Bytes of every file, by its name in the repository.
        card (`str`): README.md as it is uploaded.
        left_out (`list[str]`): What of the folder is left behind.
        private (`bool`, *optional*), revision (`str`, *optional*), commit_message (`str`): Of the upload.
    """

    repo_id: str
    folder: Path
    files: dict[str, int]
    card: str
    left_out: list[str] = field(default_factory=list)
    private: bool | None = None
    revision: str | None = None
    commit_message: str = "Upload LongSpark drafter"

    @property
    def total_bytes(self) -> int:
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain values, with `total_bytes` and the `commit_url` that is not there yet."""
        fields = {name: value for name, value in vars(self).items() if name != "folder"}
        return {**fields, "folder": str(self.folder), "total_bytes": self.total_bytes, "commit_url": None}


def plan_push(
    folder: str | os.PathLike,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    include: tuple[str, ...] = (),
    license: str | None = None,
    training_data: str | None = None,
) -> PushPlan:
    r"""
    Look at everything that a push would upload. Touches no network and changes no file.

    A card that longspark_hf wrote is written anew, with the repository's name and the figures of the result files in the folder;
    a card of your own is taken as it is.

    Args:
        folder (`str` or `os.PathLike`): Saved by `drafter.save_pretrained` or `longspark convert`.
        repo_id (`str`): `user/name`.
        private (`bool`, *optional*): Of a repository that is created; by default the account's setting.
        revision (`str`, *optional*): Branch; by default `main`.
        commit_message (`str`, *optional*): Of the upload.
        include (`tuple[str, ...]`, *optional*): Further files of the folder, by name. They are looked at for secrets too.
        license (`str`, *optional*), training_data (`str`, *optional*): For the card.

    Returns:
        [`PushPlan`]

    Raises:
        `ValueError`: listing everything that is wrong, and how to put it right.
    """
    folder = Path(folder)
    _check_names(folder, repo_id, revision)
    results = read_results(folder)
    problems, left_out, files = _look_through(folder, set(include), set(results))
    config = None if problems else _check_drafter(folder, problems)
    if config is None:
        _refuse(folder, problems)

    card = _card(folder, repo_id, config, list(results.values()), license, training_data)
    problems += [f"{problem}; pass it (`license`, `training_data`) or write it there" for problem in check_card(card)]
    problems += [f"README.md holds {kind}" for kind in _secrets_in(card.encode())]
    if problems:
        _refuse(folder, problems)
    sizes = {path.name: path.stat().st_size for path in files} | {"README.md": len(card.encode())}
    message = {} if commit_message is None else {"commit_message": commit_message}
    return PushPlan(
        repo_id, folder, dict(sorted(sizes.items())), card, left_out, private=private, revision=revision, **message
    )


def push(plan: PushPlan, token: str | bool | None = None, endpoint: str | None = None) -> str:
    r"""
    Upload what a plan lists, as one commit.

    Args:
        plan ([`PushPlan`]): From [`plan_push`].
        token (`str` or `bool`, *optional*): Of the Hub; by default the one of `hf auth login`.
        endpoint (`str`, *optional*): Address of the Hub; by default `HF_ENDPOINT`.

    Returns:
        `str`: address of the commit.

    Raises:
        `ValueError`: if a file has changed since the plan was made, or the Hub refuses.
    """
    operations = []
    for name, size in plan.files.items():
        path = plan.folder / name
        if name == "README.md":
            operations.append(CommitOperationAdd(name, plan.card.encode()))
            continue
        if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
            raise ValueError(f"{path} has changed since it was looked at. Plan the push again.")
        operations.append(CommitOperationAdd(name, path))
    api = HfApi(endpoint=endpoint, token=token)
    try:
        repo_id = api.create_repo(plan.repo_id, private=plan.private, exist_ok=True).repo_id
        if plan.revision not in (None, "main"):
            api.create_branch(repo_id, branch=plan.revision, exist_ok=True)
        commit = api.create_commit(repo_id, operations, commit_message=plan.commit_message, revision=plan.revision)
    except OSError as error:  # of the Hub too
        raise ValueError(
            f"The upload to {plan.repo_id} failed: {str(error).strip()} A token with write access is needed: run `hf auth login`, or "
            "set HF_TOKEN."
        ) from error
    return str(commit.commit_url)


def _check_names(folder: Path, repo_id: str, revision: str | None) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder. Save a drafter by `drafter.save_pretrained(folder)` first.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"'{repo_id}' is no name for a repository: {error}") from error
    if "/" not in repo_id:
        raise ValueError(f"'{repo_id}' does not say whose repository it is. Pass it as user/{repo_id}.")
    if revision is not None and not re.fullmatch(r"[\w][\w./-]*", revision):
        raise ValueError(f"'{revision}' is no name for a branch. Use letters, digits, dots and dashes.")


def _refuse(folder: Path, problems: list[str]) -> None:
    raise ValueError(f"{folder} cannot be pushed: " + "; ".join(problems) + ".")


def _look_through(folder: Path, include: set[str], results: set[str]) -> tuple[list[str], list[str], list[Path]]:
    """Problems, names left out, and the files to upload."""
    problems, left_out, files = [], [], []
    for path in sorted(folder.iterdir()):
        name = path.name
        if name in _LEFT_OUT:
            left_out.append(name)
        elif path.is_symlink():
            problems.append(f"{name} is a link, which may lead anywhere: put the file itself there")
        elif re.fullmatch(_SECRET_NAMES, name, re.IGNORECASE):
            problems.append(f"{name} looks like a secret: move it out of the folder")
        elif path.is_dir():
            problems.append(f"{name}/ is a folder; a drafter's repository is flat: move it out")
        elif re.fullmatch(_FILES, name) or name in MODULES or name in results or name in include:
            files.append(path)
        elif re.fullmatch(_OTHER_WEIGHTS, name, re.IGNORECASE):
            problems.append(f"{name} holds weights, but only model.safetensors and its shards are pushed: remove it")
        else:
            problems.append(f"{name} does not belong to a drafter: move it out, or include it by name")
    problems += [f"{name} is to be included and is not there" for name in sorted(include - {p.name for p in files})]
    for path in files:
        if re.fullmatch(_OTHER_WEIGHTS, path.name, re.IGNORECASE) and not re.fullmatch(_WEIGHTS, path.name):
            problems.append(f"{path.name} holds weights, but only model.safetensors and its shards are pushed")
        problems += [f"{path.name} holds {kind}: remove it, and revoke it" for kind in _secrets_of(path)]
    return problems, left_out, [path for path in files if path.name != "README.md"]


def _secrets_of(path: Path) -> list[str]:
    """Kinds of secrets in a file. Of weights only the text in front is searched: random bytes look like anything."""
    with open(path, "rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            return _secrets_in(file.read(min(length, 100_000_000)))
        return _secrets_in(file.read())


def _secrets_in(content: bytes) -> list[str]:
    return [kind for kind, pattern in _SECRETS.items() if re.search(pattern, content)]


def _check_drafter(folder: Path, problems: list[str]) -> LongSparkConfig | None:
    """The drafter's config, if folder and config are in order; adds what is wrong to `problems`."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if fields.get("model_type") != LongSparkConfig.model_type:
            raise ValueError(
                f"config.json is of a `{fields.get('model_type')}` model; convert a released checkpoint by `longspark convert` first"
            )
        config = LongSparkConfig.from_dict(dict(fields))
        check_weights(folder, tensor_shapes(LongSparkDrafter.without_weights(config)))
    except (OSError, ValueError, AttributeError) as error:
        problems.append(" ".join(str(error).split()).rstrip("."))
        return None

    classes = (("AutoConfig", LongSparkConfig), ("AutoModel", LongSparkDrafter))
    expected = {auto: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}" for auto, kind in classes}
    auto_map = fields.get("auto_map") or {}
    for auto in sorted({*expected, *auto_map}):
        if auto_map.get(auto) != expected.get(auto):
            problems.append(
                f"`auto_map` in config.json has {auto} = {auto_map.get(auto)!r}, not {expected.get(auto)!r}: {_SAVE_AGAIN}"
            )
    if fields.get("custom_pipelines"):
        problems.append("config.json names `custom_pipelines`, which a drafter has none of: remove them")
    differing = [name for name, path in MODULES.items() if not _same(folder / name, path)]
    if differing:
        problems.append(f"{', '.join(sorted(differing))} are not those of this version of longspark_hf: {_SAVE_AGAIN}")
    if (folder / "model.safetensors").exists() and any(folder.glob("model-*-of-*.safetensors")):
        problems.append("there are weights in one file and in shards: remove those that are not the drafter's")
    target = config.target_name_or_path
    if hub_id_of(target) is None:
        problems.append(
            f"`target_name_or_path` in config.json is {target!r}, not the Hub id of the target: set it there"
        )
    return config


_SAVE_AGAIN = "load the drafter and save it again by `drafter.save_pretrained`"


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and one.read_bytes() == other.read_bytes()


def _card(
    folder: Path,
    repo_id: str,
    config: LongSparkConfig,
    results: list[dict[str, Any]],
    license: str | None,
    training_data: str | None,
) -> str:
    path = folder / "README.md"
    own = path.read_text(encoding="utf-8") if path.exists() and not is_stock_card(folder) else None
    if own is not None and CARD_MARK not in own:
        return own
    known, origin = _kept_of(own or "")
    return str(
        model_card(
            config,
            repo_id,
            results,
            license=license or known,
            training_data=training_data,
            origin=origin,
            parameters=LongSparkDrafter.without_weights(config).num_parameters(),
        )
    )


def _kept_of(card: str) -> tuple[str | None, str | None]:
    """License and origin of a card that is written anew; nothing else could tell them."""
    try:
        license = ModelCard(card).data.license
    except (ValueError, yaml.YAMLError):
        license = None
    origin = re.search(r"^- (Converted from .*)$", card, re.MULTILINE)
    return license, origin.group(1) if origin else None
