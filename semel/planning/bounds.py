"""Lower bounds of what is still undecided: of a shape's compute, and of any network that may be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product

from semel.planning.cluster import Cluster, Level, Technology
from semel.planning.compute import Part, embedding, head, transformer_layer
from semel.planning.layout import Layout
from semel.planning.network import rate
from semel.planning.space import Shape, Space

ENDLESS = 1e30
"""Bytes in flight of a window that limits nothing."""


class Floors:
    """Seconds that no layout of a shape can be below: its micro-batches through all layers, shared out evenly over the
    pipeline, on the fastest device, with nothing else in the step."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._known: dict[tuple[object, ...], float] = {}

    @cached_property
    def _devices(self) -> list:
        return list({unit.device.name: unit.device for unit in self._space.cluster.units}.values())

    def __call__(self, shape: Shape) -> float:
        job = self._space.job
        if job.kind == "recommender":
            return 0.0
        key = (*(shape.sizes.get(axis, 1) for axis in ("tp", "cp", "ep")), shape.microbatch, shape.recompute)
        if key not in self._known:
            layout = Layout(shape.sizes, microbatch=shape.microbatch, recompute=shape.recompute)  # type: ignore[arg-type]
            self._known[key] = min(self._model(device, layout) for device in self._devices)
        return self._space.microbatches(shape) * self._known[key] / shape.stages

    def _model(self, device, layout: Layout) -> float:
        """One micro-batch through the whole model, forward and backward."""
        job = self._space.job
        sparse = sum(job.is_moe(layer) for layer in range(job.layers))
        seconds = _seconds(embedding(device, job, layout)) + _seconds(head(device, job, layout))
        for count, moe in ((job.layers - sparse, False), (sparse, True)):
            if count:
                seconds += count * _seconds(transformer_layer(device, job, layout, moe))
        return seconds


def _seconds(part: Part) -> float:
    return part.forward + part.backward_input + part.backward_weight


def ideal(space: Space) -> tuple[Cluster, ...]:
    """Clusters of which at least one is as fast as ``space.cluster`` under any of the networks that may be chosen.

    Technologies of one level that run collectives alike are replaced by one with the best of each: the highest rate, no
    collisions, incast, or reconfiguration. Where they differ in the algorithm there is a cluster for each.
    """
    return tuple(replace(space.cluster, levels=levels) for levels in product(*_levels(space)))


def _levels(space: Space) -> Iterator[list[Level]]:
    for level, unit in zip(space.cluster.levels, (1, *space.cluster.sizes), strict=False):
        names = space.technologies(level.name)
        if len(names) == 1:
            yield [replace(level, technologies=(level.technology(names[0]),))]
            continue
        kinds: dict[str, list[Technology]] = {}
        for name in names:
            technology = level.technology(name)
            kinds.setdefault(technology.collective, []).append(technology)
        yield [_best(level, unit, collective, some) for collective, some in kinds.items()]


def _best(level: Level, unit: int, collective: str, some: list[Technology]) -> Level:
    fastest = max(rate(level, technology, unit) for technology in some)
    port = fastest * level.oversubscription * (unit if level.sharing == "unit" else 1)
    return replace(level, bandwidth=port, loss=0.0, technologies=(Technology(
        "ideal", segment=ENDLESS, collective=collective, concurrent=max(technology.concurrent for technology in some),
        price=min(technology.price for technology in some)),))
