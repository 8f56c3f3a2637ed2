"""A schedule for the links at hand: list scheduling on the workload's own durations and sends, under a memory limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semel.planning.kernel import kernel
from semel.planning.schedules.operations import BACKWARD, INPUT, WEIGHT, Schedule, folded, looped

TRIAL = 4
"""Candidates are compared on this many micro-batches a stage: what follows repeats."""
ANY = 1 << 40
"""More forwards under way than any step has."""


def greedy(stages: int, microbatches: int, chunks: int, forward: float | Sequence[float],
           backward_input: float | Sequence[float], backward_weight: float | Sequence[float],
           send: float | Sequence[float], limit: int | None = None) -> Schedule:
    """Whenever a device is free it takes, of what has arrived: a forward while few enough are under way, else a
    backward for the input, else one for weights. How many may be under way covers the round trip to the last stage and
    back, so that sends over long links are hidden, as CrossPipe does (arXiv 2507.00217); a few such numbers are tried,
    and backwards before forwards, and the order that ends first is taken. Halves of a backward that end up side by side
    are one whole.

    It always ends: of both limits (activations held, forwards under way) a place is kept for each later chunk of the
    same device. If everything waited, take the deepest forward that does, of chunk c: what its device holds is then of
    earlier chunks, and each of these, when it was let in, left c its place.

    ``forward``, ``backward_input``, ``backward_weight``: seconds, one number or one a virtual stage; ``send``: seconds
    to the next virtual stage, one number or one a boundary. ``limit``: most activations of one chunk that a device
    holds, from the forward to the weights' backward; by default twice 1F1B's, as many as hide the sends,
    or any number if that ends earlier. Two chunks a device are folded, more are looped. Raises ValueError for a limit
    below one activation of each chunk.
    """
    placement = folded(stages) if chunks == 2 else looped(stages, chunks)
    held = len(placement)
    f, i, w = (_each(values, held, what) for values, what in (
        (forward, "forward"), (backward_input, "backward_input"), (backward_weight, "backward_weight")))
    away = _each(send, max(held - 1, 1), "send")[:held - 1]
    hop = np.array([seconds if placement[chunk] != placement[chunk + 1] else 0.0 for chunk, seconds in enumerate(away)])
    if limit is not None and limit < chunks:
        raise ValueError(f"greedy must hold at least one activation of each of its {chunks} chunks a device, "
                         f"limit is {limit}")
    on_device = np.array(placement)
    best, best_end = None, np.inf
    for under_way in _depths(on_device, stages, chunks, f, i, w, hop):
        most = limit if limit is not None else max(2 * stages * chunks, int(under_way.max()))
        for forwards_first in (True, False):
            choice = (most, under_way, forwards_first)
            *_, end = list_schedule(on_device, stages, min(microbatches, TRIAL * stages), f, i, w, hop, *choice)
            if best is None or end < best_end:
                best, best_end = choice, end
    assert best is not None
    kinds, of, on, counts, _ = list_schedule(on_device, stages, microbatches, f, i, w, hop, *best)
    parts = []
    for device in range(stages):
        rows = np.stack([kinds[device], of[device], on[device]])[:, :counts[device]]
        a, b = rows[:, :-1], rows[:, 1:]
        whole = np.flatnonzero((a[0] == INPUT) & (b[0] == WEIGHT) & (a[1:] == b[1:]).all(0))
        rows[0, whole] = BACKWARD
        parts.append(np.delete(rows, whole + 1, axis=1))
    offsets = np.cumsum([0] + [part.shape[1] for part in parts]).astype(np.int64)
    kinds, of, on = (np.ascontiguousarray(column) for column in np.concatenate(parts, axis=1))
    return Schedule("greedy", kinds, of, on, offsets, placement)


def _depths(placement: np.ndarray, stages: int, chunks: int, f: np.ndarray, i: np.ndarray, w: np.ndarray,
            hop: np.ndarray) -> list[np.ndarray]:
    """Candidates [stages] for how many forwards may be under way: as many as are begun while the first goes to the last
    virtual stage and comes back, at the pace of the slowest device with and without its weights' halves; and any."""
    beyond = np.zeros(stages)
    for device in range(stages):
        first = int(np.flatnonzero(placement == device)[0])
        beyond[device] = (f + i)[first + 1:].sum() + 2 * hop[first:].sum()
    pace = max(float((f + i)[placement == device].sum()) for device in range(stages)) / chunks
    slow = max(float((f + i + w)[placement == device].sum()) for device in range(stages)) / chunks
    found = [np.clip(np.ceil(beyond / max(by, 1e-300)) + 1, chunks, ANY).astype(np.int64) for by in (slow, pace)]
    return [found[0], found[1], 2 * found[1], np.full(stages, ANY)]


