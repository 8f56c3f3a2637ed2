"""A plan: one layout of a job on a cluster, and what a step of it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from semel.planning.axes import Axes, split_layers
from semel.planning.cluster import Cluster
from semel.planning.compute import peak
from semel.planning.estimate import estimate
from semel.planning.job import Job, Recommender
from semel.planning.layout import AXES, Layout, placement
from semel.planning.schedules import Schedule, schedule
from semel.planning.simulate import Trace, hints, simulate
from semel.planning.workload import Workload, workload

HOUR = 3600.0


@dataclass(frozen=True)
class Plan:
    """One step of ``layout``, simulated by events.

    ``seconds`` a step; ``mfu`` model FLOPs over peak; ``cost`` dollars and ``energy`` joules a step; ``memory``
    [stages] peak bytes a device; ``exposed`` axis -> level -> seconds a device waits for it (mean over stages);
    ``bubble`` cause -> seconds a device computes nothing (mean); ``traffic`` level -> bytes a device sends a step, of
    the busiest stage; ``load`` level -> share of the step in which its link is busy; ``estimate`` seconds of the
    closed form; ``bound`` seconds that no plan of the search can be below, and ``gap`` = 1 - bound / best, the same
    for all plans of a search.
    """

    cluster: Cluster
    job: Job
    layout: Layout
    seconds: float
    mfu: float
    cost: float
    energy: float
    memory: tuple[float, ...]
    limit: float
    exposed: Mapping[str, Mapping[str, float]]
    bubble: Mapping[str, float]
    traffic: Mapping[str, float]
    load: Mapping[str, float]
    microbatches: int
    estimate: float
    bound: float = 0.0
    gap: float = 0.0
    exact: bool = True
    """False: its schedule or compression changes the optimization."""
    name: str = ""
    """Of a baseline."""
    notes: tuple[str, ...] = field(default=())

    def value(self, objective: str) -> float:
        """Seconds, dollars or joules a step."""
        return {"time": self.seconds, "cost": self.cost, "energy": self.energy}[objective]

    @property
    def peak_memory(self) -> float:
        return max(self.memory)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of each virtual stage, in model order; () for a recommender."""
        if isinstance(self.job, Recommender):
            return ()
        layout, job = self.layout, self.job
        found = Axes.of(self.cluster, layout).stage_units(layout.size("pp"), layout.devices)
        speeds = [min(peak(unit.device, job.dtype) for unit in units) for units in found]
        stages = placement(layout.schedule, layout.size("pp"), layout.chunks)
        return tuple(split_layers(job.layers, [speeds[stage] for stage in stages]))

    def workload(self) -> Workload:
        return workload(self.cluster, self.job, self.layout)

    def schedule(self) -> Schedule:
        return operations(self.layout, self.workload())

    def trace(self) -> Trace:
        """The simulated step."""
        return simulate(self.workload(), self.schedule())

    @property
    def title(self) -> str:
        """The choices in one line: "tp 8, pp 16, dp 128; interleaved x 4, 16 micro-batches of 1"."""
        return titled(self.layout, self.job.batch)

    def crossing(self) -> dict[str, tuple[str, ...]]:
        """Level -> the axes that cross it."""
        return crossing(self.cluster, self.layout)

    def to_json(self) -> dict[str, Any]:
        """Plain values: what ``semel plan search --json`` prints of it."""
        layout = self.layout
        return {
            "name": self.name, "cluster": self.cluster.name, "job": self.job.name, "title": self.title,
            "layout": {
                "sizes": dict(layout.sizes), "order": list(layout.order), "schedule": layout.schedule,
                "chunks": layout.chunks, "microbatch": layout.microbatch, "microbatches": self.microbatches,
                "network": dict(layout.network), "recompute": layout.recompute, "zero": layout.zero,
                "sequence_parallel": layout.sequence_parallel, "compress": dict(layout.compress),
                "overlap": sorted(layout.overlap)},
            "devices": layout.devices, "crossing": {level: list(axes) for level, axes in self.crossing().items()},
            "seconds": self.seconds, "mfu": self.mfu, "cost": self.cost, "energy": self.energy,
            "memory": list(self.memory), "memory_limit": self.limit,
            "exposed": {axis: dict(levels) for axis, levels in self.exposed.items()}, "bubble": dict(self.bubble),
            "traffic": dict(self.traffic), "load": dict(self.load), "estimate": self.estimate, "bound": self.bound,
            "gap": self.gap, "exact": self.exact, "notes": list(self.notes),
        }


def operations(layout: Layout, work: Workload) -> Schedule:
    """The operation lists of a layout's schedule; the greedy one looks at the workload."""
    looks = hints(work) if layout.schedule == "greedy" else {}
    return schedule(layout.schedule, work.stages, work.microbatches, layout.chunks, **looks)


