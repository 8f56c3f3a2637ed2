"""Lower bounds of what is still undecided: of a shape's compute, and of any network that may be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf, lcm
from typing import Any

from semel.planning.axes import cached_span
from semel.planning.cluster import Cluster, Device, Level, Technology
from semel.planning.compute import Part, embedding, head, transformer_layer
from semel.planning.estimate import alone, estimate
from semel.planning.job import Recommender, Transformer
from semel.planning.layout import Layout
from semel.planning.network import Fabric, Loads, Span, rate
from semel.planning.space import Shape, Space, divisors
from semel.planning.transformer import transformer_workload
from semel.planning.units import BYTES
from semel.planning.workload import Infeasible, unchecked

ENDLESS = 1e30
"""Bytes in flight of a window that limits nothing."""


class Floors:
    """What no layout of a shape can be below, and a guess of what its best one takes. All without a node of the
    search."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._parts: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._tight: dict[tuple[object, ...], float] = {}

    @cached_property
    def _devices(self) -> list[Device]:
        return list({unit.device.name: unit.device for unit in self._space.cluster.units}.values())

    @property
    def _model(self) -> Transformer:
        job = self._space.job
        assert isinstance(job, Transformer)
        return job

    @cached_property
    def _weights(self) -> tuple[float, float]:
        """(all weights, those of routed experts)."""
        job = self._model
        return job.parameters(), sum(job.layer_parameters(layer)[1] for layer in range(job.layers))

    @cached_property
    def _any_batch(self) -> Transformer:
        """The job with a batch that divides whatever is asked."""
        job = self._model
        return replace(job, batch=lcm(*self._space.microbatch_sizes) * max(1, job.experts))

    def seconds(self, shape: Shape) -> float:
        """Its micro-batches through all layers, shared out evenly over the pipeline, on the fastest device; nothing
        else."""
        if self._space.job.kind == "recommender":
            return 0.0
        return self._space.microbatches(shape) * self._part(shape)[0] / shape.stages

    def tight(self, shape: Shape) -> float:
        """Seconds, like ``seconds``, with what no schedule, placement or network of the space avoids: the way of the
        first micro-batch to each stage and of the last one back, tensor and context parallelism's transfers where they
        are in line, and activations that must fit (inf where under no schedule they do). About a millisecond."""
        space = self._space
        low = self.seconds(shape)
        if space.job.kind == "recommender" or not space.cluster.uniform:
            return low
        split = tuple(shape.sizes.get(axis, 1) for axis in ("tp", "cp", "ep", "pp"))
        key = (*split, shape.microbatch, shape.recompute, space.microbatches(shape))
        if key not in self._tight:
            self._tight[key] = min((self._least(shape, *pipeline) for pipeline in space.schedules(
                shape.stages, space.microbatches(shape))), default=inf)
        return max(low, self._tight[key])

    def _least(self, shape: Shape, schedule: str, chunks: int) -> float:
        """Of one schedule, however the ranks that split the batch are shared out between dp and fsdp: under a pipeline
        dp takes the least memory (its optimizer is sharded as far as any), without one fsdp over all of them may."""
        data = shape.sizes.get("dp", 1) * shape.sizes.get("fsdp", 1)
        whole = {axis: size for axis, size in shape.sizes.items() if axis not in ("dp", "fsdp")}
        least, fits = inf, False
        for axis in ("dp", "fsdp") if shape.stages == 1 else ("dp",):
            layout = Layout({**whole, axis: data}, schedule=schedule, chunks=chunks, microbatch=shape.microbatch,
                            recompute=shape.recompute,  # type: ignore[arg-type]
                            overlap=frozenset(self._space.options.overlap) | {axis})
            try:
                work = transformer_workload(self._space.cluster, self._model, layout, self._fabric(layout.devices))
            except Infeasible:
                continue
            found = estimate(work, layout)
            least = min(least, found.lower)
            fits = fits or max(memory.total for memory in found.memory) <= self._space.options.memory * work.memory
        return least if fits else inf

    def _fabric(self, devices: int) -> Least:
        if devices not in self._fabrics:
            clusters = ideal(self._space)
            networks = tuple(Fabric.choose(cluster, {}) for cluster in clusters)
            self._fabrics[devices] = Least(self._space.cluster, (), (), {}, networks=networks, devices=devices)
        return self._fabrics[devices]

    @cached_property
    def _fabrics(self) -> dict[int, Least]:
        return {}

    def promise(self, shape: Shape) -> float:
        """``seconds`` with transfers in line, on the innermost levels, and a pipeline that fills a quarter as long as
        1F1B's: by this, shapes are tried one after the other. It bounds nothing."""
        if self._space.job.kind == "recommender":
            return 1.0 / shape.microbatch
        compute, in_line, _ = self._part(shape)
        stages = shape.stages
        return (self._space.microbatches(shape) + (stages - 1) / 4) * (compute + in_line) / stages

    def memory(self, shape: Shape) -> float:
        """Bytes of a device that every layout of the shape takes: weights, gradients and optimizer state, evenly over
        stages, and the activations that the first stage holds of as many micro-batches as there are stages."""
        job = self._space.job
        if isinstance(job, Recommender):
            return job.table_parameters() * BYTES[job.table_dtype] / shape.sizes.get("table", 1)
        tp, cp, ep, stages = (shape.sizes.get(axis, 1) for axis in ("tp", "cp", "ep", "pp"))
        fsdp, data = shape.sizes.get("fsdp", 1), shape.sizes.get("dp", 1) * shape.sizes.get("fsdp", 1) * cp
        weights_in_all, routed = self._weights
        kept = BYTES[job.storage_dtype] + BYTES[job.gradient_dtype]
        held = 0.0
        for weights, copies in ((weights_in_all - routed, data), (routed / ep, max(1, data // ep))):
            spread = min(copies, fsdp * cp) if fsdp > 1 and stages == 1 else 1
            held += weights * (kept / spread + job.optimizer.state / copies)
        layers = max(0.0, job.layers / stages - 1)
        under_way = min(stages, self._space.microbatches(shape))
        return held / (tp * stages) + under_way * layers * self._part(shape)[2]

    def _part(self, shape: Shape) -> tuple[float, float, float]:
        """One micro-batch through the whole model: (seconds of compute, of transfers in line, bytes of activations a
        layer)."""
        key = (*(shape.sizes.get(axis, 1) for axis in ("tp", "cp", "ep")), shape.microbatch, shape.recompute)
        if key not in self._parts:
            layout = Layout(shape.sizes, microbatch=shape.microbatch,
                            recompute=shape.recompute,  # type: ignore[arg-type]
                            overlap=frozenset(self._space.options.overlap))
            compute, kept = min(self._whole(device, layout) for device in self._devices)
            self._parts[key] = (compute, self._in_line(layout), kept)
        return self._parts[key]

    def _whole(self, device: Device, layout: Layout) -> tuple[float, float]:
        """(seconds of one micro-batch through the whole model, bytes of activations of the layer that keeps the
        least)."""
        job = self._model
        sparse = sum(job.is_moe(layer) for layer in range(job.layers))
        seconds = _seconds(embedding(device, job, layout)) + _seconds(head(device, job, layout))
        kept = float("inf")
        for count, moe in ((job.layers - sparse, False), (sparse, True)):
            if count:
                part = transformer_layer(device, job, layout, moe)
                seconds += count * _seconds(part)
                kept = min(kept, part.activation)
        return seconds, kept

    def _in_line(self, layout: Layout) -> float:
        """Of one micro-batch through the whole model as one stage."""
        sizes = {axis: layout.size(axis) for axis in ("tp", "cp", "ep")} | {"dp": layout.size("ep")}
        layout = Layout(sizes, microbatch=layout.microbatch, recompute=layout.recompute, overlap=layout.overlap)
        try:
            work = unchecked(self._space.cluster, self._any_batch, layout)
        except ValueError:
            return 0.0
        return sum(alone(move, work.links)[0] * move.count for chunk in work.chunks for move in chunk.transfers
                   if not move.hidden and move.phase not in ("start", "end"))


@dataclass(frozen=True)
class Least(Fabric):
    """What a collective of one axis costs where it lies best, on the best of ``networks``: as latency, without any
    load. Sends and all-to-alls cost nothing."""

    networks: tuple[Fabric, ...] = ()
    devices: int = 1

    def collective(self, kind: str, group: Span, b: float, **how: Any) -> tuple[float, Loads]:
        if kind == "all_to_all" or self.devices % group.n:
            return 0.0, ()
        return min(network.seconds(*network.collective(kind, cached_span(network.cluster, ((stride, group.n),)), b))
                   for network in self.networks for stride in divisors(self.devices // group.n)), ()

    def send(self, index: int, b: float, stride: int = 1, patterns: Any = None) -> tuple[float, Loads]:
        return 0.0, ()


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
