"""A tiny target with a drafter of known acceptance, as the Space's pool holds them, and the Space's modules on the path."""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..targets import VOCAB_SIZE, build, random_drafter, scripted_drafter


SPACE = Path(__file__).parents[2] / "space"
if str(SPACE) not in sys.path:
    sys.path.insert(0, str(SPACE))

NAME, DRAFTER, RANDOM = "tiny", "scripted", "random"
PROMPT = "w5 w9 w30 w41 w7 w66 w12"
NEW_TOKENS = 25  # one follows from the prefill, the others come in rounds


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words `w0` to `w96`, a token each; everything else is `w0`."""
    vocabulary = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def scripted_target(wrong_at: list[int] | None = None, kind: type | None = None):
    """
    A `LoadedTarget` whose first drafter knows the answer to `PROMPT` and is wrong from slot `wrong_at` on, per round in turn.

    Args:
        wrong_at (`list[int]`, *optional*): See `ScriptedDrafter`.
        kind (`type`, *optional*): Class of the drafter.
    """
    from pool import LoadedTarget

    model, tokenizer = build("llama"), word_tokenizer()
    model.config._name_or_path = NAME
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        script = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS + 8, do_sample=False
        )[0]
    drafter = scripted_drafter(model, script, wrong_at)
    if kind is not None:
        drafter.__class__ = kind
    return LoadedTarget(model, tokenizer, {DRAFTER: drafter, RANDOM: random_drafter(model)})


def fill_pool(loaded) -> None:
    """Make `loaded` all that the Space has."""
    from pool import POOL

    POOL.targets.clear()
    POOL.add(loaded)
    POOL.ready, POOL.error = True, None


def space_app():
    """The Space's `app`, whose folder is on the path since this file was imported."""
    import app

    return app
