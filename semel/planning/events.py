"""Discrete events: tasks that follow one another, and links that the flows in flight share max-min fairly.

A task begins when all tasks that it follows are over. It then sends its bytes over all its links at once, at the rate
that fair sharing gives it, and is over ``seconds`` after the last of them (computation: no bytes; a message: its
latency). Streams are chains of tasks. Same input, same times: what happens at one moment is handled by task number.

Fair sharing can make a later thing later when an earlier one is faster (Graham's anomalies): ``simulate``, whose links
serve in order of issue, does not; see ``streams``.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping

import numpy as np

from semel.planning.kernel import inner, kernel


class Tasks:
    """A list of tasks under construction; ``links`` are those that they load, in order of first use."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.follows: list[tuple[int, ...]] = []
        self.loads: list[tuple[tuple[Hashable, float], ...]] = []
        self.links: dict[Hashable, int] = {}

    def add(self, seconds: float, follows: Iterable[int] = (), loads: Iterable[tuple[Hashable, float]] = ()) -> int:
        """The new task's number. Raises ValueError for negative numbers and for a task that is not there yet."""
        number, follows, loads = len(self.seconds), tuple(follows), tuple(load for load in loads if load[1] != 0)
        if not seconds >= 0 or any(not size >= 0 for _, size in loads):
            raise ValueError(f"a task takes no negative seconds or bytes, got {seconds} and {loads}")
        if any(not 0 <= other < number for other in follows):
            raise ValueError(f"task {number} can follow tasks 0 .. {number - 1}, not {follows}")
        for link, _ in loads:
            self.links.setdefault(link, len(self.links))
        self.seconds.append(float(seconds))
        self.follows.append(follows)
        self.loads.append(loads)
        return number


def run(tasks: Tasks, bandwidth: Mapping[Hashable, float]) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) [tasks] seconds. ``bandwidth``: bytes/s of each link that is loaded. Raises KeyError for one that is
    missing, ValueError for one that is not positive."""
    capacity = np.array([bandwidth[link] for link in tasks.links], np.float64)
    if not (capacity > 0).all():
        raise ValueError(f"a link's bandwidth is above 0, got {dict(bandwidth)}")
    n = len(tasks.seconds)
    if n == 0:
        return np.zeros(0), np.zeros(0)
    waits = np.array([len(others) for others in tasks.follows], np.int64)
    edges = np.array([(before, after) for after, others in enumerate(tasks.follows) for before in others],
                     np.int64).reshape(-1, 2)
    edges = edges[np.argsort(edges[:, 0], kind="stable")]
    first_next = np.searchsorted(edges[:, 0], np.arange(n + 1))
    first_load = np.cumsum([0] + [len(loads) for loads in tasks.loads])
    link = np.array([tasks.links[name] for loads in tasks.loads for name, _ in loads], np.int64)
    size = np.array([size for loads in tasks.loads for _, size in loads], np.float64)
    return _run(np.array(tasks.seconds), waits, first_next, np.ascontiguousarray(edges[:, 1]), first_load, link, size,
                capacity)


@inner
def fill(active, count, first_load, link, weight, capacity, rate, room, use):
    """Progressive filling: all rates grow alike until a link is full, whose flows stay; then the others go on.
    ``weight`` [loads]: bytes on the link for each byte of the flow; ``rate`` [tasks] is filled; ``room``, ``use``
    [links] are scratch."""
    for at in range(len(capacity)):
        room[at] = capacity[at]
    for a in range(count):
        rate[active[a]] = -1.0
    left = count
    while left > 0:
        for at in range(len(capacity)):
            use[at] = 0.0
        for a in range(count):
            if rate[active[a]] < 0:
                for x in range(first_load[active[a]], first_load[active[a] + 1]):
                    use[link[x]] += weight[x]
        tightest, level = -1, np.inf
        for at in range(len(capacity)):
            if use[at] > 0 and room[at] / use[at] < level:
                tightest, level = at, room[at] / use[at]
        for a in range(count):
            i = active[a]
            if rate[i] >= 0:
                continue
            full = False
            for x in range(first_load[i], first_load[i + 1]):
                full = full or link[x] == tightest
            if full:
                rate[i] = level
                left -= 1
                for x in range(first_load[i], first_load[i + 1]):
                    room[link[x]] = max(room[link[x]] - level * weight[x], 0.0)


@kernel
def _run(seconds, waits, first_next, following, first_load, link, size, capacity):
    n = len(seconds)
    start, end = np.zeros(n), np.zeros(n)
    left, since, until, rate = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
    before = np.zeros(n)
    weight = np.zeros(len(size))
    for i in range(n):
        for x in range(first_load[i], first_load[i + 1]):
            left[i] = max(left[i], size[x])
        for x in range(first_load[i], first_load[i + 1]):
            weight[x] = size[x] / left[i]
    active, count = np.zeros(n, np.int64), 0
    room, use = np.zeros(len(capacity)), np.zeros(len(capacity))
    timers = [(0.0, 0)]  # (when, task that is then over; n + task: that then begins)
    timers.pop()
    for i in range(n):
        if waits[i] == 0:
            heapq.heappush(timers, (0.0, n + i))
    while len(timers) > 0 or count > 0:
        now = timers[0][0] if len(timers) > 0 else np.inf
        for a in range(count):
            now = min(now, until[active[a]])
        changed = False
        kept = 0
        for a in range(count):  # ``active`` is in order of number
            i = active[a]
            if until[i] <= now:
                heapq.heappush(timers, (now + seconds[i], i))
                changed = True
            else:
                active[kept] = i
                kept += 1
        count = kept
        while len(timers) > 0 and timers[0][0] <= now:
            _, i = heapq.heappop(timers)
            if i < n:
                end[i] = now
                for x in range(first_next[i], first_next[i + 1]):
                    waits[following[x]] -= 1
                    if waits[following[x]] == 0:
                        heapq.heappush(timers, (now, n + following[x]))
                continue
            i -= n
            start[i] = now
            if left[i] > 0:
                at = count
                while at > 0 and active[at - 1] > i:
                    active[at] = active[at - 1]
                    at -= 1
                active[at] = i
                count += 1
                since[i], rate[i] = now, 0.0
                changed = True
            else:
                heapq.heappush(timers, (now + seconds[i], i))
        if changed and count > 0:
            for a in range(count):
                before[active[a]] = rate[active[a]]
            fill(active, count, first_load, link, weight, capacity, rate, room, use)
            for a in range(count):
                i = active[a]
                if rate[i] != before[i]:
                    left[i] -= before[i] * (now - since[i])
                    since[i] = now
                    until[i] = now + max(left[i], 0.0) / rate[i]
    return start, end
