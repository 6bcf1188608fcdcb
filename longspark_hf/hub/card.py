"""The model card of a drafter: what it is from its config, every figure from a result file.

Knows: which result files there are and what in them belongs on a card.
Does not know: how figures were measured (longspark_hf.evaluation), or how a card gets to the Hub (push).
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from longspark_hf import LongSparkConfig
from longspark_hf.card_longspark import CARD_MARK, card_metadata, card_text


# What a figure means, shown once below the table that has it.
_MEANINGS = {
    "tau": "τ is the mean number of tokens committed per round of `generate`, at most {most}",
    "speedup": "speedup compares whole calls with plain `generate`, prefill included",
}
_NAMES = {"tau": "τ", "speedup": "speedup"}


def model_card(
    config: LongSparkConfig,
    repo_id: str,
    results: Iterable[dict[str, Any]] = (),
    license: str | None = None,
    training_data: str | None = None,
    origin: str | None = None,
    parameters: int | None = None,
    sections: str = "",
) -> ModelCard:
    r"""
    The card of a drafter.

    Args:
        config ([`LongSparkConfig`]): Of the drafter.
        repo_id (`str`): `user/name`, as the line that loads the drafter shows it.
        results (`Iterable[dict]`, *optional*):
            Contents of result files: of `longspark bench`, or with `tau` by prompt set and temperature, as `results.json` of the
            shipped drafter has it. All figures come from them; without any, the card has none.
        license (`str`, *optional*): Identifier of the Hub, such as `apache-2.0`.
        training_data (`str`, *optional*): What the drafter was trained on, in a sentence.
        origin (`str`, *optional*): Where the weights come from, in a sentence.
        parameters (`int`, *optional*): Number of parameters.
        sections (`str`, *optional*): Further sections in Markdown, after the training; for instance ablations.

    Returns:
        `huggingface_hub.ModelCard`

    Raises:
        `ValueError`: if a result is of a kind that is not known, lacks its provenance or is of another target.
    """
    results = list(results)
    figures = [figure for result in results for figure in _figures(result, config)]
    name = repo_id.rpartition("/")[2]
    metadata = card_metadata(config, license=license)
    if figures:
        metadata |= {"model_name": name, "eval_results": [_eval_result(figure) for figure in figures]}
    middle = ""
    if parameters is not None:
        middle += f"| parameters | {parameters / 1e6:,.1f}M |\n"
    middle += _measured(figures, results, config) + _training(results, config, training_data)
    middle += f"\n{sections.strip()}\n" if sections.strip() else ""
    middle += _provenance(results, origin, config)
    data = ModelCardData(**metadata)
    text = card_text(config, repo_id, middle)
    if training_data or sections:
        text = (
            text.replace(CARD_MARK, "").rstrip() + "\n"
        )  # what only the caller knows would be lost in writing it anew
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}")


def read_results(folder: str | os.PathLike) -> dict[str, dict[str, Any]]:
    """
    The result files in a drafter's folder that hold figures for its card, by name.

    Args:
        folder (`str` or `os.PathLike`): Folder; only its own `*.json` are looked at.
    """
    found = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if (
            isinstance(content, dict)
            and "provenance" in content
            and ("tau" in content or content.get("kind") == "bench")
        ):
            found[path.name] = content
    return found


def check_card(text: str) -> list[str]:
    """What a card lacks to be found and understood on the Hub; empty if nothing."""
    try:
        data = ModelCard(text).data.to_dict()
    except (ValueError, yaml.YAMLError) as error:
        return [f"README.md has metadata that cannot be read ({' '.join(str(error).split())})"]
    lacking = [key for key in ("library_name", "base_model", "pipeline_tag", "license") if not data.get(key)]
    problems = [f"README.md has no `{key}` in its metadata" for key in lacking]
    if missing := sorted({"longspark", "speculative-decoding"} - set(data.get("tags") or [])):
        problems.append(f"README.md lacks the tags {', '.join(missing)}")
    return problems


def _figures(result: dict[str, Any], config: LongSparkConfig) -> list[dict[str, Any]]:
    """Figures of one result file: prompt set, temperature, metric, value, sizes, and where they were measured."""
    source = result.get("provenance")
    if not isinstance(source, dict) or not source.get("date"):
        raise ValueError("A result without its provenance goes on no card. Write it by `longspark bench --output`.")
    _check_target(result, config)
    if result.get("kind") == "bench":
        rows = [row for row in result["rows"] if row["method"] == "longspark"]
        return [
            {
                "set": row["task"],
                "temperature": row["temperature"],
                "metric": metric,
                "value": row[metric],
                "size": f"{row['prompts']} prompts, {row['new_tokens']:,.0f} new tokens",
                "source": source,
            }
            for row in rows
            for metric in ("tau", "speedup")
            if row[metric] is not None
        ]
    if not isinstance(result.get("tau"), dict):
        raise ValueError(
            f"A result with the keys {', '.join(sorted(result))} is of no known kind. Pass those of `longspark bench`, or ones "
            "with `tau` by prompt set and temperature."
        )
    size = f"{result['prompts_per_set']} prompts, {result['new_tokens']} new tokens"
    return [
        {"set": name, "temperature": float(t), "metric": "tau", "value": value, "size": size, "source": source}
        for name, values in result["tau"].items()
        for t, value in values.items()
    ]


def _check_target(result: dict[str, Any], config: LongSparkConfig) -> None:
    measured, made_for = (str(name or "").rstrip("/") for name in (result.get("target"), config.target_name_or_path))
    if measured and made_for and measured.rpartition("/")[2] != made_for.rpartition("/")[2]:
        raise ValueError(
            f"The result was measured with {measured}, this drafter was made for {made_for}: it goes on another card."
        )


def _eval_result(figure: dict[str, Any]) -> EvalResult:
    source = figure["source"]
    return EvalResult(
        task_type="text-generation",
        dataset_type=figure["set"],
        dataset_name=f"{figure['set']} ({figure['size']})",
        metric_type=figure["metric"],
        metric_name=f"{_NAMES[figure['metric']]} at T = {figure['temperature']:g}, {source['dtype']}, {source['device']}",
        metric_value=round(figure["value"], 4),
        metric_args={"temperature": figure["temperature"]},
    )


def _measured(figures: list[dict[str, Any]], results: list[dict[str, Any]], config: LongSparkConfig) -> str:
    if not figures:
        return ""
    columns = sorted({(f["metric"], f["temperature"]) for f in figures}, key=lambda c: (c[0] != "tau", c[1]))
    sets = list(dict.fromkeys((f["set"], f["size"], _place(f["source"])) for f in figures))
    values = {(f["set"], f["size"], _place(f["source"]), f["metric"], f["temperature"]): f["value"] for f in figures}
    # What all rows have in common is said once.
    places, sizes = {place for *_, place in sets}, {size for _, size, _ in sets}
    lines = ["", "## Measured", ""]
    heads = [f"{_NAMES[metric]} at T = {temperature:g}" for metric, temperature in columns]
    lines.append("| prompts | " + " | ".join(heads) + " |")
    lines.append("|---|" + "--:|" * len(heads))
    for name, size, place in sets:
        cells = [values.get((name, size, place, *column)) for column in columns]
        more = "".join(f", {text}" for text, kinds in ((size, sizes), (place, places)) if len(kinds) > 1)
        shown = ["-" if cell is None else f"{cell:.2f}" for cell in cells]
        lines.append(f"| {name}{more} | " + " | ".join(shown) + " |")
    metrics = dict.fromkeys(metric for metric, _ in columns)
    meaning = "; ".join(_MEANINGS[metric].format(most=config.block_size + 1) for metric in metrics)
    common = "".join(f" {', '.join(kinds)}." for kinds in (sizes, places) if len(kinds) == 1)
    return "\n".join([*lines, "", f"{meaning}.{common}", ""])


def _training(results: list[dict[str, Any]], config: LongSparkConfig, training_data: str | None) -> str:
    training = next((result["training"] for result in results if result.get("training")), None)
    if training is None and training_data is None:
        return ""
    lines = ["", "## Training data", ""]
    if training_data is not None:
        lines.append(training_data.strip())
    if training is not None:
        metrics, source = training["metrics_of_the_best_checkpoint"], training["provenance"]
        # Files' names alone: the folders they lay in are nobody's business.
        paths = [str(run.get("data") or "") for run in [*training.get("earlier_runs", []), source]]
        data = dict.fromkeys(f"`{name}`" for path in paths if (name := path.replace("\\", "/").rpartition("/")[2]))
        steps = f"{metrics['step']:,} optimizer steps over {metrics['eval_anchors_seen']:,} anchors"
        lines.append(
            f"{steps}{' from ' if data else ''}{', then '.join(data)}, {source['dtype']} on {source['device']}, {source['date']}."
        )
    evaluations = next((result["evaluations"] for result in results if result.get("evaluations")), [])
    columns = {"eval_tau": "τ on held-out prompts", "eval_simulated_tau": "simulated τ"}
    columns = {key: head for key, head in columns.items() if any(key in e for e in evaluations)}
    if evaluations and columns:
        lines += [
            "",
            f"| steps | anchors seen | {' | '.join(columns.values())} |",
            "|--:|--:|" + "--:|" * len(columns),
        ]
        for e in evaluations:
            cells = ["-" if e.get(key) is None else f"{e[key]:.2f}" for key in columns]
            lines.append(f"| {e['step']:,} | {e['eval_anchors_seen']:,} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _provenance(results: list[dict[str, Any]], origin: str | None, config: LongSparkConfig) -> str:
    lines = [origin.strip()] if origin else []
    for source in {
        json.dumps(result["provenance"], sort_keys=True): result["provenance"] for result in results
    }.values():
        versions = {
            key: source.get(key) for key in ("longspark_hf", "git_revision", "torch", "transformers", "python")
        }
        shown = ", ".join(f"{key.replace('git_', '')} {value}" for key, value in versions.items() if value)
        lines.append(
            f"Figures: {_place(source)}, {source['date']}, {shown}; in full in the result files beside this card."
        )
    if config.target_tokenizer:
        lines.append(f"Tokenizer of the target: `{config.target_tokenizer}`.")
    return "\n".join(["", "## Provenance", "", *(f"- {line}" for line in lines), ""]) if lines else ""


def _place(source: dict[str, Any]) -> str:
    threads = source.get("threads")
    cores = f", {threads} thread{'s' * (threads > 1)}" if threads and "CPU" in str(source.get("device")) else ""
    return f"{source.get('dtype')} on {source.get('device')}{cores}"