def _each(values: float | Sequence[float], count: int, name: str) -> np.ndarray:
    found = np.asarray(values, np.float64)
    if found.ndim == 0:
        found = np.full(count, float(found))
    if found.shape != (count,) or not (np.isfinite(found) & (found >= 0)).all():
        raise ValueError(f"{name} takes one number of seconds or {count}, none negative, got {values!r}")
    return found


@kernel
def list_schedule(placement, stages, microbatches, f, i, w, hop, limit, under_way, forwards_first):
    """(kinds, microbatches, chunks [stages, operations], operations [stages], end) in the order in which they are
    taken."""
    held = len(placement)
    most = 3 * held // stages * microbatches
    kinds = np.zeros((stages, most), np.int64)
    of, on = kinds.copy(), kinds.copy()
    counts = np.zeros(stages, np.int64)
    next_f, next_i, next_w = np.zeros(held, np.int64), np.zeros(held, np.int64), np.zeros(held, np.int64)
    came_f, came_i = np.full((held, microbatches), np.inf), np.full((held, microbatches), np.inf)
    came_f[0] = 0.0
    free, holds, ahead = np.zeros(stages), np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    rank = np.zeros(held, np.int64)  # how many chunks of the same device follow
    for chunk in range(held):
        for other in range(chunk + 1, held):
            rank[chunk] += placement[other] == placement[chunk]
    when = np.zeros(stages)
    while True:
        d = np.argmin(when)
        if when[d] == np.inf:
            break
        now = max(when[d], free[d])
        backward, oldest, forward, weight, oldest_weight = -1, microbatches, -1, -1, microbatches
        soon = np.inf
        for c in range(held - 1, -1, -1):  # deepest first: what is begun is brought to its end
            if placement[c] != d:
                continue
            if next_i[c] < microbatches:
                came = came_i[c, next_i[c]]
                if came > now:
                    soon = min(soon, came)
                elif next_i[c] < oldest:
                    backward, oldest = c, next_i[c]
            if next_f[c] < microbatches and holds[d] + 1 + rank[c] <= limit and ahead[d] + rank[c] < under_way[d]:
                came = came_f[c, next_f[c]]
                if came > now:
                    soon = min(soon, came)
                elif forward < 0:
                    forward = c
            if next_w[c] < next_i[c] and next_w[c] < oldest_weight:
                weight, oldest_weight = c, next_w[c]
        kind, chunk = -1, -1
        if forward >= 0 and (forwards_first or backward < 0):
            kind, chunk = 0, forward
        elif backward >= 0:
            kind, chunk = 2, backward
        elif weight >= 0:
            kind, chunk = 3, weight
        if kind < 0:
            when[d] = soon
            continue
        k = counts[d]
        kinds[d, k], on[d, k] = kind, chunk
        counts[d] += 1
        if kind == 0:
            microbatch = next_f[chunk]
            next_f[chunk] += 1
            holds[d] += 1
            ahead[d] += 1
            end = now + f[chunk]
            if chunk == held - 1:
                came_i[chunk, microbatch] = end
            else:
                to = placement[chunk + 1]
                came_f[chunk + 1, microbatch] = end + hop[chunk]
                when[to] = min(when[to], max(free[to], end + hop[chunk]))
        elif kind == 2:
            microbatch = next_i[chunk]
            next_i[chunk] += 1
            ahead[d] -= 1
            end = now + i[chunk]
            if chunk > 0:
                to = placement[chunk - 1]
                came_i[chunk - 1, microbatch] = end + hop[chunk - 1]
                when[to] = min(when[to], max(free[to], end + hop[chunk - 1]))
        else:
            microbatch = next_w[chunk]
            next_w[chunk] += 1
            holds[d] -= 1
            end = now + w[chunk]
        of[d, k] = microbatch
        free[d] = end
        when[d] = end
    return kinds, of, on, counts, free.max()
