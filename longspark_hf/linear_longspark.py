"""Products of a weight with a few rows on a CPU: what verification passes and drafts are made of.

Knows: the two ways round of such a product, and which is faster on this machine.
Does not know: whose weights they are.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F


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
    """Whether [`weight_first`] is the faster way for so many rows: timed once a process, in some milliseconds."""
    # As in a model, each weight comes from memory: together they are larger than most caches.
    input, weights = torch.ones(num_rows, 1024), torch.ones(4, 2048, 1024).unbind()
    seconds: dict[Callable[..., torch.Tensor], list[float]] = {torch._C._nn.linear: [], weight_first: []}
    with torch.no_grad():
        for _ in range(3):
            for product, times in seconds.items():
                start = time.perf_counter()
                for weight in weights:
                    product(input, weight)
                times.append(time.perf_counter() - start)
    return min(seconds[weight_first]) < 0.9 * min(seconds[torch._C._nn.linear])


def chooses_weight_first(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a call of `linear` is one that [`weight_first`] serves, and faster."""
    if not (type(input) is torch.Tensor and type(weight) in (torch.Tensor, torch.nn.Parameter)):
        return False
    if input.ndim == 0 or input.shape[-1] == 0:
        return False
    num_rows = input.numel() // input.shape[-1]
    return (
        1 < num_rows <= MOST_ROWS
        and weight.ndim == 2
        and weight.numel() >= LEAST_WEIGHT
        and input.dtype == weight.dtype == torch.float32
        and input.device.type == weight.device.type == "cpu"
        and weight.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
        and not torch.are_deterministic_algorithms_enabled()
        and pays(num_rows, torch.get_num_threads())
    )


def _choosing(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`linear` of torch, which takes the faster way in passes that are within [`few_rows`] on this thread."""

    @functools.wraps(linear)
    def choose(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling() or not getattr(choose.longspark_inside, "depth", 0):
            return linear(input, weight, bias)
        return (weight_first if chooses_weight_first(input, weight) else linear)(input, weight, bias)

    choose.longspark_inside, choose.longspark_passes = threading.local(), set()
    return choose


@contextlib.contextmanager
def few_rows() -> Iterator[None]:
    """
    Within it, on this thread, products of large fp32 weights with up to 64 rows on a CPU are computed the faster way round.
    No module is changed: `torch.nn.functional.linear` is another function while a pass is inside.
    """
    one, linear = object(), F.linear
    # No lock, as in attention_longspark: all that threads can take from each other is the faster way.
    try:
        if not hasattr(linear, "longspark_inside"):  # by us or by another copy of this file
            F.linear = linear = _choosing(linear)
        linear.longspark_passes.add(one)
        inside = linear.longspark_inside
        inside.depth = getattr(inside, "depth", 0) + 1
        yield
    finally:
        if hasattr(linear, "longspark_inside"):
            inside, passes = linear.longspark_inside, linear.longspark_passes
            if one in passes:
                inside.depth -= 1
                passes.discard(one)
            if not passes and F.linear is linear:
                F.linear = linear.__wrapped__
