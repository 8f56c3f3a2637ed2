"""Memory of a plan by pipeline stage, at its peak and over the operations of a schedule; and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from semel.planning.layout import Layout, placement
from semel.planning.units import text
from semel.planning.workload import Infeasible, Workload

if TYPE_CHECKING:
    from semel.planning.cluster import Cluster
    from semel.planning.job import Job


@dataclass(frozen=True)
class Memory:
    """Bytes of a device at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Recomputed layers, logits, gathered weights: what is alive while one operation runs."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    def terms(self) -> dict[str, float]:
        return {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer,
                "activations": self.activations, "buffers": self.buffers}


class Operation(Protocol):
    """An entry of a schedule: ``kind`` F forward, B backward, I backward for the input, W for the weight."""

    @property
    def kind(self) -> str: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def chunk(self) -> int: ...


@lru_cache(maxsize=100_000)
def in_flight(schedule: str, stages: int, microbatches: int, chunks: int, device: int) -> tuple[int, ...]:
    """Micro-batches whose activations ``device`` holds at once, for each of its chunks in model order.

    GPipe m; 1F1B p - d; ZB-H1 p and ZB-H2 2 p - 1 everywhere (arXiv 2401.10241, section 2); interleaved (v - 1) p +
    2 (p - d) - 1 over all chunks, in the order in which warm-up fills them (arXiv 2104.04473, section 2.2); ZB-V p
    (arXiv 2405.15362, section 4) and DualPipeV p + 1/2 micro-batches of a whole device. Never above m.
    """
    p, m, v, d = stages, microbatches, chunks, device
    if schedule == "gpipe":
        return (m,) * v
    if schedule in ("zb_v", "dualpipe_v"):
        return tuple(min(m, p + (1 if schedule == "dualpipe_v" and c == 0 else 0)) for c in range(v))
    if schedule == "zb_h1":
        return (min(m, p),)  # weights put off keep what forwards no longer do
    if schedule == "zb_h2":
        return (min(m, 2 * p - 1),)
    if schedule == "greedy":
        return (min(m, p),) * v  # the least it runs with; it takes more where there is room
    if v == 1:
        return (min(m, p - d),)
    warm = min(m * v, (v - 1) * p + 2 * (p - d) - 1)
    held = [0] * v
    for c in range(v):
        held[c] = min(m, max(0, min(p, warm - c * p)))
    held[0] = min(m, held[0] + max(0, warm - v * p))
    return tuple(held)


def by_stage(work: Workload, layout: Layout) -> tuple[Memory, ...]:
    """Peak memory of each device of the pipeline, from the schedule's closed form."""
    last = _LAST[0]
    if last is not None and last[0] is work and last[1:3] == (layout.schedule, layout.chunks):
        return last[3]
    where = placement(layout.schedule, work.stages, layout.chunks)
    mine: list[list[int]] = [[] for _ in range(work.stages)]
    for index, device in enumerate(where):
        mine[device].append(index)
    found = []
    known: dict[tuple, Memory] = {}  # inner stages are alike
    for device, held in enumerate(mine):
        counts = in_flight(layout.schedule, work.stages, work.microbatches, layout.chunks, device)
        chunks = [work.chunks[index] for index in held]
        key = (counts, *map(id, chunks))
        if key not in known:
            known[key] = Memory(
                sum(chunk.weights for chunk in chunks), sum(chunk.gradients for chunk in chunks),
                sum(chunk.optimizer for chunk in chunks),
                sum(chunk.activation * n for chunk, n in zip(chunks, counts, strict=True)),
                max(chunk.peak for chunk in chunks))
        found.append(known[key])
    _LAST[0] = (work, layout.schedule, layout.chunks, tuple(found))
    return tuple(found)


_LAST: list[tuple[Workload, str, int, tuple[Memory, ...]] | None] = [None]
"""The workload asked for last, its schedule and chunks, and the answer: who checks a workload then estimates it."""


