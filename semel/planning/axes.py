"""How the axes of a layout lie over the devices of a cluster: strides, groups, pipeline boundaries."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from semel.planning.cluster import Cluster, Unit
from semel.planning.layout import AXES, Layout
from semel.planning.network import Span, span
from semel.planning.units import BYTES
from semel.planning.workload import Infeasible

ORDER = ("tp", "cp", "table", "fsdp", "dp", "pp")


@dataclass(frozen=True)
class Axes:
    """Axes with more than one rank: name -> (stride in devices, ranks), innermost first."""

    cluster: Cluster
    parts: Mapping[str, tuple[int, int]]
    expert: tuple[tuple[int, int], ...]
    """The (stride, ranks) that expert parallelism takes."""
    _levels: dict[tuple[int, int], int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, cluster: Cluster, layout: Layout) -> Axes:
        """Raises Infeasible where ranks and devices do not fit each other."""
        for axis, n in layout.sizes.items():
            if axis not in AXES:
                raise Infeasible(f"unknown axis {axis!r}; there are: {', '.join(AXES)}", axis)
            if n < 1:
                raise Infeasible(f"axis {axis} has {n} ranks; it needs at least 1", axis)
        if layout.devices > cluster.devices:
            raise Infeasible(f"the layout takes {layout.devices} devices, cluster {cluster.name!r} has "
                             f"{cluster.devices}", "devices", layout.devices - cluster.devices)
        order = [axis for axis in layout.order if axis in ORDER]
        order += [axis for axis in ORDER if axis not in order]
        parts: dict[str, tuple[int, int]] = {}
        stride = 1
        for axis in order:
            n = layout.size(axis)
            if n > 1:
                parts[axis] = (stride, n)
                stride *= n
        left = layout.size("ep")
        taken: dict[str, int] = {}
        for axis in [a for a in parts if a in ("fsdp", "dp")] + [a for a in parts if a == "cp"]:
            taken[axis] = math.gcd(left, parts[axis][1])
            left //= taken[axis]
        if left > 1:
            raise Infeasible(f"ep = {layout.size('ep')} does not divide fsdp x dp x cp = "
                             f"{layout.size('fsdp')} x {layout.size('dp')} x {layout.size('cp')}", "ep")
        expert = tuple((parts[axis][0], n) for axis, n in taken.items() if n > 1)
        return cls(cluster, parts, expert)

    def group(self, *axes: str) -> Span:
        """The ranks along these axes together."""
        return cached_span(self.cluster, tuple(part for axis, part in self.parts.items() if axis in axes))

    def experts(self, *axes: str) -> Span:
        """Ranks along these axes that hold the same experts."""
        taken = dict(self.expert)
        parts = []
        for axis, (stride, n) in self.parts.items():
            if axis in axes:
                group = taken.get(stride, 1)
                if n > group:
                    parts.append((stride * group, n // group))
        return cached_span(self.cluster, tuple(parts))

    def group_of(self, parts: tuple[tuple[int, int], ...]) -> Span:
        return cached_span(self.cluster, parts)

    @property
    def block(self) -> int:
        """Devices from one pipeline stage to the next."""
        return self.parts["pp"][0] if "pp" in self.parts else 1

    def boundary(self, source: int, target: int) -> int:
        """Outermost level between two pipeline stages (devices of the pipeline); -1 if they are the same."""
        key = (source, target)
        if key not in self._levels:
            self._levels[key] = crossing(self.cluster, source * self.block, target * self.block)
        return self._levels[key]

    def stage_units(self, stages: int, devices: int) -> list[tuple[Unit, ...]]:
        """Units of the outermost level that each pipeline stage lies in, as far as their devices differ."""
        units, starts = self.cluster.units, self.cluster.starts
        if self.cluster.uniform:
            return [units[:1]] * stages  # one is as good as all
        outermost = "pp" not in self.parts or self.block * stages == devices
        found = []
        for stage in range(stages):
            low, high = (stage * self.block, (stage + 1) * self.block) if outermost and stages > 1 else (0, devices)
            found.append(units[bisect_right(starts, low) - 1:bisect_left(starts, high)])
        return found


def crossing(cluster: Cluster, a: int, b: int) -> int:
    """Outermost level that lies between devices ``a`` and ``b``, counted in order; -1 for the same device."""
    if a == b:
        return -1
    place_a, place_b = _place(cluster, a), _place(cluster, b)
    last = len(cluster.levels) - 1
    if place_a[0] != place_b[0]:
        return last
    for index in range(last - 1, 0, -1):
        size = math.prod(level.count for level in cluster.levels[:index])
        if place_a[1] // size != place_b[1] // size:
            return index
    return 0


_HOPS: dict[tuple, tuple[Cluster, tuple[int, ...]]] = {}


def boundaries(cluster: Cluster, block: int, where: tuple[int, ...]) -> tuple[int, ...]:
    """Level from each virtual stage to the next; -1 where that is the same device, and behind the last. ``block``:
    devices from one stage to the next, ``where``: the stage of each virtual stage. Remembered."""
    key = (id(cluster), block, where)
    found = _HOPS.get(key)
    if found is None:
        if len(_HOPS) > 20_000:
            _HOPS.clear()
        levels = [crossing(cluster, a * block, b * block) for a, b in pairwise(where)]
        found = _HOPS[key] = (cluster, (*levels, -1))
    return found[1]


def _place(cluster: Cluster, position: int) -> tuple[int, int]:
    if len(cluster.levels) == 1:
        return 0, position
    unit = bisect_right(cluster.starts, position) - 1
    return unit, position - cluster.starts[unit]


_SPANS: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[Cluster, Span]] = {}


def cached_span(cluster: Cluster, parts: tuple[tuple[int, int], ...]) -> Span:
    """``network.span``, remembered: a search asks for the same groups again and again."""
    key = (id(cluster), parts)
    found = _SPANS.get(key)
    if found is None:
        if len(_SPANS) > 20_000:
            _SPANS.clear()
        found = _SPANS[key] = (cluster, span(cluster, parts))  # the cluster is kept, so that its id stays its own
    return found[1]


def compression(layout: Layout, dtype: str) -> dict[str, float]:
    """Level -> factor on the bytes of gradients across it."""
    return {level: min(1.0, BYTES[name] / BYTES[dtype]) for level, name in layout.compress.items()}


def split_layers(layers: int, speeds: list[float]) -> list[int]:
    """Layers of each virtual stage: even where speeds are, the ends of the model getting the fewer; else by speed."""
    count = len(speeds)
    if max(speeds) > min(speeds):
        share = [layers * speed / sum(speeds) for speed in speeds]
        taken = [max(1, int(part)) for part in share]
        order = sorted(range(count), key=lambda index: (taken[index] - share[index], index))
        for index in order:
            if sum(taken) >= layers:
                break
            taken[index] += 1
        while sum(taken) > layers:
            taken[max(range(count), key=lambda index: (taken[index] - share[index], index))] -= 1
        return taken
    return list(even_layers(layers, count))


@lru_cache(maxsize=10_000)
def even_layers(layers: int, count: int) -> tuple[int, ...]:
    """Layers of ``count`` equal virtual stages; the ends of the model get the fewer."""
    base, more = divmod(layers, count)
    ends = [end for pair in zip(range(count - 1, -1, -1), range(count), strict=True) for end in pair]
    fewer = set(list(dict.fromkeys(ends))[:count - more])
    return tuple(base if index in fewer else base + 1 for index in range(count))
