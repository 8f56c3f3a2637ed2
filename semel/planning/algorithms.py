"""Collectives as sequences of messages: what ``events.run`` makes of them is what their closed forms say where links
are alike and free, and what the links at hand make of them where not.

Each function adds its messages to ``tasks`` and returns, for each rank, the task after which the rank is done.
``ready`` has one task a rank that its part follows, or is empty. ``bytes``: of the whole vector on each rank (reduce,
gather), or what a rank sends in total (all-to-all). A message loads ``(sender, "out")`` and ``(receiver, "in")``, each
link for itself: full duplex; ``path(a, b)`` names more links in between (an uplink that others share).
``latency(a, b)`` is in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from semel.planning.events import Tasks

Latency = Callable[[int, int], float]
Path = Callable[[int, int], Sequence[Hashable]]


def direct(a: int, b: int) -> Sequence[Hashable]:
    """Nothing but the two ranks' own links."""
    return ()


def message(tasks: Tasks, a: int, b: int, size: float, follows: Sequence[int], latency: Latency, path: Path) -> int:
    links = [(a, "out"), (b, "in"), *path(a, b)]
    return tasks.add(latency(a, b), follows, [(link, size) for link in links])


def ring_pass(tasks: Tasks, ranks: Sequence[int], size: float, steps: int, ready: Sequence[int], latency: Latency,
              path: Path = direct) -> list[int]:
    """``steps`` times each rank sends ``size`` bytes to the next, once it has what came before."""
    n = len(ranks)
    sent, came = list(ready), list(ready)
    for _ in range(steps):
        now = [message(tasks, ranks[at], ranks[(at + 1) % n], size,
                       sorted({*sent[at:at + 1], *came[at:at + 1]}), latency, path) for at in range(n)]
        sent, came = now, [now[at - 1] for at in range(n)]
    # A rank is done when it has received the last part and sent its own.
    return [tasks.add(0.0, sorted({*sent[at:at + 1], *came[at:at + 1]})) for at in range(n)]


def ring_all_gather(tasks: Tasks, ranks: Sequence[int], bytes: float, latency: Latency, ready: Sequence[int] = (),
                    path: Path = direct) -> list[int]:
    """(n - 1)(alpha + b / (n beta))."""
    return ring_pass(tasks, ranks, bytes / len(ranks), len(ranks) - 1, ready, latency, path)


ring_reduce_scatter = ring_all_gather
"""The same messages, the other way round in what they hold."""


def ring_all_reduce(tasks: Tasks, ranks: Sequence[int], bytes: float, latency: Latency, ready: Sequence[int] = (),
                    path: Path = direct) -> list[int]:
    """2 (n - 1)(alpha + b / (n beta)) (Patarasuk and Yuan 2009)."""
    return ring_pass(tasks, ranks, bytes / len(ranks), 2 * (len(ranks) - 1), ready, latency, path)


def tree_all_reduce(tasks: Tasks, ranks: Sequence[int], bytes: float, latency: Latency, ready: Sequence[int] = (),
                    path: Path = direct) -> list[int]:
    """Sums up a binomial tree and back down: 2 ceil(log2 n)(alpha + b / beta)."""
    n = len(ranks)
    at = list(ready) or [tasks.add(0.0) for _ in ranks]
    distances = [1 << k for k in range(max(n - 1, 0).bit_length())]
    for up, order in ((True, distances), (False, distances[::-1])):
        for far in order:
            for low in range(0, n - far, 2 * far):
                a, b = (low + far, low) if up else (low, low + far)
                done = message(tasks, ranks[a], ranks[b], bytes, sorted({at[a], at[b]}), latency, path)
                at[a] = at[b] = done
    return at


def hierarchical_all_reduce(tasks: Tasks, groups: Sequence[Sequence[int]], bytes: float, latency: Latency,
                            path: Path = direct) -> list[int]:
    """Reduce-scatter inside groups of m, all-reduce of b / m between ranks of the same place, all-gather inside. The
    groups must be of one size. Done: in the order of the groups, flat."""
    m = len(groups[0])
    if any(len(group) != m for group in groups):
        raise ValueError(f"groups of a hierarchical all-reduce have one size, not {[len(group) for group in groups]}")
    inside = [ring_reduce_scatter(tasks, group, bytes, latency, path=path) for group in groups]
    across = [ring_all_reduce(tasks, [group[place] for group in groups], bytes / m, latency,
                              [done[place] for done in inside], path) for place in range(m)]
    return [done for number, group in enumerate(groups) for done in ring_all_gather(
        tasks, group, bytes, latency, [across[place][number] for place in range(m)], path)]


def all_to_all(tasks: Tasks, ranks: Sequence[int], bytes: float | np.ndarray, latency: Latency,
               ready: Sequence[int] = (), path: Path = direct) -> list[int]:
    """Pairwise: in step k rank r sends to r + k and receives from r - k; (n - 1)(alpha + b / (n beta)) where all send
    as much. ``bytes`` [n, n] for skew: from row to column."""
    n = len(ranks)
    size = np.broadcast_to(np.asarray(bytes, np.float64) / (n if np.ndim(bytes) == 0 else 1), (n, n))
    at = [[task] for task in ready] or [[] for _ in ranks]
    for step in range(1, n):
        sent = [message(tasks, ranks[a], ranks[(a + step) % n], float(size[a, (a + step) % n]),
                        sorted({*at[a], *at[(a + step) % n]}), latency, path) for a in range(n)]
        at = [sorted({sent[a], sent[a - step]}) for a in range(n)]
    return [tasks.add(0.0, done) for done in at]
