"""A drafter as a repository: loaded from one, after a look at it; saved and uploaded as one that loads anywhere.

Knows: what is checked before memory is spent, what a saved drafter brings along.
Does not know: the layout of weight files (weights_longspark), what a card says (card_longspark), what is computed.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers import __version__ as transformers_version

from .card_longspark import CARD_TAGS, is_stock_card, write_card
from .weights_longspark import RELEASED_NAMES, check_weights, hub_arguments, tensor_shapes


class LongSparkRepository:
    """The part of a drafter that loads and saves it; stands before `PreTrainedModel`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        r"""
        Load a drafter in our format or a released checkpoint (`Hehy/LongSpark-Qwen3-*`).

        Only safetensors are read, and their headers are compared with the config before memory is spent.

        Args:
            pretrained_model_name_or_path (`str`): Hub id or local folder.
            kwargs (`Any`): As for `PreTrainedModel.from_pretrained`.

        Raises:
            `ValueError`: if the repository is not a drafter's; if the weights are a pickle, truncated, lack a tensor the
                config asks for, hold one it does not, or one of another shape.
        """
        if kwargs.pop("use_safetensors", True) is False:
            raise ValueError("Drafters are loaded from safetensors only: leave out `use_safetensors=False`.")
        with_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("key_mapping", RELEASED_NAMES)
        if pretrained_model_name_or_path is not None and kwargs.get("gguf_file") is None:
            kwargs = cls._check_repository(pretrained_model_name_or_path, kwargs)
        drafter, info = super().from_pretrained(
            pretrained_model_name_or_path,
            *args,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            **kwargs,
        )
        # The headers were in order; this guards against a loader that leaves a tensor out all the same.
        problems = {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
            "of another shape": [
                f"{name} {tuple(a)}, not {tuple(b)}" for name, a, b in sorted(info["mismatched_keys"])
            ],
        }
        if any(problems.values()):
            raise ValueError(
                f"The weights of {pretrained_model_name_or_path} were not all loaded. "
                + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names)
                + f". Pass no `key_mapping` of your own, and report this with transformers {transformers_version}."
            )
        if "disk" in (getattr(drafter, "hf_device_map", None) or {}).values() and drafter.summary_queries.is_meta:
            raise ValueError(
                f"`device_map` leaves the whole drafter on disk ({drafter.hf_device_map}), where it cannot draft. Load it beside its "
                "target, for instance with `device_map={'': target.device}`; it needs the memory of its weights and little more."
            )
        ids = drafter.draft_token_ids
        if (
            ids is not None
            and not ids.is_meta
            and (ids.diff() <= 0).any() | (ids[0] < 0) | (ids[-1] >= drafter.config.vocab_size)
        ):
            raise ValueError(
                f"`draft_token_ids` in {pretrained_model_name_or_path} are not ascending tokens below `vocab_size` "
                f"({drafter.config.vocab_size}): they lie between {ids.min()} and {ids.max()}. The file is damaged."
            )
        drafter._weight_conversions = []  # or saving would write the released names back
        return (drafter, info) if with_info else drafter

    @classmethod
    def without_weights(cls, config: PreTrainedConfig) -> Any:
        """
        A drafter on the meta device, to count and to compare.

        Args:
            config ([`LongSparkConfig`]): Of the drafter.
        """
        with torch.device("meta"):
            return cls(config)

    @classmethod
    def _check_repository(cls, source: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Raise before memory is spent if config and weights are not those of one drafter; `kwargs` with the config read."""
        config, where = kwargs.get("config"), hub_arguments(kwargs)
        # Never by our class: remote code may bring a copy of its own, and transformers another one for the config.
        if not isinstance(config, PreTrainedConfig):
            fields, _ = cls.config_class.get_config_dict(source if config is None else config, **where)
            found = fields.get("model_type")
        else:
            fields, found = None, config.model_type
        if found != cls.config_class.model_type:
            raise ValueError(
                f"{source} is a `{found}` model, not a LongSpark drafter. Pass it as the target, and load a drafter made for it."
            )
        if fields is not None:
            # Arguments that are fields of the config override it, as in `PreTrainedModel.from_pretrained`.
            kwargs.pop("config", None)
            config, kwargs = cls.config_class.from_dict(fields, return_unused_kwargs=True, **kwargs)
            kwargs["config"] = config
        check_weights(source, tensor_shapes(cls.without_weights(config)), kwargs.get("variant"), **where)
        kwargs.pop("force_download", None)  # done
        return kwargs

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        r"""
        Save a repository that loads anywhere: config, safetensors, the modules that define the drafter, and a short card
        where there is none yet.

        Args:
            save_directory (`str` or `os.PathLike`): Folder.
            is_main_process, state_dict, push_to_hub, kwargs: As for `PreTrainedModel.save_pretrained`.
        """
        super().save_pretrained(
            save_directory,
            is_main_process=is_main_process,
            state_dict=state_dict,
            push_to_hub=push_to_hub,
            **kwargs,
        )
        if is_main_process and not push_to_hub:
            write_card(self.config, save_directory)

    def push_to_hub(self, repo_id: str, *, tags: list[str] | None = None, **kwargs: Any) -> str:
        r"""
        Upload what [`~LongSparkDrafter.save_pretrained`] writes. `longspark push` shows it first, and adds measured figures.

        Args:
            repo_id (`str`): `user/name`.
            tags (`list[str]`, *optional*): Of the card, beside ours.
            kwargs (`Any`): As for `PreTrainedModel.push_to_hub`.
        """
        return super().push_to_hub(repo_id, tags=list(dict.fromkeys([*CARD_TAGS, *(tags or [])])), **kwargs)

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        # `push_to_hub` puts the stock card of transformers where the repository has none, which says nothing.
        if is_stock_card(working_dir):
            (Path(working_dir) / "README.md").unlink()
            write_card(self.config, working_dir, repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)
