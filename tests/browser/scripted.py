"""A tiny target with a drafter of known acceptance, as the Space's pool holds them, a race of them, other things for tests to
work on, and the Space's modules on the path."""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..targets import VOCAB_SIZE, ScriptedDrafter, build, random_drafter, scripted_drafter


SPACE = Path(__file__).parents[2] / "space"
if str(SPACE) not in sys.path:
    sys.path.insert(0, str(SPACE))

NAME, DRAFTER, RANDOM = "tiny", "scripted", "random"
PROMPT = "w5 w9 w30 w41 w7 w66 w12"
NEW_TOKENS = 25  # one follows from the prefill, the others come in rounds

PDF = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>endobj
4 0 obj<</Length 47>>stream
BT /F1 12 Tf 20 100 Td (A glacier flows.) Tj ET
endstream endobj
5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj
trailer<</Root 1 0 R/Size 6>>
startxref
0
%%EOF
"""


class FailingDrafter(ScriptedDrafter):
    """Raises `failure` in its second round."""

    failure: Exception | None = None
    act = None

    def draft(self, *args, **kwargs):
        if self.round == 1 and self.failure is not None:
            raise self.failure
        if self.round == 1 and self.act is not None:
            self.act()
        return super().draft(*args, **kwargs)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words `w0` to `w96`, a token each; everything else is `w0`."""
    vocabulary = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


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


def run(
    stop=None, prompt=PROMPT, document="", context=0, new_tokens=NEW_TOKENS, temperature=0.0, block_size=0, **names
):
    """A race to its end; the last view."""
    import actions
    from stopping import Stop

    stop = stop or Stop()
    names = {"target": NAME, "drafter": DRAFTER} | names
    try:
        return list(
            actions.run_race(
                prompt,
                document,
                context,
                names["target"],
                names["drafter"],
                temperature,
                new_tokens,
                block_size,
                stop,
            )
        )[-1]
    finally:
        stop.clear()


def space_app():
    """The Space's `app`, whose folder is on the path since this file was imported."""
    import app

    return app
