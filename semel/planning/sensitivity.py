"""What binds a plan, what 10 % more of each thing is worth, and which conclusions hang on a guess."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from semel.planning.cluster import Cluster
from semel.planning.explorer import explore, key_of
from semel.planning.layout import Layout
from semel.planning.options import Options
from semel.planning.plan import Plan, crossing, seconds_of
from semel.planning.space import Shape, Space

MORE = 1.1
DOUBT = (0.7, 1.3)
"""How far an assumed coefficient is moved."""


@dataclass(frozen=True)
class Gain:
    """``what`` 10 % better makes the step shorter by ``share`` of it. ``assumed``: today's value is a guess."""

    what: str
    path: str
    share: float
    assumed: bool = False


def gains(plan: Plan) -> list[Gain]:
    """Each link's bandwidth, latency and oversubscription, the device's speed and memory bandwidth, 10 % better, under
    the same layout; the largest first. The first one is what binds the plan."""
    cluster, found = plan.cluster, []
    for what, path, factor in _levers(plan):
        better = cluster.scaled(path, factor)
        if better.value(path) == cluster.value(path):
            continue
        found.append(Gain(what, path, _saved(plan, better), path in cluster.assumed))
    device = cluster.device
    faster = _peaks(cluster, device.name, MORE)
    found.append(Gain(f"speed of the {device.name}", f"devices.{device.name}.peak", _saved(plan, faster),
                      any(path.startswith(f"devices.{device.name}.matmul") for path in cluster.assumed)))
    return sorted(found, key=lambda gain: (-gain.share, gain.what))


def _levers(plan: Plan) -> list[tuple[str, str, float]]:
    """(what, path, factor that makes it better)."""
    found = []
    for level in plan.cluster.levels:
        if level.name not in plan.traffic:
            continue
        found.append((f"bandwidth of the {level.name} level", f"levels.{level.name}.bandwidth", MORE))
        if level.latency > 0:
            found.append((f"latency of the {level.name} level", f"levels.{level.name}.latency", 1 / MORE))
        if level.distance > 0:
            found.append((f"distance of the {level.name} level", f"levels.{level.name}.distance", 1 / MORE))
        if level.oversubscription > 1:
            found.append((f"oversubscription of the {level.name} level", f"levels.{level.name}.oversubscription",
                          1 / MORE))
    name = plan.cluster.device.name
    found.append((f"memory bandwidth of the {name}", f"devices.{name}.memory_bandwidth", MORE))
    found.append((f"kernel time of the {name}", f"devices.{name}.kernel", 1 / MORE))
    return found


def _peaks(cluster: Cluster, name: str, factor: float) -> Cluster:
    peaks = next(unit.device for unit in cluster.units if unit.device.name == name).peak
    return cluster.change(f"devices.{name}.peak", {dtype: rate * factor for dtype, rate in peaks.items()})


def _saved(plan: Plan, cluster: Cluster) -> float:
    seconds = seconds_of(cluster, plan.job, plan.layout)
    return 0.0 if seconds is None else 1 - seconds / plan.seconds


@dataclass(frozen=True)
class Choice:
    """The best plan with one choice made otherwise: ``loss`` is how much longer its step is, as a share."""

    what: str
    chosen: str
    instead: str
    loss: float


