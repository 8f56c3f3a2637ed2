"""Placement x schedule x network, searched together.

Three stages. *Descent*: from a few layouts, one choice after the other is improved by the closed-form estimate.
*Sweep*: shapes in the order of their floor (``bounds``), and the layouts of each, as long as a bound is below the best
that was simulated; whole shapes, orders and schedules fall at once. *Refinement*: the best by estimate are simulated
by events, until no bound is left below the best one. A search that the limits did not cut short is exact: its gap is 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from semel.planning.bounds import Floors, ideal
from semel.planning.cluster import Cluster
from semel.planning.estimate import Estimate, estimate
from semel.planning.job import Job
from semel.planning.layout import Layout
from semel.planning.options import RECOMPUTE, Options
from semel.planning.plan import HOUR, Plan, bubbles, egress, measured, ranked, titled
from semel.planning.space import PLACED, Shape, Space, divisors
from semel.planning.units import text
from semel.planning.workload import Infeasible, Workload, unchecked, workload

Progress = Callable[[str, int, int | None], None]

DESCENTS = 10
"""Layouts that are improved choice by choice."""
STARTS = 2
"""Layouts of each split of the model that are tried as starts."""
DESCENT_SHARE = 0.4
"""Of the nodes, at most, spent on descents and on where to begin them, if the space is small enough to be swept."""
SWEPT = 20
"""Nodes that a shape takes, about, when it is swept."""


@dataclass(frozen=True)
class Outcome:
    """``plans`` best first. ``bound``: what none is below, in the objective's unit. ``complete``: no limit cut the
    search short. ``nodes`` estimated, ``simulated`` by events, ``shapes`` in the space, of which ``pruned`` fell by
    their floor."""

    plans: list[Plan]
    bound: float
    complete: bool
    nodes: int
    simulated: int
    shapes: int
    pruned: int

    @property
    def gap(self) -> float:
        return self.plans[0].gap


def search(cluster: Cluster, job: Job, options: Options | None = None, *, start: Iterable[Layout] = (),
           progress: Progress | None = None) -> list[Plan]:
    """The best plans of ``job`` on ``cluster``, best first: at most ``options.keep``.

    ``start``: layouts to begin with, such as another cluster's best plan. ``progress(what, done, total)`` is called now
    and then. Raises ``Infeasible`` (a ValueError) where nothing fits: which memory term is over by how much, and the
    smallest change that helps; ValueError for options that contradict the cluster or the job.
    """
    return explore(cluster, job, options, start=start, progress=progress).plans


def explore(cluster: Cluster, job: Job, options: Options | None = None, *, start: Iterable[Layout] = (),
            progress: Progress | None = None, usual: bool = True) -> Outcome:
    """``search`` with how it went. ``usual``: begin with the production layout, too."""
    from semel.planning.baselines import production

    options = options or Options()
    space = Space(cluster, job, options)
    state = _State(space, progress or (lambda what, done, total: None))
    if not space.shapes:
        raise Infeasible(nothing_divides(space), "counts")
    begin = [layout for layout in start if state.allowed(layout)]
    found = production(space, state.value) if usual else None
    if found is not None and state.allowed(found):
        begin.append(found)
    state.descend(begin)
    state.sweep()
    state.refine()
    return state.outcome()


def nothing_divides(space: Space) -> str:
    """Why the space is empty."""
    job = space.job
    counts = ", ".join(f"{count:,}" for count in space.devices)
    return (f"no layout divides {counts} devices of cluster {space.cluster.name!r} for job {job.name!r} (batch "
            f"{job.batch:,}) "
            f"within the axes {', '.join(space.options.axes)} and the pins {dict(space.options.pinned) or 'none'}; "
            "allow more "
            "axes, or choose another number with devices = [...] in the search file")


@dataclass(order=True)
class Candidate:
    estimate: float
    key: tuple[Any, ...]
    bound: float = field(compare=False)
    layout: Layout = field(compare=False)


def key_of(layout: Layout) -> tuple[Any, ...]:
    """A layout as something to compare and to look up."""
    return (tuple(sorted(layout.sizes.items())), layout.order, layout.schedule, layout.chunks, layout.microbatch,
            layout.recompute, tuple(sorted(layout.network.items())), tuple(sorted(layout.compress.items())))


class _State:
    """What a search knows so far. Values are in the unit of the objective."""

    def __init__(self, space: Space, progress: Progress) -> None:
        self.space, self.options, self._progress = space, space.options, progress
        self._known: dict[tuple[Any, ...], Candidate | None] = {}
        self._plans: dict[tuple[Any, ...], Plan | None] = {}
        self.nodes = 0
        self.left = float("inf")
        """The lowest bound of what was given up for want of nodes or simulations."""
        self.pruned = 0
        self.begun = 0
        """Plans simulated because the search began with them: beside the limit."""
        self.nearest: tuple[float, Layout | None] = (float("inf"), None)
        """Bytes over, and the layout that is over by the least."""
        self.refused: Infeasible | None = None
        self.floors = Floors(space)
        self.ideal = ideal(space)

    # One layout

    def rate(self, layout: Layout) -> float:
        """Unit of the objective a second."""
        cluster = self.space.cluster
        if self.options.objective == "time":
            return 1.0
        if self.options.objective == "energy":
            return layout.devices * cluster.device.power
        hourly = cluster.device.price + sum(
            level.technology(layout.network.get(level.name)).price for level in cluster.levels)
        return layout.devices * hourly / HOUR

    def floor(self, shape: Shape) -> float:
        """What no layout of a shape can be below, in the unit of the objective."""
        return self.floors.seconds(shape) * self.least_rate(_devices(shape))

    def least_rate(self, devices: int) -> float:
        """The rate of the cheapest network."""
        if self.options.objective == "time":
            return 1.0
        cheapest = {level.name: min(self.space.technologies(level.name), key=lambda name,
                                    level=level: (  # type: ignore[misc]
            level.technology(name).price)) for level in self.space.cluster.levels}
        return self.rate(Layout({"dp": devices}, network=cheapest))

    def value(self, layout: Layout) -> Candidate | None:
        """The estimate of a layout; None where it does not run or does not fit. A node, the first time."""
        key = key_of(layout)
        if key not in self._known:
            self._known[key] = self._estimated(layout, key)
        return self._known[key]

    def _estimated(self, layout: Layout, key: tuple[Any, ...]) -> Candidate | None:
        found = self._look(self.space.cluster, layout)
        if found is None:
            return None
        work, times = found
        rate = self.rate(layout)
        fees = egress(self.space.cluster, layout, sent(work, layout)) if self.options.objective == "cost" else 0.0
        return Candidate(times.seconds * rate + fees, key, times.lower * rate, layout)

    def _look(self, cluster: Cluster, layout: Layout) -> tuple[Workload, Estimate] | None:
        """None where the layout does not run or does not fit."""
        self.nodes += 1
        if self.nodes % 256 == 0:
            self._progress("estimating", self.nodes, self.options.nodes)
        try:
            work = unchecked(cluster, self.space.job, layout)
            found = estimate(work, layout)
        except Infeasible as reason:
            self.refused = self.refused or reason
            return None
        over = max(memory.total for memory in found.memory) - self.options.memory * work.memory
        if over > 0:
            if over < self.nearest[0]:
                self.nearest = (over, layout)
            return None
        return work, found

    def why_nothing(self) -> Infeasible:
        """The layout that comes nearest to fitting, and what it lacks."""
        over, layout = self.nearest
        if layout is None:
            return self.refused or Infeasible(nothing_divides(self.space), "counts")
        space = self.space
        try:
            workload(space.cluster, space.job, layout)
        except Infeasible as reason:
            return Infeasible(f"job {space.job.name!r} fits nowhere on cluster {space.cluster.name!r}; nearest is "
                              f"{titled(layout, space.job.batch)}: {reason}", reason.term, reason.over_by)
        return Infeasible(f"job {space.job.name!r} fits nowhere within limits.memory = {self.options.memory:g}: "
                          f"{titled(layout, space.job.batch)} is over by {text(over, 'size')} a device; raise "
                          "limits.memory",
                          "memory", over)

    def allowed(self, layout: Layout) -> bool:
        """Whether the options allow a layout that comes from elsewhere."""
        space, options = self.space, self.options
        shape = Shape({axis: size for axis, size in layout.sizes.items() if size > 1}, layout.microbatch,
                      layout.recompute)
        return (shape in self._shapes and (layout.schedule, layout.chunks) in space.schedules(
                shape.stages, space.microbatches(shape))
                and all(name in space.technologies(level) for level, name in layout.network.items())
                and (not layout.compress or dict(layout.compress) in space.compressions())
                and ("order" not in options.pinned or layout.order in space.orders(shape.sizes)))

    @cached_property
    def _shapes(self) -> list[Shape]:
        """Those whose weights and least activations fit."""
        room = self.options.memory * max(
            unit.device.memory - unit.device.reserved for unit in self.space.cluster.units)
        fitting = [shape for shape in self.space.shapes if self.floors.memory(shape) <= room]
        if not fitting:  # one will have to say what is missing
            fitting = [min(self.space.shapes, key=self.floors.memory)]
        return fitting

    # Descent

    def descend(self, begin: list[Layout]) -> None:
        """From ``begin``, and from the shapes that look best, to layouts that no single other choice improves."""
        large = SWEPT * len(self._shapes) > self.options.nodes
        budget = self.options.nodes if large else int(self.options.nodes * DESCENT_SHARE)
        starts = [found for layout in begin if (found := self.value(layout)) is not None]
        kinds: dict[Any, list[Candidate]] = {}  # the best starts of each split of the model: descents should differ
        hopeless: dict[Any, list[tuple[int, int]]] = {}
        for shape in self._promising():
            if self.nodes >= budget // 2:
                break
            kind = tuple(shape.sizes.get(axis, 1) for axis in ("tp", "cp", "ep", "pp", "table"))
            sizes, frugal = tuple(sorted(shape.sizes.items())), RECOMPUTE.index(shape.recompute)
            if len(kinds.get(kind, ())) >= STARTS or any(  # what takes more than one that did not fit
                    size <= shape.microbatch and kept >= frugal for size, kept in hopeless.get(sizes, ())):
                continue
            found = min((each for each in map(self.value, self._typical(shape)) if each is not None), default=None)
            if found is None:
                hopeless.setdefault(sizes, []).append((shape.microbatch, frugal))
            else:
                kinds.setdefault(kind, []).append(found)
        if not starts and not kinds:  # memory is what is short: those that take the least
            for shape in sorted(self._shapes, key=self.floors.memory):
                if self.nodes >= self.options.nodes or len(kinds) >= DESCENTS:
                    break
                kinds |= {found.key: [found] for found in map(self.value, self._typical(shape)) if found is not None}
        given = {key_of(layout) for layout in begin}
        starts += sorted(map(min, kinds.values()))
        allowed = self.nodes + self.options.nodes // 10  # at least so many for descents
        reached: set[tuple[Any, ...]] = set()
        ends = []
        for found in starts[: DESCENTS + len(given)]:
            while self.nodes < max(budget, allowed) and found.key not in reached:
                reached.add(found.key)
                better = found
                for block in self._blocks(found.layout):
                    better = min(better, *(each for each in map(self.value, block(better.layout)) if each is not None),
                                 better)
                if better.key == found.key:
                    break
                found = better
            ends.append(found)
        for found in sorted(ends)[:4]:
            self.simulated(found)
        before = len(self._plans)
        for layout in begin:  # also those that the estimate moved away from: none may be better than the outcome
            if (mine := self.value(layout)) is not None:
                self.simulated(mine)
        self.begun = len(self._plans) - before

    def _promising(self) -> list[Shape]:
        """Shapes by what their best layout is guessed to take; of equal ones the first of the space."""
        return sorted(self._shapes, key=lambda shape: self.floors.promise(shape) * self.least_rate(_devices(shape)))

    def _typical(self, shape: Shape) -> Iterator[Layout]:
        """A few layouts of a shape: busy axes inside, pipeline or data outermost, the usual schedules."""
        space = self.space
        orders = space.orders(shape.sizes)
        network = self._first_network(shape)
        pipelines = space.schedules(shape.stages, space.microbatches(shape))
        wanted = ("tp", "cp", "table", "fsdp", "pp", "dp"), ("tp", "cp", "table", "fsdp", "dp", "pp")
        chosen = {min(orders, key=lambda order, want=want: sum(  # type: ignore[misc]
            abs(order.index(axis) - at) for at, axis in enumerate(a for a in want if a in order)), default=())
            for want in wanted}
        # One that is plain, and one that holds little and hardly waits.
        tried = dict.fromkeys([*pipelines[:1], *(pair for pair in pipelines if pair[0] in ("zb_v", "dualpipe_v"))][:2])
        for name, chunks in [*tried, *(pair for pair in pipelines if pair not in tried)][:2]:
            for order in sorted(chosen):
                layout = space.layout(shape, order, name, chunks, network, {})
                yield layout
                if self._known.get(key_of(layout)) is None:  # memory does not depend on the order
                    break

    def _first_network(self, shape: Shape) -> dict[str, str]:
        return self.space.networks(self.space.spanned(shape.sizes))[0]

    def _blocks(self, layout: Layout) -> list[Callable[[Layout], Iterator[Layout]]]:
        return [self._other_networks, self._other_orders, self._other_schedules, self._other_shapes]

    def _other_orders(self, layout: Layout) -> Iterator[Layout]:
        for order in self.space.orders(layout.sizes):
            yield replace(layout, order=order)

    def _other_networks(self, layout: Layout) -> Iterator[Layout]:
        space = self.space
        for level in space.cluster.levels[: space.spanned(layout.sizes)]:
            names = space.technologies(level.name)
            if len(names) > 1:
                for name in names:
                    yield replace(layout, network={**layout.network, level.name: name})
        for compress in space.compressions():
            yield replace(layout, compress=compress)

    def _other_schedules(self, layout: Layout) -> Iterator[Layout]:
        shape = Shape(layout.sizes, layout.microbatch, layout.recompute)
        for name, chunks in self.space.schedules(shape.stages, self.space.microbatches(shape)):
            yield replace(layout, schedule=name, chunks=chunks)

    def _other_shapes(self, layout: Layout) -> Iterator[Layout]:
        """Another micro-batch, recompute, or a factor moved from one axis to another."""
        known = self._by_sizes
        same = tuple(sorted(layout.sizes.items()))
        for sizes in (same, *sorted(_moved(layout.sizes))):
            for shape in known.get(sizes, ()):
                near = (sizes == same) or (shape.microbatch, shape.recompute) == (layout.microbatch, layout.recompute)
                if near:
                    yield from self._with_shape(layout, shape)

    def _with_shape(self, layout: Layout, shape: Shape) -> Iterator[Layout]:
        """The layout with another shape: new axes lie outermost, or the order nearest to the old one."""
        pipelines = self.space.schedules(shape.stages, self.space.microbatches(shape))
        kept = [pair for pair in pipelines if pair == (layout.schedule, layout.chunks)] or list(pipelines[:1])
        wanted = [*layout.order, *(axis for axis in PLACED if axis not in layout.order)]
        wanted = [axis for axis in wanted if axis in shape.sizes]
        orders = sorted(self.space.orders(shape.sizes), key=lambda order: (
            sum(abs(order.index(axis) - at) for at, axis in enumerate(wanted)), order))
        for order in orders[:2]:
            for name, chunks in kept:
                yield replace(layout, sizes=shape.sizes, order=order, microbatch=shape.microbatch,
                              recompute=shape.recompute, schedule=name, chunks=chunks)  # type: ignore[arg-type]

    @cached_property
    def _by_sizes(self) -> dict[tuple[tuple[str, int], ...], list[Shape]]:
        grouped: dict[tuple[tuple[str, int], ...], list[Shape]] = {}
        for shape in self._shapes:
            grouped.setdefault(tuple(sorted(shape.sizes.items())), []).append(shape)
        return grouped

    # Sweep

    @property
    def best(self) -> float:
        """Of the plans simulated so far."""
        return min((self._worth(plan) for plan in self._plans.values() if plan is not None), default=float("inf"))

    def _worth(self, plan: Plan) -> float:
        return plan.value(self.options.objective) if plan.seconds <= self.options.seconds else float("inf")

    def sweep(self) -> None:
        """All layouts whose bounds are below the best plan, as far as the nodes go."""
        best = self.best
        floors = sorted(pair for pair in ((self.floor(shape), number) for number, shape in enumerate(self._shapes))
                        if pair[0] < best)
        self.pruned = len(self._shapes) - len(floors)
        if len(floors) > self.options.nodes - self.nodes:  # a part of a sweep would prove nothing
            self.left = min(self.left, self._least(floors))
            return
        for at, (floor, number) in enumerate(floors):
            if floor >= self.best:
                self.pruned += len(floors) - at
                break
            if self.nodes >= self.options.nodes:
                self.left = min(self.left, floor)
                break
            self._sweep_shape(self._shapes[number], floor)

    def _least(self, floors: list[tuple[float, int]]) -> float:
        """What no layout of these shapes (floor, number) can be below; ``floors`` ascend."""
        least = float("inf")
        for floor, number in floors:
            if floor >= least:  # nor can any that follows
                break
            shape = self._shapes[number]
            least = min(least, self.floors.tight(shape) * self.least_rate(_devices(shape)))
        return least

    def _sweep_shape(self, shape: Shape, floor: float) -> None:
        space = self.space
        rate = self.least_rate(_devices(shape))
        open_: list[tuple[float, tuple[str, ...], tuple[str, int]]] = []
        network, orders = self._first_network(shape), space.orders(shape.sizes)
        for pipeline in space.schedules(shape.stages, space.microbatches(shape)):
            for order in orders:
                if self.nodes >= self.options.nodes:
                    self.left = min(self.left, floor)
                    return
                bound = self._ideal_bound(space.layout(shape, order, *pipeline, {}, {}))
                if bound is None:  # of no order: memory and counts do not depend on it
                    break
                if bound * rate < self.best:
                    open_.append((bound * rate, order, pipeline))
        networks = space.networks(space.spanned(shape.sizes))
        heapq.heapify(open_)
        while open_:
            bound, order, pipeline = heapq.heappop(open_)
            if bound >= self.best:
                break
            if self.nodes >= self.options.nodes:
                self.left = min(self.left, bound)
                break
            for network in networks:
                for compress in space.compressions():
                    self.value(space.layout(shape, order, *pipeline, network, compress))

    def _ideal_bound(self, layout: Layout) -> float | None:
        """Seconds that the layout cannot be below on any network; None where it does not run or does not fit."""
        least = float("inf")
        for cluster in self.ideal:
            found = self._look(cluster, layout)
            if found is None:
                return None
            least = min(least, found[1].lower)
        return least

    # Refinement

    def simulated(self, found: Candidate) -> Plan | None:
        if found.key not in self._plans:
            try:
                plan: Plan | None = measured(self.space.cluster, self.space.job, found.layout, causes=False)
                if plan is not None and plan.peak_memory > self.options.memory * plan.limit:
                    plan = None  # the estimate saw less
            except ValueError:
                plan = None
            self._plans[found.key] = plan
        return self._plans[found.key]

    def refine(self) -> None:
        """Simulates candidates in the order of their estimates, until no bound is below the best plan."""
        queue = sorted(each for each in self._known.values() if each is not None)
        for at, found in enumerate(queue):
            if found.bound >= self.best or found.key in self._plans:
                continue
            if len(self._plans) - self.begun >= self.options.simulations:
                self.left = min(self.left, *(each.bound for each in queue[at:] if each.key not in self._plans))
                break
            self.simulated(found)
            self._progress("simulating", len(self._plans), self.options.simulations)

    def outcome(self) -> Outcome:
        plans = [plan for plan in self._plans.values() if plan is not None]
        if not plans:
            raise self.why_nothing()
        timely = [plan for plan in plans if plan.seconds <= self.options.seconds]
        if not timely:
            fastest = min(plans, key=lambda plan: plan.seconds)
            raise Infeasible(f"no plan found takes at most {self.options.seconds:g} s a step: the fastest takes "
                             f"{fastest.seconds:.4g} s ({fastest.title})", "time", 0.0, "raise limits.step_time")
        best = min(plan.value(self.options.objective) for plan in timely)
        bound = min(self.left, best)
        plans = ranked(timely, self.options.objective, bound)[: self.options.keep]
        plans = [replace(plan, bubble=bubbles(plan.trace())) for plan in plans]
        return Outcome(plans, bound, self.left >= best, self.nodes, len(self._plans),
                       len(self.space.shapes), len(self.space.shapes) - len(self._shapes) + self.pruned)


def sent(work: Workload, layout: Layout) -> dict[str, float]:
    """Level -> bytes that a device sends in a step, mean over pipeline stages."""
    found: dict[str, float] = {}
    for chunk in work.chunks:
        moves = [(move, 1 if move.phase in ("start", "end") else work.microbatches) for move in chunk.transfers]
        if chunk.send is not None:
            moves.append((chunk.send, 2 * work.microbatches))
        for move, times in moves:
            for level, size in move.loads:
                found[level] = found.get(level, 0.0) + size * move.count * times / work.stages
    return found


def _devices(shape: Shape) -> int:
    product = 1
    for axis in PLACED:
        product *= shape.sizes.get(axis, 1)
    return product


def _moved(sizes: Any) -> set[tuple[tuple[str, int], ...]]:
    """Sizes in which one prime factor went from one axis to another (or ``ep`` gained or lost one)."""
    found = set()
    axes = [axis for axis in PLACED if axis not in ("table",) or "table" in sizes]
    for source in axes:
        for factor in _primes(sizes.get(source, 1)):
            for target in axes:
                if target != source:
                    found.add(_sized({**sizes, source: sizes[source] // factor, target: sizes.get(target, 1) * factor}))
    ep = sizes.get("ep", 1)
    found |= {_sized({**sizes, "ep": ep * 2})} | {_sized({**sizes, "ep": ep // factor}) for factor in _primes(ep)}
    return found


def _primes(number: int) -> list[int]:
    return [d for d in divisors(number) if d > 1 and divisors(d) == (1, d)]


def _sized(sizes: Any) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((axis, size) for axis, size in sizes.items() if size > 1))
