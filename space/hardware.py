"""Which machine this is: `spaces.GPU` where there is one, one piece of model work at a time, running out of memory.

Imported before torch: `spaces` has to come first on ZeroGPU.
"""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


try:
    import spaces
except ImportError:  # anywhere but on Hugging Face
    spaces = None

import torch
from limits import Refusal


ON_ZERO_GPU = spaces is not None and os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")
# Gradio runs one model job at a time; a stopped one may still be in its last layer when the next begins.
_ONE_AT_A_TIME = threading.Lock()
# glibc keeps freed blocks, and a heap for every thread that ever allocated; with each race it would keep more.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def on_gpu(duration: Callable[..., int]) -> Callable[[Callable], Callable]:
    """
    Decorator for module-level functions that run models.

    Args:
        duration (`Callable`): Seconds of GPU time to ask ZeroGPU for, from the arguments of the decorated function.
    """
    return (lambda function: function) if spaces is None else spaces.GPU(duration=duration)


@contextmanager
def model_work(what: str) -> Iterator[None]:
    """
    Around everything that runs a model.

    Args:
        what (`str`): What was asked for, for the message when memory runs out.

    Raises:
        `Refusal`: in place of an out-of-memory error of any kind.
    """
    ran_out = False
    with _ONE_AT_A_TIME:
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            ran_out = True  # raised below: here the traceback would keep the tensors alive
        finally:
            release_memory()
    if ran_out:
        release_memory()
        raise Refusal(
            f"This machine ran out of memory for {what}. Nothing of it is left behind; choose a shorter context or fewer "
            "new tokens and try again."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)  # torch's allocator on the CPU


def release_memory() -> None:
    """Give back what nothing refers to, to the device and to the operating system."""
    gc.collect()
    if _TRIM is not None:
        _TRIM(0)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def device_name() -> str:
    """What the numbers are measured on, in words."""
    if torch.cuda.is_available():
        return "a GPU of ZeroGPU" if ON_ZERO_GPU else torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"a CPU with {threads} thread{'s' * (threads > 1)}"


def wait_for(device: Any) -> None:
    """Until an accelerator has done what was asked of it, so that a clock tells the truth."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
