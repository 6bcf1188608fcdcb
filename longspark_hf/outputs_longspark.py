"""What a call returns beside its tokens: scores, logits, hidden states and attentions in the shapes of plain `generate`.

Knows: which of them a call asks for, and what plain `generate` has in their place for a sequence that ended.
Does not know: which tokens are committed, or when (decoding_longspark).
"""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput


class CallOutputs:
    r"""
    Collects what one `generate` call asks for.

    Args:
        generation_config (`GenerationConfig`): Prepared by `generate`.
        model_kwargs (`dict`): Of the call; the cache is returned under the name that it has there.
        cache (`Cache`): Of the target.
        batch_size (`int`): Of the call.
    """

    def __init__(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], cache: Cache, batch_size: int
    ):
        self.config, self.cache = generation_config, cache
        self.cache_name = next(name for name, value in model_kwargs.items() if value is cache)
        self.wanted = [
            name
            for name in ("scores", "logits", "hidden_states", "attentions")
            if generation_config.return_dict_in_generate and getattr(generation_config, f"output_{name}")
        ]
        self._of: dict[str, list[list[Any]]] = {name: [[] for _ in range(batch_size)] for name in self.wanted}
        self._prompt: dict[str, tuple[torch.Tensor, ...]] = {}

    def take_prompt(self, outputs: Any) -> None:
        """Keep what the prefill says of the prompt."""
        self._prompt = {name: outputs[name] for name in self.wanted if name in ("hidden_states", "attentions")}

    def take_token(
        self, b: int, place: int, index: int, scores: torch.Tensor, logits: torch.Tensor, outputs: Any
    ) -> None:
        r"""
        Args:
            b (`int`): Sequence that a token was committed to.
            place (`int`): Its place in this pass.
            index (`int`): The token's row in this pass.
            scores, logits (`torch.Tensor` of shape `(running, num_new, vocab_size)`): Processed, and as they came.
            outputs (`ModelOutput`): Of the pass.
        """
        for name in self.wanted:
            if name == "scores":
                one = scores[place, index].clone()  # a view would keep the whole pass
            elif name == "logits":
                one = logits[place, index].clone()
            elif name == "hidden_states":
                one = tuple(layer[place, None, index].clone() for layer in outputs.hidden_states)
            else:
                later = logits.shape[1] - 1 - index
                layers = zip(outputs.attentions, self.cache.layers)
                one = tuple(self._attention(weights, layer, index, later) for weights, layer in layers)
            self._of[name][b].append(one)

    def _attention(self, weights: torch.Tensor, layer: Any, index: int, later: int) -> torch.Tensor:
        if self.cache.is_compileable:  # a static cache shows all it has
            return weights[0, :, index : index + 1].clone()
        end = weights.shape[-1] - later  # without later drafts, and what had left the window by then
        start = max(end - layer.sliding_window, 0) if layer.is_sliding else 0
        return weights[0, :, index : index + 1, start:end].clone()

    def scores(self, b: int, batch_size: int) -> tuple[torch.Tensor, ...] | None:
        """Scores so far of a sequence, in every place of a batch, for criteria that read them."""
        return tuple(row.expand(batch_size, -1) for row in self._of["scores"][b]) if "scores" in self.wanted else None

    def assemble(self, ids: torch.LongTensor, steps: int) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        r"""
        Args:
            ids (`torch.LongTensor` of shape `(batch_size, length + steps)`): Prompt and answer.
            steps (`int`): Tokens of the longest answer.

        Returns:
            What `generate` returns.
        """
        if not self.config.return_dict_in_generate:
            return ids
        found: dict[str, Any] = {"sequences": ids, self.cache_name: self.cache}
        for name in self.wanted:
            if name in self._prompt:
                layers = range(len(self._prompt[name]))
                later = (tuple(self._at_step(name, step, layer) for layer in layers) for step in range(1, steps))
                found[name] = (self._prompt[name], *later)
            else:
                found[name] = tuple(self._at_step(name, step) for step in range(steps))
        return GenerateDecoderOnlyOutput(**found)

    def _at_step(self, name: str, step: int, layer: int | None = None) -> torch.Tensor:
        """One output of all sequences at a step; zeros for those that ended before."""
        rows = [
            (row[step] if layer is None else row[step][layer]) if step < len(row) else None for row in self._of[name]
        ]
        some = next(row for row in rows if row is not None)
        return torch.stack([torch.zeros_like(some) if row is None else row for row in rows])
