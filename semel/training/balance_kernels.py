"""The compiled loops of ``semel.training.balance``: sums in one fixed order, so that every rank gets the same bits.

They use little memory, since at a few hundred microseconds a call the first touch of a page is most of the work.
``tokens`` [requests], or [0] where there is no cap.
"""

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


BITS = 11
"""Of a digit: 2,048 counters lie in the first cache."""


@kernel
def descending(costs):
    """The order of ``costs`` [n] (float64, none negative), largest first, ties as they came: a radix sort of the bits,
    which for such numbers order as the numbers do."""
    n, radix, mask = len(costs), 1 << BITS, np.uint64((1 << BITS) - 1)
    digits = (64 + BITS - 1) // BITS
    keys, other_keys = ~costs.view(np.uint64), np.empty(n, np.uint64)
    order, other = np.empty(n, np.int32), np.empty(n, np.int32)
    for i in range(n):
        order[i] = i
    count = np.zeros((digits, radix), np.int64)
    for key in keys:
        for digit in range(digits):
            count[digit, (key >> np.uint64(digit * BITS)) & mask] += 1
    for digit in range(digits):
        shift, start = np.uint64(digit * BITS), count[digit]
        if n == 0 or start[(keys[0] >> shift) & mask] == n:  # all share it
            continue
        before = 0
        for value in range(radix):
            start[value], before = before, before + start[value]
        for i in range(n):
            value = (keys[i] >> shift) & mask
            to = start[value]
            start[value] = to + 1
            other_keys[to], other[to] = keys[i], order[i]
        keys, other_keys = other_keys, keys
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
def _first_with_room(first, load, filled, count, tokens, cap, stack):
    """The first rank that has room for ``tokens``, -1 where none has. Nothing under a node whose rank has room, or
    comes after the best so far, can come before it."""
    best, stack[0], height = np.int64(-1), 1, 1
    while height > 0:
        height -= 1
        node = stack[height]
        rank = np.int64(first[node])
        if best >= 0 and not _before(rank, best, load, count):
            continue
        if filled[rank] + tokens <= cap:
            best = rank
        elif 2 * node < len(first):
            stack[height], stack[height + 1] = 2 * node + 1, 2 * node
            height += 2
    return best


@kernel
def longest_first(order, costs, tokens, cap, world_size, ranks):
    """LPT into ``ranks``: each request, largest first, to the rank with the least so far that has room for its tokens.
    False where one finds no room.

    A tree of matches: each node has the first of the ranks under it, and the bits of its load, which order as loads do.
    Only the path above the rank that has grown is played again, and on integers without a branch: a heap takes twice as
    long, as nobody can foretell its comparisons.
    """
    places, capped, one = 1, len(tokens) > 0, np.uint64(1)
    while places < world_size:
        places *= 2
    first, least = np.empty(2 * places, np.uint32), np.empty(2 * places, np.uint64)
    load, filled, count = np.full(places, np.inf), np.full(places, np.inf), np.zeros(places, np.int64)
    load[:world_size] = filled[:world_size] = 0.0
    bits = load.view(np.uint64)
    for place in range(2 * places - 1, 0, -1):  # the lowest number under it
        first[place] = place - places if place >= places else first[2 * place]
        least[place] = bits[first[place]]
    stack = np.empty(2 * places, np.int64)
    for request in order:
        rank = np.int64(first[1])
        if capped:
            if filled[rank] + tokens[request] > cap:
                rank = _first_with_room(first, load, filled, count, tokens[request], cap, stack)
                if rank < 0:
                    return False
            filled[rank] += tokens[request]
        ranks[request] = rank
        load[rank] += costs[request]
        count[rank] += 1
        node, winner, key = np.uint64(rank + places), np.uint32(rank), bits[rank]
        least[node] = key
        while node > one:
            other, its = first[node ^ one], least[node ^ one]
            wins = its < key
            if its == key:
                wins = _before(np.int64(other), np.int64(winner), load, count)
            winner = other if wins else winner
            key = its if wins else key
            node >>= one
            first[node], least[node] = winner, key
    return True


