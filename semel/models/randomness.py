"""Whose random numbers a model draws: torch's own, or those of the piece of work it is part of.

Two threads that draw from one generator get numbers in the order in which they come; a training step that is shared out
to threads gives each its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_current: ContextVar[torch.Generator | None] = ContextVar("semel_generator", default=None)


def generator() -> torch.Generator | None:
    """The generator to pass to torch's random functions; None is torch's default one."""
    return _current.get()


@contextmanager
def drawing_from(source: torch.Generator) -> Iterator[None]:
    """Within the block, and in this thread, models draw from ``source``."""
    token = _current.set(source)
    try:
        yield
    finally:
        _current.reset(token)
