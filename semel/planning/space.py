"""Everything a search may choose: axis -> level x schedule x micro-batches x chunks x network. Lazy, in one fixed
order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations, product
from typing import Any

from semel.planning.axes import cached_span
from semel.planning.cluster import Cluster
from semel.planning.job import Job, Recommender
from semel.planning.layout import Layout
from semel.planning.options import Options
from semel.planning.schedules import CHUNKS

PLACED = ("tp", "cp", "table", "fsdp", "dp", "pp")
"""Axes whose product is the number of devices; ``ep`` runs over some of the same ranks."""
DATA = ("table", "fsdp", "dp")
"""Axes whose ranks have samples of their own."""


@dataclass(frozen=True)
class Shape:
    """What decides how much a device computes: ranks along each axis, micro-batch, recompute."""

    sizes: Mapping[str, int]
    microbatch: int
    recompute: str

    @property
    def stages(self) -> int:
        return self.sizes.get("pp", 1)


def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(low + [number // d for d in reversed(low) if d * d != number])


@dataclass(frozen=True)
class Space:
    """The layouts that ``options`` allows for ``job`` on ``cluster``. Whether one fits is not asked here."""

    cluster: Cluster
    job: Job
    options: Options

    @property
    def devices(self) -> tuple[int, ...]:
        """How many devices a layout may use. ValueError for more than there are."""
        chosen = self.options.devices or (self.cluster.devices,)
        for count in chosen:
            if count > self.cluster.devices:
                raise ValueError(f"search {self.options.name!r}: {count} devices are asked for, cluster "
                                 f"{self.cluster.name!r} has {self.cluster.devices}")
        return chosen

    def _sizes(self, axis: str, among: int) -> tuple[int, ...]:
        """Ranks that ``axis`` may have, of those that divide ``among``."""
        pinned = self.options.pinned.get(axis)
        allowed = divisors(among) if axis in self.options.axes else (1,)
        return allowed if pinned is None else tuple(size for size in divisors(among) if size == pinned)

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        pinned = self.options.pinned.get("microbatch")
        return self.options.microbatches if pinned is None else (pinned,)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """All shapes whose counts divide."""
        microbatches = self.microbatch_sizes
        pinned = self.options.pinned.get("recompute")
        recompute = self.options.recompute if pinned is None else (pinned,)
        if self.job.kind == "recommender" and pinned is None:
            recompute = recompute[:1]
        found = []
        for devices in self.devices:
            for sizes in self._divided(devices):
                replicas = math.prod(sizes.get(axis, 1) for axis in DATA)
                for microbatch in microbatches:
                    if self.job.batch % (replicas * microbatch) == 0:
                        found += [Shape(sizes, microbatch, kept) for kept in recompute]
        return tuple(found)

    def _divided(self, devices: int) -> Iterator[dict[str, int]]:
        for split in self._model(devices):
            data = devices // (split["tp"] * split["cp"] * split["pp"])
            if self.job.batch % data:
                continue
            tables = self._sizes("table", data) if self.job.kind == "recommender" else (1,)
            for table, fsdp in product(tables, self._sizes("fsdp", data)):
                if data % (table * fsdp) or data // (table * fsdp) not in self._sizes("dp", data):
                    continue
                sizes = {**split, "table": table, "fsdp": fsdp, "dp": data // (table * fsdp)}
                for ep in self._experts(split["cp"] * data):
                    yield {axis: size for axis, size in {**sizes, "ep": ep}.items() if size > 1}

    def _model(self, devices: int) -> Iterator[dict[str, int]]:
        """Ranks along the axes that split the model or the sequence."""
        job = self.job
        if isinstance(job, Recommender):
            yield {"tp": 1, "cp": 1, "pp": 1}
            return
        for tp in self._sizes("tp", devices):
            for cp in self._sizes("cp", devices // tp) if job.heads % tp == 0 else ():
                for pp in self._sizes("pp", devices // tp // cp) if cp == 1 or job.sequence % (2 * cp) == 0 else ():
                    if pp <= job.layers:
                        yield {"tp": tp, "cp": cp, "pp": pp}

    def _experts(self, ranks: int) -> tuple[int, ...]:
        """Ranks that experts may be spread over."""
        if isinstance(self.job, Recommender) or not self.job.experts:
            return (1,)
        experts = self.job.experts
        return tuple(size for size in self._sizes("ep", ranks) if experts % size == 0)

    def orders(self, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """Ways to lay the axes over the levels, innermost first: one of those that put every axis on the same
        levels."""
        key = tuple(sorted(sizes.items()))
        if key not in self._orders:
            self._orders[key] = self._distinct(sizes)
        return self._orders[key]

    @cached_property
    def _orders(self) -> dict[Any, tuple[tuple[str, ...], ...]]:
        return {}

    def _distinct(self, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        used = [axis for axis in PLACED if sizes.get(axis, 1) > 1]
        pinned = self.options.pinned.get("order")
        if pinned is not None:
            listed = [axis for axis in pinned if axis in used]
            return ((*listed, *(axis for axis in used if axis not in listed)),)
        found: dict[Any, tuple[str, ...]] = {}
        for order in permutations(used):
            found.setdefault(self.footprint(sizes, order), order)
        return tuple(found.values())

    def footprint(self, sizes: Mapping[str, int], order: tuple[str, ...]) -> Any:
        """Axis -> ranks joined at each level, and how far pipeline stages lie apart: what communication depends on."""
        places, stride = [], 1
        for axis in order:
            places.append((axis, cached_span(self.cluster, ((stride, sizes[axis]),)).factors, stride if axis == "pp"
                           else 0))
            stride *= sizes[axis]
        return tuple(sorted(places))

    def schedules(self, stages: int, microbatches: int) -> tuple[tuple[str, int], ...]:
        """(schedule, chunks a device) that take so many stages and micro-batches."""
        options = self.options
        names = (options.pinned["schedule"],) if "schedule" in options.pinned else options.schedules
        chunks = (options.pinned["chunks"],) if "chunks" in options.pinned else options.chunks
        if stages == 1:
            plain = next((name for name in names if CHUNKS[name][0] == 1), None)
            return () if plain is None or 1 not in (1, *chunks) else ((plain, 1),)
        found = []
        for name in names:
            least, most = CHUNKS[name]
            tried = chunks if least < most else (least,)
            found += [(name, count) for count in tried if least <= count <= most and stages * count <= self._layers
                      and takes(name, stages, microbatches)]
        return tuple(found)

    @property
    def _layers(self) -> int:
        return 1 if isinstance(self.job, Recommender) else self.job.layers

    def networks(self, levels: int) -> tuple[dict[str, str], ...]:
        """Technology of each of the innermost ``levels`` levels that offer a choice; the others keep their first."""
        return tuple(dict(zip(self._open(levels), chosen, strict=True)) for chosen in product(
            *(self.technologies(name) for name in self._open(levels))))

    def _open(self, levels: int) -> list[str]:
        """Names of the levels with a choice."""
        return [level.name for level in self.cluster.levels[:levels]
                if len(self.technologies(level.name)) > 1 or level.name in self.options.pinned.get("network", {})]

    def technologies(self, level: str) -> tuple[str, ...]:
        """Names of the technologies that may be used at a level, its first one first. ValueError for a pin that is
        none."""
        if level not in self._technologies:
            self._technologies[level] = self._offered(level)
        return self._technologies[level]

    @cached_property
    def _technologies(self) -> dict[str, tuple[str, ...]]:
        return {}

    def _offered(self, level: str) -> tuple[str, ...]:
        offered = [technology.name for technology in self.cluster.level(level).technologies]
        pinned = self.options.pinned.get("network", {}).get(level)
        if pinned is not None:
            if pinned not in offered:
                raise ValueError(f"search {self.options.name!r}: pinned.network.{level} is {pinned!r}, but cluster "
                                 f"{self.cluster.name!r} offers there: {', '.join(offered)}")
            return (pinned,)
        allowed = self.options.technologies
        return tuple(name for name in offered if name == offered[0] or not allowed or name in allowed)

    def compressions(self) -> tuple[dict[str, str], ...]:
        outermost = self.cluster.levels[-1].name
        return ({}, *({outermost: dtype} for dtype in self.options.compress))

    def spanned(self, sizes: Mapping[str, int]) -> int:
        """How many of the innermost levels a layout reaches."""
        devices, inside = 1, 1
        for axis in PLACED:
            devices *= sizes.get(axis, 1)
        for number, level in enumerate(self.cluster.levels, start=1):
            inside *= level.count
            if devices <= inside:
                return number
        return len(self.cluster.levels)

    def microbatches(self, shape: Shape) -> int:
        return self.job.batch // (math.prod(shape.sizes.get(axis, 1) for axis in DATA) * shape.microbatch)

    def layout(self, shape: Shape, order: tuple[str, ...], name: str, chunks: int, network: Mapping[str, str],
               compress: Mapping[str, str]) -> Layout:
        # Axes that run over others' ranks have no place of their own.
        return Layout(sizes=shape.sizes, order=order, schedule=name, chunks=chunks, microbatch=shape.microbatch,
                      network=network, recompute=shape.recompute, compress=compress,  # type: ignore[arg-type]
                      overlap=frozenset(self.options.overlap))

    def layouts(self) -> Iterator[Layout]:
        """Every layout, shape by shape: what a search chooses from, and brute force walks through."""
        for shape in self.shapes:
            networks = self.networks(self.spanned(shape.sizes))
            pipelines = self.schedules(shape.stages, self.microbatches(shape))
            for order, (name, chunks), network, compress in product(
                    self.orders(shape.sizes), pipelines, networks, self.compressions()):
                yield self.layout(shape, order, name, chunks, network, compress)

    def narrowed(self, **pinned: Any) -> Space:
        """The part of the space with further choices pinned."""
        return replace(self, options=replace(self.options, pinned={**self.options.pinned, **pinned}))


def takes(name: str, stages: int, microbatches: int) -> bool:
    """Whether a schedule takes these counts: the arithmetic of its generator, without its lists."""
    if name == "interleaved":
        return microbatches % stages == 0
    if name == "dualpipe_v":
        return microbatches >= 2 * stages
    return True