def choices(plan: Plan, options: Options | None = None) -> list[Choice]:
    """For each choice the next best one, all others kept; the one that matters most first."""
    space = Space(plan.cluster, plan.job, options or Options())
    layout = plan.layout
    shape = Shape({axis: size for axis, size in layout.sizes.items() if size > 1}, layout.microbatch, layout.recompute)
    others: list[tuple[str, str, Iterable[tuple[str, Layout]]]] = [
        ("placement", " < ".join(layout.order) or "one device", (
            (" < ".join(order), replace(layout, order=order)) for order in space.orders(shape.sizes))),
        ("schedule", _schedule(layout), ((_schedule(replace(layout, schedule=name, chunks=chunks)), replace(
            layout, schedule=name, chunks=chunks)) for name, chunks in space.schedules(
                shape.stages, space.microbatches(shape)))),
        ("micro-batch", str(layout.microbatch), ((str(size), replace(layout, microbatch=size))
                                                 for size in space.options.microbatches)),
        ("recompute", layout.recompute, ((kept, replace(layout, recompute=kept))  # type: ignore[arg-type]
                                         for kept in space.options.recompute)),
    ]
    for level in space.cluster.levels[: space.spanned(shape.sizes)]:
        names = space.technologies(level.name)
        if len(names) > 1:
            chosen = layout.network.get(level.name, names[0])
            others.append((f"network of the {level.name} level", chosen, [
                (name, replace(layout, network={**layout.network, level.name: name})) for name in names]))
    found = []
    for what, chosen, some in others:
        best = min(((seconds, name) for name, other in some if key_of(other) != key_of(layout)
                    and name != chosen and (seconds := seconds_of(plan.cluster, plan.job, other)) is not None),
                    default=None)
        if best is not None:
            found.append(Choice(what, chosen, best[1], best[0] / plan.seconds - 1))
    return sorted(found, key=lambda choice: (-choice.loss, choice.what))


def _schedule(layout: Layout) -> str:
    return layout.schedule + (f" x {layout.chunks}" if layout.chunks > 1 else "")


@dataclass(frozen=True)
class Flip:
    """``conclusion`` no longer holds when the assumed coefficient at ``path`` is ``factor`` times as large."""

    conclusion: str
    path: str
    factor: float
    why_assumed: str
    seconds: tuple[float, float]
    """Of the winner and of the other plan, then."""


def flips(plan: Plan, others: Sequence[Plan]) -> tuple[list[Flip], int]:
    """Conclusions "``plan`` is faster than ..." that flip when one assumed coefficient moves by 30 %, and how many
    (conclusion, coefficient) pairs were tried. Coefficients that none of the plans touches are left out."""
    compared = [plan, *(other for other in others if other.seconds > plan.seconds)]
    found, tried = [], 0
    for path in plan.cluster.assumed:
        if not _matters(path, compared):
            continue
        for factor in DOUBT:
            try:
                moved = plan.cluster.scaled(path, factor)
            except (KeyError, ValueError):
                continue
            if moved.value(path) == plan.cluster.value(path):
                continue
            mine = seconds_of(moved, plan.job, plan.layout)
            for other in compared[1:]:
                theirs = seconds_of(moved, other.job, other.layout)
                tried += 1
                if mine is not None and theirs is not None and theirs < mine:
                    found.append(Flip(f"{plan.title} is faster than {other.name or other.title}", path, factor,
                                      plan.cluster.origins[path].text, (mine, theirs)))
    return found, tried


def _matters(path: str, plans: Sequence[Plan]) -> bool:
    parts = path.split(".")
    if parts[0] != "levels":
        return any(unit.device.name == parts[1] for unit in plans[0].cluster.units)
    if not any(parts[1] in plan.traffic for plan in plans):
        return False
    level = plans[0].cluster.level(parts[1])
    return len(parts) < 5 or any(
        plan.layout.network.get(level.name, level.technologies[0].name) == parts[3] for plan in plans)


def family(cluster: Cluster, layout: Layout) -> str:
    """What crosses the outermost level that the layout reaches: "pp across building", "dp + fsdp across region"."""
    crossed = crossing(cluster, layout)
    outermost = cluster.levels[-1].name
    if outermost in crossed:
        return " + ".join(crossed[outermost])
    return "nothing"


def families(plans: Iterable[Plan]) -> list[Plan]:
    """The first plan of each family."""
    found: dict[str, Plan] = {}
    for plan in plans:
        found.setdefault(family(plan.cluster, plan.layout), plan)
    return list(found.values())


@dataclass(frozen=True)
class Turn:
    """Where the winner changes: ``what`` times ``factor``; ``to``: the family that wins there."""

    what: str
    factor: float
    to: str


