"""Products of a weight with a few rows on a CPU: what verification passes and drafts are made of.

Knows: the two ways round of such a product, and which is faster on this machine.
Does not know: whose weights they are.
"""

import contextlib
import functools
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from .patching_longspark import marks, patched


# Elements of a weight; below it a product costs less than the choice.
LEAST_WEIGHT = 2**16
MOST_ROWS = 64


def weight_first(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    r"""
    `torch.nn.functional.linear` as the product of the weight with the rows for columns. Some BLAS libraries read a weight
    once for a few columns, where for a few rows they first rearrange all of it.

    Args:
        input (`torch.Tensor` of shape `(..., in_features)`): A few rows.
        weight (`torch.Tensor` of shape `(out_features, in_features)`): As of `nn.Linear`.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): Added to each row.

    Returns:
        `torch.Tensor` of shape `(..., out_features)`, contiguous
    """
    columns = weight @ input.reshape(-1, input.shape[-1]).T
    output = columns.T.contiguous().view(*input.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias


@functools.cache
def pays(num_rows: int, num_threads: int) -> bool:
    """Whether [`weight_first`] is the faster way for so many rows: timed once a process, in some ten milliseconds."""
    # As in a model, each weight comes from memory: together they are larger than most caches.
    fp32 = {"dtype": torch.float32, "device": "cpu"}
    input, weights = torch.ones(num_rows, 1024, **fp32), torch.ones(4, 2048, 1024, **fp32).unbind()
    seconds: dict[Callable[..., torch.Tensor], list[float]] = {torch._C._nn.linear: [], weight_first: []}
    with torch.no_grad():
        for _ in range(3):
            for product, times in seconds.items():
                start = time.perf_counter()
                for weight in weights:
                    product(input, weight)
                times.append(time.perf_counter() - start)
    return min(seconds[weight_first]) < 0.9 * min(seconds[torch._C._nn.linear])


def time_products(target: PreTrainedModel, num_rows: int) -> None:
    """Time what passes of up to `num_rows` will ask for, so that none of them has to while it is timed itself."""
    if any(suits(parameter) for parameter in target.parameters()):
        for size in (2**exponent for exponent in range(1, min(num_rows, MOST_ROWS).bit_length())):
            pays(size, torch.get_num_threads())


def suits(weight: torch.Tensor) -> bool:
    """Whether a weight is one that [`weight_first`] takes."""
    return (
        type(weight) in (torch.Tensor, torch.nn.Parameter)
        and not weight.is_nested
        and weight.layout == torch.strided
        and weight.ndim == 2
        and weight.numel() >= LEAST_WEIGHT
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
    )


def chooses_weight_first(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a call of `linear` is one that [`weight_first`] serves, and faster."""
    if type(input) is not torch.Tensor or input.is_nested or input.layout != torch.strided or not suits(weight):
        return False
    if input.ndim == 0 or input.shape[-1] != weight.shape[1] or input.dtype != weight.dtype:
        return False
    if input.device != weight.device or (
        bias is not None and (bias.shape, bias.dtype) != (weight.shape[:1], input.dtype)
    ):
        return False
    num_rows = input.numel() // input.shape[-1]
    return (
        1 < num_rows <= MOST_ROWS
        and not torch.is_autocast_enabled("cpu")
        and not torch.are_deterministic_algorithms_enabled()
        and pays(2 ** (num_rows.bit_length() - 1), torch.get_num_threads())  # of the power of two below
    )


def _choosing(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`linear` of torch, which takes the faster way in passes that are within [`few_rows`] on this thread."""

    @functools.wraps(linear)
    def choose(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling() or not marks(choose):
            return linear(input, weight, bias)
        return (weight_first if chooses_weight_first(input, weight, bias) else linear)(input, weight, bias)

    return choose


def few_rows() -> contextlib.AbstractContextManager[None]:
    """
    Within it, on this thread, products of large fp32 weights with up to 64 rows on a CPU are computed the faster way round.
    No module is changed: `torch.nn.functional.linear` is another function while a pass is inside.
    """
    return patched(lambda: F.linear, functools.partial(setattr, F, "linear"), _choosing)