def over_time(work: Workload, operations: Iterable[Operation]) -> list[tuple[float, float]]:
    """(bytes while it runs, bytes after it) for every operation of one device, in order.

    A forward adds its chunk's activation; a backward, or the later of a split one's halves, frees it; while an
    operation runs its chunk's ``peak`` comes on top of a backward.
    """
    ops = list(operations)
    chunks = sorted({op.chunk for op in ops})
    fixed = sum(work.chunks[c].weights + work.chunks[c].gradients + work.chunks[c].optimizer for c in chunks)
    halves: dict[tuple[int, int], int] = {}
    alive, found = fixed, []
    for op in ops:
        chunk = work.chunks[op.chunk]
        during = alive + chunk.peak
        if op.kind == "F":
            alive += chunk.activation
            during = alive
        elif op.kind == "B":
            alive -= chunk.activation
        else:
            key = (op.chunk, op.microbatch)
            halves[key] = halves.get(key, 0) + 1
            if halves[key] == 2:
                alive -= chunk.activation
        found.append((during, alive))
    return found


def peak_of(work: Workload, operations: Sequence[Iterable[Operation]]) -> tuple[float, ...]:
    """Largest bytes of each device under explicit operation lists."""
    return tuple(max((during for during, _ in over_time(work, ops)), default=0.0) for ops in operations)


def check(work: Workload, layout: Layout, change: str | Callable[[], str] = "") -> None:
    """Raises Infeasible if a stage needs more than a device has; it names the stage's largest term."""
    worst, over, stage = None, 0.0, 0
    for index, memory in enumerate(by_stage(work, layout)):
        if memory.total - work.memory > over:
            worst, over, stage = memory, memory.total - work.memory, index
    if worst is None:
        return
    terms = sorted(worst.terms().items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {text(size, 'size')}" for name, size in terms if size > 0)
    raise Infeasible(f"stage {stage} needs {text(worst.total, 'size')}, a device has {text(work.memory, 'size')}: over "
                     f"by {text(over, 'size')} ({parts})", terms[0][0], over, change)


def smallest_change(cluster: Cluster, job: Job, layout: Layout) -> str:
    """The first of the usual remedies, cheapest first, under which the layout fits, in words."""
    from semel.planning.workload import unchecked

    for words, other in _remedies(layout):
        try:
            work = unchecked(cluster, job, other)
        except (Infeasible, KeyError):
            continue
        if all(memory.total <= work.memory for memory in by_stage(work, other)):
            return f"the smallest change that fits: {words}"
    return "no single change fits: it takes more devices, or a smaller model"


def _remedies(layout: Layout) -> Iterable[tuple[str, Layout]]:
    half = layout.microbatch // 2
    if not layout.zero and layout.size("dp") > 1:
        yield "shard the optimizer over dp (zero = 1)", replace(layout, zero=1)
    if layout.size("tp") > 1 and not layout.sequence_parallel:
        yield "sequence parallelism", replace(layout, sequence_parallel=True)
    kinds = ("none", "selective", "full")
    for kind in kinds[kinds.index(layout.recompute) + 1:]:
        yield f"recompute = {kind!r}", replace(layout, recompute=kind)  # type: ignore[arg-type]
    if half:
        yield f"a micro-batch of {half}", replace(layout, microbatch=half)
    yield "recompute = 'full' and a micro-batch of 1", replace(layout, recompute="full", microbatch=1)
    dp = layout.size("dp")
    sharded = [("fsdp", n) for n in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)]
    split = [(axis, n) for n in (2, 4, 8, 16, 32) for axis in ("tp", "pp", "cp", "ep", "table")]
    for axis, times in [*split, *(sharded if layout.size("pp") == 1 else [])]:
        if axis == "ep":
            yield f"ep = {layout.size('ep') * times}", _sized(layout, ep=layout.size("ep") * times)
        elif dp % times == 0:
            new = layout.size(axis) * times
            other = _sized(layout, **{axis: new, "dp": dp // times})
            yield f"{axis} = {new} with dp = {dp // times}", other
            if axis in ("tp", "pp"):
                yield (f"{axis} = {new} with dp = {dp // times} and recompute = 'full'",
                       replace(other, recompute="full"))


def _sized(layout: Layout, **sizes: int) -> Layout:
    return replace(layout, sizes={**layout.sizes, **sizes})

