"""What the parts of a round take at least: bytes and operations over what this machine can do, measured beside them.

Knows: what each part must read, write and compute. Does not know: how a round is timed (profile).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from longspark_hf import LongSparkDrafter

from .sweep import synchronize


# Sides of the matrices that are read and multiplied: beyond what a processor keeps near, and enough to be busy with.
READ_SIZE = {"cpu": 8192, "cuda": 16384}
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
PROBES = 5  # at each sampling


@dataclass
class Ceilings:
    r"""
    How fast this process reads memory and multiplies, now: samples are taken between the calls they are compared with.

    Args:
        device (`torch.device`): Of the models.
        dtype (`torch.dtype`): In which matrices are multiplied. Reading is by a matrix-vector product in fp32 everywhere.
    """

    device: torch.device
    dtype: torch.dtype
    bandwidth: list[float] = field(default_factory=list)  # bytes a second
    peak: list[float] = field(default_factory=list)  # operations a second

    def sample(self) -> None:
        """Take some more samples of both."""
        kind = "cuda" if self.device.type == "cuda" else "cpu"
        size = READ_SIZE[kind]
        matrix = torch.ones(size, size, device=self.device)
        self.bandwidth += [matrix.nbytes / seconds for seconds in self._seconds(lambda: matrix @ matrix[0])]
        size = MATMUL_SIZE[kind]
        square = torch.ones(size, size, device=self.device, dtype=self.dtype)
        self.peak += [2 * size**3 / seconds for seconds in self._seconds(lambda: square @ square)]

    def _seconds(self, call: Callable[[], Any]) -> list[float]:
        found = []
        for _ in range(PROBES + 1):
            synchronize(self.device)
            start = time.perf_counter()
            call()
            synchronize(self.device)
            found.append(time.perf_counter() - start)
        return found[1:]

    def medians(self) -> dict[str, float]:
        """Medians of all samples."""
        return {
            "bytes_per_second": statistics.median(self.bandwidth),
            "operations_per_second": statistics.median(self.peak),
        }


@dataclass
class RoundWork:
    r"""
    What a round of one sequence moves and computes, where every weight is read once a pass and nothing stays near the processor
    from one pass to the next. A multiplication with its addition is two operations; norms, softmax and rotary are left out.

    Args:
        weights (`int`): Bytes of the target's weights that a pass reads, head included; all experts of a mixture count.
        matrices (`int`): Of them, elements that every token is multiplied with.
        cache_bytes (`int`): Of the target's K/V rows behind the prompt.
        attended (`int`): Elements of its keys and values that a token is multiplied with, over all query heads.
        trunk_bytes, trunk_operations, head_rows, hidden_size, head_itemsize, markov_bytes, markov_matrix (`int`):
            Of the draft pass: its weights and state, its operations, and the shapes of head and Markov chain.
        vocab_size (`int`): Of the target's logits.
    """

    weights: int
    matrices: int
    cache_bytes: int
    attended: int
    trunk_bytes: int
    trunk_operations: int
    head_rows: int
    hidden_size: int
    head_itemsize: int
    markov_bytes: int
    markov_matrix: int
    vocab_size: int

    @classmethod
    def of(cls, target: PreTrainedModel, drafter: LongSparkDrafter, cache: Cache, state_bytes: int) -> "RoundWork":
        """
        Count a pair of models.

        Args:
            target (`PreTrainedModel`), drafter ([`LongSparkDrafter`]): The models.
            cache (`Cache`): Of the target, with the prompt in it and no room to spare.
            state_bytes (`int`): Of the drafter's state.
        """
        config, heads = drafter.config, target.get_output_embeddings()
        embedding = target.get_input_embeddings().weight
        # Of the embedding table a pass reads its tokens' rows only, unless it is the head, too.
        weights = {id(p): p for p in target.get_decoder().parameters() if p is not embedding}
        weights |= {id(p): p for p in heads.parameters()}
        layers = [layer for layer in cache.layers if layer.is_initialized]
        query_heads = target.config.get_text_config(decoder=True).num_attention_heads

        trunk = {n: p for n, p in drafter.named_parameters() if not n.startswith("markov_head.")}
        slots = {n: config.block_size for n in trunk if n.startswith(("layers.", "input_mapping."))}
        slots |= {n: 1 for n in trunk if n.startswith("boundary_fusion.")}
        operations = sum(2 * slots.get(n, 0) * p.numel() for n, p in trunk.items() if p.ndim == 2)
        seen = config.num_summary_queries + config.window_size + config.block_size
        width = config.num_attention_heads * config.head_dim
        operations += 4 * config.num_hidden_layers * config.block_size * width * seen
        w2 = drafter.markov_head.w2.weight
        return cls(
            weights=sum(p.nbytes for p in weights.values()),
            matrices=sum(p.numel() for p in weights.values() if p.ndim >= 2),
            cache_bytes=sum(layer.keys.nbytes + layer.values.nbytes for layer in layers),
            attended=sum(2 * layer.keys.numel() * query_heads // layer.keys.shape[1] for layer in layers),
            trunk_bytes=sum(p.nbytes for p in trunk.values()) + state_bytes,
            trunk_operations=operations,
            head_rows=config.draft_vocab_size or config.vocab_size,
            hidden_size=config.hidden_size,
            head_itemsize=embedding.element_size(),
            markov_bytes=w2.nbytes,
            markov_matrix=w2.numel(),
            vocab_size=config.vocab_size,
        )

    def demand(self, part: str, drafted: int) -> tuple[int, int] | None:
        """
        Bytes and operations of a part; `None` for one that is neither a pass nor part of it.

        Args:
            part (`str`): Of a round.
            drafted (`int`): Tokens drafted in it.
        """
        if part == "draft":
            wanted = [self.demand(one, drafted) for one in ("trunk", "head", "markov")]
            return tuple(map(sum, zip(*wanted)))
        verified, logits = drafted + 1, drafted * self.head_rows
        demands = {
            "verify": (
                self.weights + self.cache_bytes + verified * self.vocab_size * self.head_itemsize,
                2 * verified * (self.matrices + self.attended),
            ),
            "trunk": (self.trunk_bytes, self.trunk_operations),
            "head": (
                (self.head_rows * self.hidden_size + logits) * self.head_itemsize,
                2 * logits * self.hidden_size,
            ),
            # One step needs the token of the step before it. Each reads its base logits and leaves fp32 ones.
            "markov": (
                drafted * self.markov_bytes + logits * (self.head_itemsize + 4),
                2 * drafted * self.markov_matrix,
            ),
        }
        return demands.get(part)

    def floor(self, part: str, drafted: int, ceilings: Ceilings) -> dict[str, float]:
        """What a part moves, computes and takes at least; empty for one without a floor."""
        demand = self.demand(part, drafted)
        if demand is None:
            return {}
        can = ceilings.medians()
        seconds = max(demand[0] / can["bytes_per_second"], demand[1] / can["operations_per_second"])
        return {"bytes": demand[0], "operations": demand[1], "floor_ms": 1e3 * seconds}