@kernel
def differencing(order, costs, world_size, ranks):
    """Karmarkar-Karp with equal counts into ``ranks``: see ``balance.karmarkar_karp``."""
    n = len(order)
    rounds = (n + world_size - 1) // world_size
    sums = np.zeros((rounds, world_size))
    head = np.full((rounds, world_size), -1, np.int32)
    tail = np.full((rounds, world_size), -1, np.int32)
    following = np.full(n, -1, np.int32)
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
def _exchange(costs, tokens, other_costs, other_tokens, wanted, fine, gap, room, other_room, may_move):
    """Which request a rank gives to another, and which it takes for it (-1: none), as places in their lists, sorted by
    cost: of all with a difference in cost between 0 and ``gap`` the nearest to ``wanted``, or the first within
    ``fine`` of it. The rank may have ``room`` tokens more, the other ``other_room``. (-1, -1) where there are none."""
    give, take, error = -1, -1, np.inf
    j, others, capped = 0, len(other_costs), len(tokens) > 0
    near = NEAR if capped else 1
    size, more = 0.0, 0.0
    for i in range(len(costs)):
        cost = costs[i]
        if cost <= 0.0:
            break
        if capped:
            size = tokens[i]
        if may_move and cost < gap and abs(cost - wanted) < error and size <= other_room:
            give, take, error = i, -1, abs(cost - wanted)
        while j < others and other_costs[j] >= cost - wanted:
            j += 1
        for k in range(j, min(j + near, others)):
            delta = cost - other_costs[k]
            if delta - wanted >= error or delta >= gap:
                break
            if capped:
                more = size - other_tokens[k]
            if delta > 0.0 and -more <= room and more <= other_room:
                give, take, error = i, k, delta - wanted
                break
        for k in range(j - 1, max(j - 1 - near, -1), -1):
            delta = cost - other_costs[k]
            if wanted - delta >= error or delta <= 0.0:
                break
            if capped:
                more = size - other_tokens[k]
            if delta < gap and -more <= room and more <= other_room:
                give, take, error = i, k, wanted - delta
                break
        if error <= fine:
            break
    return give, take


@kernel
def _replace(who, cost, token, start, size, out, new, new_cost, new_token):
    """In a rank's list, ``size`` entries from ``start`` on in order of ``who``, the one at ``out`` (-1: none) makes way
    for ``new`` (-1: none). Returns the size after."""
    capped = len(token) > 0
    at = start + out if out >= 0 else start + size
    end = start + size - (1 if out >= 0 else 0)  # of the list without what makes way
    while at < end and (new < 0 or who[at + 1] < new):
        who[at], cost[at] = who[at + 1], cost[at + 1]
        if capped:
            token[at] = token[at + 1]
        at += 1
    if new < 0:
        return size - 1
    while at > start and who[at - 1] > new:
        who[at], cost[at] = who[at - 1], cost[at - 1]
        if capped:
            token[at] = token[at - 1]
        at -= 1
    who[at], cost[at] = new, new_cost
    if capped:
        token[at] = new_token
    return end - start + 1


@kernel
def refine(order, costs, tokens, cap, ranks, world_size, least, most, goal, searches):
    """Exchange requests between the heaviest and a light rank, in ``ranks``, until no rank is above ``goal``, nothing
    helps the heaviest, or so many pairs of ranks were searched. Counts stay between ``least`` and ``most`` requests a
    rank, tokens within ``cap`` (of a rank that is over it: no more than before). Returns the cost of the heaviest."""
    n, capped = len(order), len(tokens) > 0
    size, load, filled = np.zeros(world_size, np.int64), np.zeros(world_size), np.zeros(world_size)
    for rank in ranks:
        size[rank] += 1
    first = np.zeros(world_size + 1, np.int64)  # a rank's list, sorted as the order is, has room to grow
    for rank in range(world_size):
        first[rank + 1] = first[rank] + min(size[rank] + min(most - least, SPARE), n)
    who = np.empty(first[world_size], np.int32)  # places in the order
    cost, token = np.empty(first[world_size]), np.empty(first[world_size] if capped else 0)
    size[:] = 0
    for i in range(n):
        request = order[i]
        rank = ranks[request]
        at = first[rank] + size[rank]
        who[at], cost[at] = i, costs[request]
        size[rank] += 1
        load[rank] += costs[request]
        if capped:
            token[at] = tokens[request]
            filled[rank] += tokens[request]
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
        a, b = first[heavy], first[light]
        may_move = size[heavy] > least and size[light] < min(most, first[light + 1] - b)
        give, take = _exchange(
            cost[a : a + size[heavy]], token[a : a + size[heavy]], cost[b : b + size[light]],
            token[b : b + size[light]], wanted, fine, load[heavy] - load[light], max(cap - filled[heavy], 0.0),
            max(cap - filled[light], 0.0), may_move)
        if give < 0:
            refused[light] = exchange
            continue
        old, old_cost, old_token = who[a + give], cost[a + give], token[a + give] if capped else 0.0
        new, new_cost, new_token = np.int32(-1), 0.0, 0.0
        if take >= 0:
            new, new_cost, new_token = who[b + take], cost[b + take], token[b + take] if capped else 0.0
        delta, more = old_cost - new_cost, old_token - new_token
        if load[heavy] - delta >= load[heavy] or load[light] + delta >= load[heavy]:  # lost in rounding
            refused[light] = exchange
            continue
        size[heavy] = _replace(who, cost, token, a, size[heavy], give, new, new_cost, new_token)
        size[light] = _replace(who, cost, token, b, size[light], take, old, old_cost, old_token)
        ranks[order[old]] = light
        if new >= 0:
            ranks[order[new]] = heavy
        load[heavy] -= delta
        load[light] += delta
        filled[heavy] -= more
        filled[light] += more
        exchange += 1
        heavy = load.argmax()
    return load[heavy]
