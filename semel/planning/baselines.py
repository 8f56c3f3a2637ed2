"""What a joint search is compared with: the usual rule, optimizers of one dimension, and planners of others.

Each is the same search over a part of the space, judged by the same simulator, so that differences come from what a
planner may choose and from nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from semel.planning.cluster import Cluster
from semel.planning.estimate import estimate
from semel.planning.job import Job, Transformer
from semel.planning.layout import AXES, Layout
from semel.planning.options import Options
from semel.planning.plan import Plan, measured
from semel.planning.space import Shape, Space, divisors
from semel.planning.workload import Infeasible, workload

Value = Callable[[Layout], Any]
"""A layout's estimate, something that can be compared; None where it does not fit."""


@dataclass(frozen=True)
class Baseline:
    """``pins`` narrows the space, given the production layout."""

    name: str
    says: str
    """What it may choose, in plain words."""
    pins: Callable[[Space, Layout], dict[str, Any]]


def production(space: Space, value: Value) -> Layout | None:
    """Tensor parallelism fills the host, stages lie over racks, data parallelism is outermost; interleaved 1F1B; ECMP.

    Of a mixture of experts, experts lie over the innermost data ranks; of a recommender, tables lie over all ranks.
    What the rule leaves open (stages, chunks, recompute) is the fastest that fits, by estimate; micro-batches are of
    one sequence. None where nothing of the kind fits or the options forbid it.
    """
    found = [each for layout in _by_rule(space) if (each := value(layout)) is not None]
    return min(found).layout if found else None


def _by_rule(space: Space) -> list[Layout]:
    host = space.cluster.levels[0].count
    network = ecmp(space)
    smallest = min(space.options.microbatches) if "microbatch" not in space.options.pinned else None
    shapes = [shape for shape in space.shapes if smallest is None or shape.microbatch == smallest]
    if space.job.kind == "recommender":
        most = max((shape.sizes.get("table", 1) for shape in shapes), default=1)
        shapes = [shape for shape in shapes if shape.sizes.get("table", 1) == most and "fsdp" not in shape.sizes]
        widest = max((shape.microbatch for shape in space.shapes), default=1)
        shapes = [shape for shape in space.shapes if shape.sizes.get("table", 1) == most and "fsdp" not in shape.sizes
                  and shape.microbatch == widest] or shapes
    else:
        fits = [shape for shape in shapes if shape.sizes.get("tp", 1) <= host and "cp" not in shape.sizes]
        tp = max((shape.sizes.get("tp", 1) for shape in fits), default=1)
        shapes = [shape for shape in fits if shape.sizes.get("tp", 1) == tp]
        plain = [shape for shape in shapes if "fsdp" not in shape.sizes]
        shapes = plain or shapes
        if isinstance(space.job, Transformer) and space.job.experts:
            shapes = _one_expert_size(space, shapes)
    layouts = []
    for shape in shapes:
        wanted = [axis for axis in ("tp", "cp", "table", "pp", "fsdp", "dp") if axis in shape.sizes]
        order = _nearest(space, shape, wanted)
        pipelines = space.schedules(shape.stages, space.microbatches(shape))
        usual = [pair for pair in pipelines if pair[0] == "interleaved"] or [
            pair for pair in pipelines if pair[0] == "1f1b"] or list(pipelines[:1])
        layouts += [space.layout(shape, order, name, chunks, network, {}) for name, chunks in usual]
    return layouts


def _one_expert_size(space: Space, shapes: list[Shape]) -> list[Shape]:
    """Of each split, experts over as many ranks as divide them, within what one unit of the outermost level holds."""
    inside = min(unit.devices
                 for unit in space.cluster.units) if len(space.cluster.levels) > 1 else space.cluster.devices
    best: dict[Any, Shape] = {}
    for shape in shapes:
        split = tuple(sorted((axis, size) for axis, size in shape.sizes.items() if axis != "ep"))
        key = (split, shape.recompute)
        if shape.sizes.get("ep", 1) * shape.sizes.get("tp", 1) <= inside and (
                key not in best or shape.sizes.get("ep", 1) > best[key].sizes.get("ep", 1)):
            best[key] = shape
    return list(best.values())


def _nearest(space: Space, shape: Shape, wanted: list[str]) -> tuple[str, ...]:
    """``wanted``, or the order that stands for its footprint."""
    if "order" in space.options.pinned:
        return space.orders(shape.sizes)[0]
    print_ = space.footprint(shape.sizes, tuple(wanted))
    return next((order for order in space.orders(shape.sizes) if space.footprint(shape.sizes, order) == print_),
                tuple(wanted))


def ecmp(space: Space) -> dict[str, str]:
    """At each level flows hashed to paths where that is offered, else the first technology."""
    network = {}
    for level in space.cluster.levels:
        names = space.technologies(level.name)
        hashed = [name for name in names if level.technology(name).routing == "ecmp"]
        if len(names) > 1 or level.name in space.options.pinned.get("network", {}):
            network[level.name] = hashed[0] if hashed else names[0]
    return network


def _sizes(layout: Layout) -> dict[str, Any]:
    return {axis: layout.size(axis) for axis in AXES}


