"""Lengths of time as people write them."""

from __future__ import annotations

import re
import time
from datetime import timedelta

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def now() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


def microseconds(value: timedelta | str, name: str) -> int:
    """A timedelta or text like ``90d``, ``12h``, ``30m``, ``45s``, ``2w``. ValueError, naming ``name``, for anything
    else and for nothing or less."""
    found = 0
    if isinstance(value, timedelta):
        found = value // timedelta(microseconds=1)
    elif isinstance(value, str) and (match := re.fullmatch(r"(\d+)([smhdw])", value.strip())):
        found = int(match[1]) * _UNITS[match[2]] * 1_000_000
    if found <= 0:
        raise ValueError(f'{name} must be a length of time such as "90d", "12h" or a timedelta, got {value!r}')
    return found