def turns(plans: Sequence[Plan]) -> list[Turn]:
    """How far the outermost level must change before another family of ``plans`` wins: bandwidth and delay, up to 32
    times less or more. Of the nearest such factor on each side, within 5 %."""
    pool = families(plans)
    if len(pool) < 2:
        return []
    cluster = pool[0].cluster
    outermost = cluster.levels[-1]
    home = family(cluster, pool[0].layout)
    moves: list[tuple[str, Callable[[float], Cluster]]] = [
        ("bandwidth", lambda factor: cluster.scaled(f"levels.{outermost.name}.bandwidth", factor)),
        ("delay", lambda factor: _delayed(cluster, factor))]
    found = []
    for what, move in moves:
        for direction in (-1, 1):
            last = 1.0
            for power in range(1, 6):
                factor = 2.0 ** (direction * power)
                if _winner(move(factor), pool) != home:
                    low, high = last, factor
                    while max(high / low, low / high) > 1.05:
                        middle = (low * high) ** 0.5
                        if _winner(move(middle), pool) == home:
                            low = middle
                        else:
                            high = middle
                    found.append(Turn(f"{what} of the {outermost.name} level", high, _winner(move(high), pool)))
                    break
                last = factor
    return found


def _delayed(cluster: Cluster, factor: float) -> Cluster:
    name = cluster.levels[-1].name
    moved = cluster.scaled(f"levels.{name}.latency", factor)
    return moved.scaled(f"levels.{name}.distance", factor) if cluster.levels[-1].distance else moved


def _winner(cluster: Cluster, pool: Sequence[Plan]) -> str:
    best = min(((seconds, number) for number, plan in enumerate(pool)
                if (seconds := seconds_of(cluster, plan.job, plan.layout)) is not None), default=(0.0, 0))
    return family(cluster, pool[best[1]].layout)


@dataclass(frozen=True)
class FlipMap:
    """Over ``distances`` (metres, columns) and ``ratios`` (oversubscription, rows) of the outermost level: ``winners``
    the family of the best plan, ``gains`` by how much its step is shorter than production's, ``titles`` the plan."""

    distances: tuple[float, ...]
    ratios: tuple[float, ...]
    winners: list[list[str]]
    gains: list[list[float]]
    titles: list[list[str]]


def flip_map(plans: Sequence[Plan], usual: Plan | None, options: Options, *,
             distances: Sequence[float] = (0.0, 1e4, 4e4, 1e5, 1e6), ratios: Sequence[float] = (1.0, 2.8, 7.0, 16.0),
             nodes: int = 200, simulations: int = 4, progress: Any = None) -> FlipMap:
    """A short search at each point, begun from ``plans``."""
    cluster, job = plans[0].cluster, plans[0].job
    name = cluster.levels[-1].name
    short = replace(options, nodes=nodes, simulations=simulations, keep=1)
    start = [plan.layout for plan in families(plans)]
    winners, saved, titles = [], [], []
    for row, ratio in enumerate(ratios):
        cells = []
        for column, distance in enumerate(distances):
            there = cluster.change(f"levels.{name}.oversubscription", ratio).change(f"levels.{name}.distance", distance)
            best = explore(there, job, short, start=start).plans[0]
            rule = None if usual is None else seconds_of(there, usual.job, usual.layout)
            cells.append((family(there, best.layout), 0.0 if rule is None else 1 - best.seconds / rule,
                          f"{best.title}<br>{best.seconds:.4g} s"))
            if progress is not None:
                progress("flip map", row * len(distances) + column + 1, len(ratios) * len(distances))
        winners.append([cell[0] for cell in cells])
        saved.append([cell[1] for cell in cells])
        titles.append([cell[2] for cell in cells])
    return FlipMap(tuple(distances), tuple(ratios), winners, saved, titles)


__all__ = ["Choice", "Flip", "FlipMap", "Gain", "Turn", "choices", "families", "family", "flip_map", "flips",
           "gains", "turns"]