def _placement(space: Space, usual: Layout) -> dict[str, Any]:
    pins: dict[str, Any] = {"network": dict(usual.network), "microbatch": usual.microbatch}
    if usual.size("pp") > 1:
        pins |= {"schedule": usual.schedule, "chunks": usual.chunks}
    return pins


def _schedule(space: Space, usual: Layout) -> dict[str, Any]:
    return {**_sizes(usual), "order": usual.order, "network": dict(usual.network)}


def _network(space: Space, usual: Layout) -> dict[str, Any]:
    return {**_sizes(usual), "order": usual.order, "schedule": usual.schedule, "chunks": usual.chunks,
            "microbatch": usual.microbatch, "recompute": usual.recompute}


def _crosspipe(space: Space, usual: Layout) -> dict[str, Any]:
    pins: dict[str, Any] = {"tp": usual.size("tp"), "cp": 1, "ep": usual.size("ep"), "fsdp": 1,
                            "network": dict(usual.network), "order": ("tp", "cp", "table", "fsdp", "dp", "pp")}
    return pins | ({"schedule": "greedy"} if space.job.kind == "transformer" else {})


def _sailor(space: Space, usual: Layout) -> dict[str, Any]:
    return {"cp": 1, "ep": usual.size("ep"), "fsdp": 1, "schedule": "1f1b", "chunks": 1, "network": dict(usual.network),
            "order": ("tp", "cp", "table", "dp", "fsdp", "pp")}


BASELINES = (
    Baseline("production", "nothing: TP in the host, PP across racks, DP across buildings, interleaved 1F1B, ECMP",
             lambda space, usual: {}),
    Baseline("placement only", "ranks along each axis and where they lie; schedule, micro-batch and network as usual",
             _placement),
    Baseline("schedule only", "schedule, chunks, micro-batch and recompute; the rest as usual", _schedule),
    Baseline("network only", "the technology of each level; the rest as usual", _network),
    Baseline("CrossPipe-like", "PP and DP, stages across the outermost level, a schedule that knows latency and "
                               "bandwidth, "
             "micro-batches (arXiv 2507.00217); no experts, no network", _crosspipe),
    Baseline("Sailor-like", "TP, PP, DP and micro-batches, stages across the outermost level, 1F1B without overlap in "
                            "what "
             "it believes (SOSP 2025); no chunks, no network", _sailor),
)
SINGLE = ("placement only", "schedule only", "network only")


def run(name: str, cluster: Cluster, job: Job, options: Options | None = None) -> Plan | None:
    """The plan of one baseline (``BASELINES`` by name); None where none of its kind fits. ValueError for another
    name."""
    chosen = next((each for each in BASELINES if each.name == name), None)
    if chosen is None:
        raise ValueError(f"no baseline is called {name!r}; there are: {', '.join(each.name for each in BASELINES)}")
    options = options or Options()
    space = Space(cluster, job, _widened(options))
    usual = usual_layout(space)
    if usual is None:
        return None
    if name == "production":
        return replace(measured(cluster, job, usual), name=name)
    pins = chosen.pins(space, usual)
    believed = replace(space.options, pinned={**options.pinned, **pins})
    try:
        from semel.planning.explorer import explore

        if name != "Sailor-like":
            best = explore(cluster, job, believed, start=(usual,), usual=False).plans[0]
        else:
            blind = _blind(cluster, job, replace(believed, overlap=()))
            best = measured(cluster, job, replace(blind.layout, overlap=frozenset(options.overlap)))
    except ValueError:  # nothing of the kind fits
        return None
    return replace(best, name=name)


def _blind(cluster: Cluster, job: Job, options: Options) -> Plan:
    """The best plan with tensor parallelism inside a host. Raises Infeasible where none fits."""
    from semel.planning.explorer import explore

    inside = divisors(cluster.levels[0].count) if isinstance(job, Transformer) else (1,)
    if "tp" in options.pinned:
        inside = (options.pinned["tp"],)
    each = replace(options, nodes=max(1, options.nodes // len(inside)))
    found, why = [], None
    for tp in inside:
        try:
            found.append(explore(cluster, job, replace(each, pinned={**options.pinned, "tp": tp}),
                                 usual=False).plans[0])
        except Infeasible as reason:
            why = reason
    if not found:
        raise why or Infeasible("no layout has tensor parallelism inside a host")
    return min(found, key=lambda plan: plan.value(options.objective))


def _widened(options: Options) -> Options:
    """With the schedules that baselines are made of."""
    missing = tuple(name for name in ("1f1b", "interleaved", "greedy") if name not in options.schedules)
    return replace(options, schedules=(*options.schedules, *missing))


def usual_layout(space: Space) -> Layout | None:
    """``production``, by estimates of its own."""
    from semel.planning.explorer import Candidate, key_of

    def value(layout: Layout) -> Candidate | None:
        try:
            found = estimate(workload(space.cluster, space.job, layout), layout)
        except ValueError:
            return None
        return Candidate(found.seconds, key_of(layout), found.lower, layout)

    return production(space, value)
