"""In which order an epoch visits its requests. Pure functions of the rows, a seed and an epoch."""

from __future__ import annotations

import numpy as np

from semel.batch import offsets_of


def full_order(requests: int, random: np.random.Generator) -> np.ndarray:
    """[requests] row indices, any order as likely as another."""
    return random.permutation(requests)


def window_order(user: np.ndarray, shard: np.ndarray, as_of: np.ndarray, window: int, together: int,
                 random: np.random.Generator) -> np.ndarray:
    """[R] row indices: the rows are cut into windows of ``window`` as they lie, the windows are shuffled, and within
    each one shard comes after the other. Of a user's requests in a window ``together`` that are neighbours in time stay
    together, in order; these runs are shuffled within their shard.

    ``user`` [R], ``shard`` [R], ``as_of`` [R] int64. Windows keep what lies together in the files together; shards and
    runs let one read of a history serve several requests; ``together`` bounds how much of a batch one user can be.
    """
    rows = np.arange(len(user))
    of_window = rows // window
    windows = int(of_window[-1]) + 1 if len(rows) else 0
    rank = random.permutation(windows)[of_window]
    shards = random.random((windows, int(shard.max(initial=0)) + 1))[of_window, shard]
    by_user = np.lexsort((rows, as_of, user, of_window))  # rows break ties, so that the order is one
    new = np.ones(len(rows), bool)
    new[1:] = (np.diff(user[by_user]) != 0) | (np.diff(of_window[by_user]) != 0)
    starts = np.flatnonzero(new)
    place = rows - np.repeat(starts, np.diff(np.append(starts, len(rows))))
    run = np.cumsum(new | (place % together == 0)) - 1
    shuffled = random.permutation(int(run[-1]) + 1 if len(run) else 0)[run]
    return by_user[np.lexsort((place, shuffled, shards[by_user], rank[by_user]))]


def token_cuts(tokens: np.ndarray, limit: int) -> np.ndarray:
    """Where to cut requests of these sizes, in this order, so that each run keeps within ``limit``: [runs + 1] indices.
    A request larger than the limit is a run of its own."""
    ends = offsets_of(tokens)
    cuts = [0]
    while cuts[-1] < len(tokens):
        end = int(np.searchsorted(ends, ends[cuts[-1]] + limit, side="right")) - 1
        cuts.append(max(end, cuts[-1] + 1))
    return np.asarray(cuts)
