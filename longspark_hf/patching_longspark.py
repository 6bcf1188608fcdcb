"""A function of another library, replaced while passes of ours are inside, and for their thread only.

Knows: threads, nested and interrupted passes, other copies of this file, patches of others.
Does not know: which function it is, or what replaces it (attention_longspark, linear_longspark).
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


def marks(patch: Callable[..., Any]) -> list[Any]:
    """The marks of the passes that are inside on this thread; empty where the patch is to do what it replaces."""
    return [mark for _, mark in getattr(patch.longspark_inside, "passes", ())]


@contextlib.contextmanager
def patched(
    get: Callable[[], Callable[..., Any]],
    put: Callable[[Callable[..., Any]], Any],
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    mark: Any = True,
) -> Iterator[None]:
    r"""
    Within it, a function is another one, made by `make`; once the last pass of any thread has left, it is itself again.

    Args:
        get (`Callable`): Returns the function that is in place.
        put (`Callable`): Puts a function in its place.
        make (`Callable`): Given the function, returns the one that replaces it, made by `functools.wraps`. That one asks
            [`marks`] about itself for the passes of its thread.
        mark (`Any`, *optional*, defaults to `True`): Of this pass.
    """
    one, patch = object(), None
    # No lock: Ctrl-C could leave it closed, and all that threads can take from each other is the faster way.
    try:
        patch = get()
        if not _is_ours(patch):
            patch = make(patch)
            patch.longspark_inside, patch.longspark_passes, patch.longspark_self = threading.local(), set(), patch
            put(patch)
        patch.longspark_passes.add(one)
        inside = patch.longspark_inside
        inside.passes = (*getattr(inside, "passes", ()), (one, mark))
        yield
    finally:
        if _is_ours(patch):
            inside, passes = patch.longspark_inside, patch.longspark_passes
            inside.passes = tuple(other for other in getattr(inside, "passes", ()) if other[0] is not one)
            passes.discard(one)
            if not passes and get() is patch:
                put(patch.__wrapped__)


def _is_ours(function: Callable[..., Any] | None) -> bool:
    """Whether this or another copy of this file made a function; a wrapper around it has copied its attributes."""
    return function is not None and getattr(function, "longspark_self", None) is function
