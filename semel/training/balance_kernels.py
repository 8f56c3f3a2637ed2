"""The compiled loops of ``semel.training.balance``: sums in one fixed order, so that every rank gets the same bits."""

from __future__ import annotations

import heapq
from typing import Any

import numba
import numpy as np


def kernel(function: Any) -> Any:
    """Compiled at the first call, kept on disk, and run without the interpreter's lock."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to keep compiled code in: compile once a process
        return numba.njit(nogil=True)(function)


@kernel
def descending(costs):
    """The order of ``costs`` [n] (float64, none negative), largest first, ties as they came: a radix sort of the bits,
    which for such numbers order as the numbers do."""
    n = len(costs)
    keys = ~costs.view(np.uint64)
    order = np.arange(n)
    other = np.empty(n, np.int64)
    for shift in range(0, 64, 11):
        start = np.zeros(2049, np.int64)
        for i in range(n):
            start[((keys[i] >> np.uint64(shift)) & np.uint64(2047)) + np.uint64(1)] += 1
        if start.max() == n:  # a digit that all share
            continue
        for digit in range(2048):
            start[digit + 1] += start[digit]
        for i in range(n):
            digit = (keys[order[i]] >> np.uint64(shift)) & np.uint64(2047)
            other[start[digit]] = order[i]
            start[digit] += 1
        order, other = other, order
    return order


@kernel
def deal(order, world_size, ranks):
    """Into ``ranks``: request ``order[j]`` to rank 0, 1, ... world_size - 1, world_size - 1, ... 1, 0, 0, 1, ..."""
    rank, step = 0, 1
    for request in order:
        ranks[request] = rank
        rank += step
        if rank < 0 or rank == world_size:  # the end of a lap: the same rank again, backwards
            step = -step
            rank += step


@kernel
def _before(a, b, load, count):
    """Whether rank ``a`` comes before ``b``: less load, then fewer requests, then the lower number."""
    if load[a] != load[b]:
        return load[a] < load[b]
    return count[a] < count[b] if count[a] != count[b] else a < b


@kernel
def _sift(heap, at, load, count):
    """The rank at place ``at`` of the heap, whose load has grown, goes down to where it belongs."""
    rank = heap[at]
    while True:
        child = 2 * at + 1
        if child >= len(heap):
            break
        if child + 1 < len(heap) and _before(heap[child + 1], heap[child], load, count):
            child += 1
        if _before(rank, heap[child], load, count):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = rank


@kernel
def longest_first(order, costs, tokens, cap, world_size, ranks):
    """LPT into ``ranks``: each request, largest first, to the rank with the least so far that has room for its tokens.
    False where one finds no room."""
    heap = np.arange(world_size)
    load, filled, count = np.zeros(world_size), np.zeros(world_size), np.zeros(world_size, np.int64)
    for request in order:
        at = 0
        if filled[heap[0]] + tokens[request] > cap:
            at = -1
            for i in range(world_size):
                if filled[heap[i]] + tokens[request] <= cap and (at < 0 or _before(heap[i], heap[at], load, count)):
                    at = i
            if at < 0:
                return False
        rank = heap[at]
        ranks[request] = rank
        load[rank] += costs[request]
        filled[rank] += tokens[request]
        count[rank] += 1
        _sift(heap, at, load, count)
    return True


@kernel
def differencing(order, costs, world_size, ranks):
    """Karmarkar-Karp with equal counts into ``ranks``: see ``balance.karmarkar_karp``."""
    n = len(order)
    rounds = (n + world_size - 1) // world_size
    sums = np.zeros((rounds, world_size))
    head = np.full((rounds, world_size), -1)
    tail = np.full((rounds, world_size), -1)
    following = np.full(n, -1)
    heap = [(0.0, 0) for _ in range(0)]
    for i in range(n):
        lap, place = divmod(i, world_size)
        sums[lap, place] = costs[order[i]]
        head[lap, place] = tail[lap, place] = order[i]
    for lap in range(rounds):
        heapq.heappush(heap, (sums[lap, world_size - 1] - sums[lap, 0], lap))
    while len(heap) > 1:
        _, a = heapq.heappop(heap)
        _, b = heapq.heappop(heap)
        for place in range(world_size):
            other = world_size - 1 - place
            sums[a, place] += sums[b, other]
            if head[a, place] < 0:
                head[a, place], tail[a, place] = head[b, other], tail[b, other]
            elif head[b, other] >= 0:
                following[tail[a, place]] = head[b, other]
                tail[a, place] = tail[b, other]
        by_sum = descending(sums[a].copy())
        sums[a] = sums[a][by_sum]
        head[a] = head[a][by_sum]
        tail[a] = tail[a][by_sum]
        heapq.heappush(heap, (sums[a, world_size - 1] - sums[a, 0], a))
    for place in range(world_size):
        if n > 0:
            request = head[heap[0][1], place]
            while request >= 0:
                ranks[request] = place
                request = following[request]


SPARE = 64
"""By how many requests a rank may grow where counts are free."""
NEAR = 4
"""Requests on either side of the wanted cost that are looked at for one whose tokens fit."""


@kernel
def _exchange(heavy, light, wanted, fine, costs, tokens, cap, gap, full_heavy, full_light, may_move):
    """The request of ``heavy`` to give and that of ``light`` to take for it (-1: none), places in the two lists, both
    sorted by cost: those whose difference in cost is nearest to ``wanted`` of all between 0 and ``gap``, and whose
    tokens leave both ranks within ``cap``, or a rank over it no fuller. (-1, -1) where there are none."""
    give, take, error = -1, -1, np.inf
    most_heavy, most_light = max(cap, full_heavy), max(cap, full_light)
    j = 0
    for i in range(len(heavy)):
        cost, size = costs[heavy[i]], tokens[heavy[i]]
        if may_move and 0.0 < cost < gap and abs(cost - wanted) < error and full_light + size <= most_light:
            give, take, error = i, -1, abs(cost - wanted)
        if cost <= 0.0:
            break
        while j < len(light) and costs[light[j]] >= cost - wanted:
            j += 1
        for k in range(j, min(j + NEAR, len(light))):
            delta, more = cost - costs[light[k]], size - tokens[light[k]]
            if abs(delta - wanted) >= error or delta >= gap:
                break
            if delta > 0.0 and full_heavy - more <= most_heavy and full_light + more <= most_light:
                give, take, error = i, k, abs(delta - wanted)
                break
        for k in range(j - 1, max(j - 1 - NEAR, -1), -1):
            delta, more = cost - costs[light[k]], size - tokens[light[k]]
            if abs(delta - wanted) >= error or delta <= 0.0:
                break
            if delta < gap and full_heavy - more <= most_heavy and full_light + more <= most_light:
                give, take, error = i, k, abs(delta - wanted)
                break
        if error <= fine:
            break
    return give, take


@kernel
def _replace(members, start, size, out, new, place):
    """In the sorted list ``members[start:start + size]``, the entry at ``out`` (-1: none) makes way for the request
    ``new`` (-1: none). ``place``: of each request in the order of costs. Returns the size after."""
    at = start + out if out >= 0 else start + size
    if new < 0:
        for i in range(at, start + size - 1):
            members[i] = members[i + 1]
        return size - 1
    while at > start and place[members[at - 1]] > place[new]:
        members[at] = members[at - 1]
        at -= 1
    if out >= 0:
        while at < start + size - 1 and place[members[at + 1]] < place[new]:
            members[at] = members[at + 1]
            at += 1
    members[at] = new
    return size + (0 if out >= 0 else 1)


@kernel
def refine(order, costs, tokens, cap, ranks, world_size, least, most, goal, searches):
    """Exchange requests between the heaviest and a light rank, in ``ranks``, until no rank is above ``goal``, nothing
    helps the heaviest, or so many pairs of ranks were searched. Counts stay between ``least`` and ``most`` requests a
    rank, tokens within ``cap`` (of a rank that is over it: no more than before). Returns the cost of the heaviest."""
    n = len(order)
    place = np.empty(n, np.int64)
    size = np.zeros(world_size, np.int64)
    load, filled = np.zeros(world_size), np.zeros(world_size)
    for i in range(n):
        request = order[i]
        place[request] = i
        size[ranks[request]] += 1
        load[ranks[request]] += costs[request]
        filled[ranks[request]] += tokens[request]
    first = np.zeros(world_size + 1, np.int64)  # each rank's list, sorted by cost, has room to grow
    for rank in range(world_size):
        first[rank + 1] = first[rank] + min(size[rank] + min(most - least, SPARE), n)
    members = np.empty(first[world_size], np.int64)
    size[:] = 0
    for request in order:
        rank = ranks[request]
        members[first[rank] + size[rank]] = request
        size[rank] += 1
    mean = load.sum() / world_size
    fine = 0.25 * (goal - mean)
    refused = np.full(world_size, -1)  # by which heaviest rank, as the number of its exchange
    exchange = 0
    heavy = load.argmax()
    while searches > 0 and load[heavy] > goal:
        light = -1
        for rank in range(world_size):
            if rank != heavy and refused[rank] != exchange and (light < 0 or load[rank] < load[light]):
                light = rank
        if light < 0 or load[light] >= load[heavy]:
            break
        searches -= 1
        wanted = min(load[heavy] - mean, mean - load[light])  # one of the two is done with
        if wanted <= 0.0:
            wanted = 0.5 * (load[heavy] - load[light])
        may_move = size[heavy] > least and size[light] < min(most, first[light + 1] - first[light])
        give, take = _exchange(
            members[first[heavy] : first[heavy] + size[heavy]], members[first[light] : first[light] + size[light]],
            wanted, fine, costs, tokens, cap, load[heavy] - load[light], filled[heavy], filled[light], may_move)
        if give < 0:
            refused[light] = exchange
            continue
        a = members[first[heavy] + give]
        delta, more, b = costs[a], tokens[a], -1
        if take >= 0:
            b = members[first[light] + take]
            delta -= costs[b]
            more -= tokens[b]
        if load[heavy] - delta >= load[heavy] or load[light] + delta >= load[heavy]:  # lost in rounding
            refused[light] = exchange
            continue
        size[heavy] = _replace(members, first[heavy], size[heavy], give, b, place)
        size[light] = _replace(members, first[light], size[light], take, a, place)
        ranks[a] = light
        if b >= 0:
            ranks[b] = heavy
        load[heavy] -= delta
        load[light] += delta
        filled[heavy] -= more
        filled[light] += more
        exchange += 1
        heavy = load.argmax()
    return load[heavy]
