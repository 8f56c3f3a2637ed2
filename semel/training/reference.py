"""Plain forms of what ``semel.training`` does fast. For tests, and to read."""

from __future__ import annotations

import heapq
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from semel.training.recipe import Recipe


def plain_training(recipe: Recipe) -> tuple[list[float], Any]:
    """One process, one batch after the other, each as one piece, all tables whole in the model -> each step's loss and
    the model at the end. What ``Trainer`` must come to when nothing in a step is drawn; it validates nothing."""
    import torch

    from semel.training.objectives import make_objective
    from semel.training.schedule import rate_at
    from semel.training.sharded import row_optimizer

    torch.manual_seed(recipe.seed)
    objective, config = make_objective(recipe), recipe.optimizer
    model: Any = objective.make_model()
    loader = objective.loader
    apart = {name: model.tables.tables[name] for name in recipe.sharding.tables}
    for table in apart.values():
        table.sparse = True  # its gradient names the rows that the batch used
    rows = {name: table.weight for name, table in apart.items()}
    rest = [p for p in model.parameters() if all(p is not weight for weight in rows.values())]
    optimizer = torch.optim.AdamW(rest, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay)
    of_rows = row_optimizer(recipe)
    state: dict[str, dict[str, torch.Tensor]] = {
        name: {part: torch.zeros(len(weight), width) for part, width in of_rows.state(weight.shape[1]).items()}
        for name, weight in rows.items()}
    losses: list[float] = []
    for epoch in range(recipe.epochs):
        loader.set_epoch(epoch)
        for index in loader.upcoming():
            read = loader.read(index)
            batch = objective.materialize(read, objective.histories(read), len(losses))
            model.train()
            some = np.asarray(objective.counts(batch) > 0, np.float64)
            loss = objective.loss(model, batch, torch.Generator(), some)
            model.zero_grad()
            loss.backward()
            if config.clip_norm > 0:
                torch.nn.utils.clip_grad_norm_(rest, config.clip_norm)
            rate = rate_at(config, len(losses), len(losses) / (recipe.epochs * len(loader)))
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * rate
            optimizer.step()
            losses.append(float(loss.detach()))
            for name, weight in rows.items():
                if weight.grad is not None:
                    own_rate = rate * (recipe.sharding.learning_rate or config.learning_rate)
                    gradient = weight.grad.coalesce()
                    of_rows.plain(weight.data, state[name], gradient.indices()[0], gradient.values(), own_rate,
                                  len(losses))
            loader.took()
    objective.close()
    return losses, model


def zigzag(costs: list[float], world_size: int) -> list[int]:
    ranks = [0] * len(costs)
    for j, request in enumerate(_longest_first(costs)):
        lap, place = divmod(j, world_size)
        ranks[request] = place if lap % 2 == 0 else world_size - 1 - place
    return ranks


def segments(weights: list[float], world_size: int) -> list[int]:
    """The request whose weights before it and half its own sum to c goes to segment floor(world_size * c / total)."""
    ranks, before, total = [0] * len(weights), 0.0, sum(weights)
    for request in _longest_first(weights):
        middle = before + weights[request] / 2
        ranks[request] = min(int(world_size * middle / total), world_size - 1)
        before += weights[request]
    return ranks


def lpt(costs: list[float], world_size: int, tokens: list[float] | None = None, token_cap: float = np.inf
        ) -> list[int] | None:
    """Each to the rank with the least cost, then the fewest requests, then the lowest number, of those that have room
    for its tokens; None where one finds no room."""
    ranks, size = [0] * len(costs), tokens or [0.0] * len(costs)
    sums = [(0.0, 0, rank, 0.0) for rank in range(world_size)]
    for request in _longest_first(costs):
        room = [one for one in sums if one[3] + size[request] <= token_cap]
        if not room:
            return None
        load, count, rank, full = min(room)
        sums[rank] = load + costs[request], count + 1, rank, full + size[request]
        ranks[request] = rank
    return ranks


def karmarkar_karp(costs: list[float], world_size: int) -> list[int]:
    """Largest differencing of partial assignments of equal counts."""
    order = _longest_first(costs)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, first in enumerate(range(0, len(order), world_size)):
        parts = [(costs[request], [request]) for request in order[first : first + world_size]]
        parts += [(0.0, [])] * (world_size - len(parts))
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], number, parts))
    while len(heap) > 1:
        _, number, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        joined = [(x + y, these + those) for (x, these), (y, those) in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    ranks = [0] * len(costs)
    for _, _, parts in heap:
        for rank, (_, requests) in enumerate(parts):
            for request in requests:
                ranks[request] = rank
    return ranks


def differencing(costs: list[float], world_size: int) -> list[int]:
    """Karmarkar and Karp's own form, of any counts: every request begins as a partial assignment of its own."""
    heap = [(-cost, request, [(cost, [request])]) for request, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        a += [(0.0, [])] * (world_size - len(a))
        b += [(0.0, [])] * (world_size - len(b))
        joined = [(x + y, these + those) for (x, these), (y, those) in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    ranks = [0] * len(costs)
    for _, _, parts in heap:
        for rank, (_, requests) in enumerate(parts):
            for request in requests:
                ranks[request] = rank
    return ranks


def helps(costs: list[float], ranks: list[int], world_size: int, equal_counts: bool) -> tuple[int, int] | None:
    """Two requests whose exchange leaves the heaviest rank and the other lighter than the heaviest was, -1 for none
    (a move); None where there are none. What ``balance.equal_count`` and ``equal_cost`` look for."""
    load, count = [0.0] * world_size, [0] * world_size
    for cost, rank in zip(costs, ranks, strict=True):
        load[rank] += cost
        count[rank] += 1
    heavy = load.index(max(load))
    for a in range(len(costs)):
        for b in range(-1, len(costs)):
            for rank in range(world_size) if b < 0 else [ranks[b]]:
                less = costs[a] - (costs[b] if b >= 0 else 0.0)
                uneven = b < 0 and equal_counts and count[heavy] <= count[rank]
                if ranks[a] == heavy != rank and not uneven and load[rank] + less < load[heavy] > load[heavy] - less:
                    return a, b
    return None


def best(costs: list[float], world_size: int, *, equal_counts: bool, tokens: list[float] | None = None,
         token_cap: float = np.inf) -> float | None:
    """The least cost that the heaviest rank can have, by trying all assignments; None where none is within the cap."""
    least, most = len(costs) // world_size, -(-len(costs) // world_size)
    found = None
    for ranks in product(range(world_size), repeat=len(costs)):
        load, full, count = [0.0] * world_size, [0.0] * world_size, [0] * world_size
        for request, rank in enumerate(ranks):
            load[rank] += costs[request]
            full[rank] += tokens[request] if tokens else 0.0
            count[rank] += 1
        if max(full) <= token_cap and (not equal_counts or (min(count) >= least and max(count) <= most)):
            found = max(load) if found is None else min(found, max(load))
    return found


def _longest_first(costs: list[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda request: -costs[request])