def measured(cluster: Cluster, job: Job, layout: Layout, *, causes: bool = True) -> Plan:
    """The plan of a layout, simulated by events.

    ``causes``: also say where the bubble comes from, which takes two simulations more. Raises Infeasible where it does
    not fit, ValueError where the schedule does not take the layout's counts.
    """
    work = workload(cluster, job, layout)
    trace = simulate(work, operations(layout, work))
    exposed: dict[str, dict[str, float]] = {}
    for (axis, level), waited in trace.exposed.items():
        if waited.mean() > 0:
            exposed.setdefault(axis, {})[level] = float(waited.mean())
    seconds = trace.seconds
    load = {level: float(share.max()) for level, share in trace.link_load.items()}
    traffic = {level: share * seconds * work.links[level] for level, share in load.items()}
    mean = {level: float(share.mean()) * seconds * work.links[level] for level, share in trace.link_load.items()}
    return Plan(
        cluster, job, layout, seconds, trace.mfu, dollars(cluster, layout, seconds, mean),
        joules(cluster, layout, seconds), tuple(trace.peak_memory.tolist()), work.memory, exposed,
        bubbles(trace) if causes else {}, traffic, load, work.microbatches, estimate(work, layout).seconds,
        exact=trace.schedule.exact and not layout.compress)


def seconds_of(cluster: Cluster, job: Job, layout: Layout) -> float | None:
    """Of a step, simulated; None where the layout does not fit or its schedule finds no way."""
    try:
        work = workload(cluster, job, layout)
        return simulate(work, operations(layout, work)).seconds
    except ValueError:
        return None


def bubbles(trace: Trace) -> dict[str, float]:
    """Cause -> mean seconds a device computes nothing; all exposed communication together."""
    found: dict[str, float] = {}
    for cause, mean in trace.bubble.items():
        name = cause if isinstance(cause, str) else "exposed communication"
        found[name] = found.get(name, 0.0) + float(mean)
    return found


def titled(layout: Layout, batch: int) -> str:
    """A layout in one line, its axes innermost first."""
    placed = [axis for axis in layout.order if layout.size(axis) > 1 and axis != "ep"]
    placed += [axis for axis in AXES if axis not in placed and layout.size(axis) > 1]
    axes = ", ".join(f"{axis} {layout.size(axis)}" for axis in placed)
    pipeline = layout.schedule + (f" x {layout.chunks}" if layout.chunks > 1 else "") if layout.size("pp") > 1 else ""
    count = batch // max(1, layout.size("dp") * layout.size("fsdp") * layout.size("table") * layout.microbatch)
    batches = f"{count} micro-batch{'' if count == 1 else 'es'} of {layout.microbatch}"
    return f"{axes or 'one device'}; {pipeline + ', ' if pipeline else ''}{batches}" + (
        f", {layout.recompute} recompute" if layout.recompute != "none" else "") + (
        f"; {_network(layout)}" if layout.network else "") + "".join(
        f"; {dtype} gradients across {level}" for level, dtype in layout.compress.items())


def _network(layout: Layout) -> str:
    """Technology by technology: "spraying at rack/zone, ecmp at building"."""
    levels: dict[str, list[str]] = {}
    for level, name in layout.network.items():
        levels.setdefault(name, []).append(level)
    return ", ".join(f"{name} at {'/'.join(some)}" for name, some in levels.items())


def dollars(cluster: Cluster, layout: Layout, seconds: float, traffic: Mapping[str, float]) -> float:
    """Of a step: devices and the network technologies in use by the hour, and bytes that leave a unit."""
    hourly = cluster.device.price + sum(
        level.technology(layout.network.get(level.name)).price for level in cluster.levels)
    return layout.devices * hourly * seconds / HOUR + egress(cluster, layout, traffic)


def egress(cluster: Cluster, layout: Layout, traffic: Mapping[str, float]) -> float:
    """Dollars of a step for bytes across levels that charge for them; ``traffic``: level -> bytes a device."""
    return layout.devices * sum(level.egress * traffic.get(level.name, 0.0) for level in cluster.levels)


def joules(cluster: Cluster, layout: Layout, seconds: float) -> float:
    """Of a step: every device in use draws its power all the time, waiting or not."""
    return layout.devices * cluster.device.power * seconds


def crossing(cluster: Cluster, layout: Layout) -> dict[str, tuple[str, ...]]:
    """Level -> the axes with ranks on both sides of it."""
    axes = Axes.of(cluster, layout)
    groups = {axis: axes.group(axis) for axis in axes.parts}
    if axes.expert:
        groups["ep"] = axes.group_of(axes.expert)
    return {level.name: crossed for number, level in enumerate(cluster.levels)
            if (crossed := tuple(axis for axis, group in groups.items() if group.factors[number] > 1))}


def ranked(plans: list[Plan], objective: str, bound: float) -> list[Plan]:
    """Best first, ties by cost and title, with the search's bound and gap. Of plans that differ in the network only,
    the best one is kept."""
    found: dict[str, Plan] = {}
    for plan in sorted(plans, key=lambda plan: (plan.value(objective), plan.cost, plan.title)):
        bare = replace(plan.layout, network={})
        found.setdefault(f"{titled(bare, plan.job.batch)} {sorted(bare.compress.items())}", plan)
    best = list(found.values())
    if not best:
        return best
    gap = max(0.0, 1 - bound / best[0].value(objective)) if math.isfinite(bound) else 0.0
    return [replace(plan, bound=min(bound, best[0].value(objective)), gap=gap) for plan in best]
