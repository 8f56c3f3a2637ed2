"""Time split: all users' requests before one date train, those after it validate and test."""

from __future__ import annotations

import numpy as np

from semel.batch import RequestRows

SPLITS = ("train", "validation", "test")


def time_boundaries(event_time: np.ndarray, validation_fraction: float, test_fraction: float) -> tuple[int, int]:
    """The times (microseconds) at which validation and test begin, so that these shares of all events come after."""
    if validation_fraction < 0 or test_fraction < 0 or validation_fraction + test_fraction >= 1:
        raise ValueError("validation and test fractions must not be negative and must leave something to train on, "
                         f"got {validation_fraction} and {test_fraction}")
    if not len(event_time):
        raise ValueError("no events to split")
    ordered = np.sort(event_time)

    def begin(share: float) -> int:
        place = len(ordered) - round(share * len(ordered))
        return int(ordered[place]) if place < len(ordered) else int(ordered[-1]) + 1

    return begin(validation_fraction + test_fraction), begin(test_fraction)


def time_split(rows: RequestRows, validation_from: int, test_from: int) -> dict[str, RequestRows]:
    """Requests by when they were made (``as_of``), never by user: ``train`` before ``validation_from``, ``validation``
    before ``test_from``, ``test`` from there on. Raises ValueError if test would begin before validation."""
    if test_from < validation_from:
        raise ValueError(f"test begins at {test_from}, before validation at {validation_from}")
    split = (rows.pointers.as_of >= validation_from).astype(int) + (rows.pointers.as_of >= test_from)
    return {name: rows.select(np.flatnonzero(split == number)) for number, name in enumerate(SPLITS)}
