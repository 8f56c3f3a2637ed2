"""Published step times against the model: how far to trust it, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache

from semel.planning.cluster import Cluster
from semel.planning.estimate import estimate
from semel.planning.files import Section, open_section, ready
from semel.planning.job import Job, Transformer, load_job
from semel.planning.layout import AXES, Layout
from semel.planning.load import load_cluster
from semel.planning.workload import unchecked

FEWEST = 3
"""A device with fewer counted rows is shown, not counted."""


@dataclass(frozen=True)
class Measurement:
    """One published step time."""

    name: str
    source: str
    device: str
    cluster: Cluster
    job: Job
    layout: Layout
    seconds: float
    counted: bool
    fitted: bool
    """Among those that the device's calibration is fitted on."""
    note: str = ""
    assumed: str = ""


@dataclass(frozen=True)
class Row:
    """A measurement and what the model says."""

    measurement: Measurement
    seconds: float
    mfu: float
    memory: float
    """Bytes of the fullest device. All of these ran: what is above ``limit`` is an error of ours."""
    limit: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.seconds / self.measurement.seconds - 1.0


@dataclass(frozen=True)
class Summary:
    """Errors of one device's rows that count and that nothing was fitted on; ``plain_mean`` and ``plain_worst`` are
    those without any fit (``Device.reached`` = 1). ``dtype``: of these rows only; "" for all."""

    device: str
    dtype: str
    rows: int
    mean: float
    worst: float
    plain_mean: float
    plain_worst: float
    counted: bool


@dataclass(frozen=True)
class Validation:
    """``summary``: one a device. ``by_dtype``: one a device and dtype, where a device has several."""

    rows: tuple[Row, ...]
    summary: tuple[Summary, ...] = field(default=())
    by_dtype: tuple[Summary, ...] = field(default=())

    @property
    def refused(self) -> tuple[Row, ...]:
        """Rows that ran, but do not fit by our count of memory."""
        return tuple(row for row in self.rows if row.memory > row.limit)


def recomputed_flops(job: Transformer) -> float:
    """FLOPs of a step with every layer's forward run twice, as arXiv 2104.04473, section 5.1 counts them:
    96 B s l h^2 (1 + s / 6h + V / 16 l h)."""
    return 96.0 * job.batch * job.sequence * job.layers * job.width**2 * (
        1 + job.sequence / (6 * job.width) + job.vocabulary / (16 * job.layers * job.width))


def measurements(name: str) -> list[Measurement]:
    """The rows of a measurement file (a path or a ready one's name). Every second counted row, from the first, is for
    fitting."""
    section = open_section("measurements", name)
    section.text("description", "")
    device = section.text("device")
    section.sections("points")
    found: list[Measurement] = []
    counted = 0
    for row in section.sections("rows"):
        counts = row.flag("counted", True)
        found.append(_measurement(row, device, counts, counts and counted % 2 == 0))
        counted += counts
    section.done()
    return found


def validate(names: Iterable[str] | None = None) -> Validation:
    """Every row of the measurement files (all ready ones by default) beside the model's closed form.

    The summary has one entry a device, over the rows that count and that its calibration has not seen.
    """
    chosen = [name for name, _ in ready("measurements")] if names is None else list(names)
    rows = [predicted(each) for name in chosen for each in measurements(name)]
    summary, by_dtype = [], []
    for device in dict.fromkeys(row.measurement.device for row in rows):
        mine = [row for row in rows if row.measurement.device == device]
        summary.append(_summary(device, "", mine))
        dtypes = list(dict.fromkeys(row.measurement.job.dtype for row in mine))
        if len(dtypes) > 1:
            by_dtype += [_summary(device, dtype, [row for row in mine if row.measurement.job.dtype == dtype])
                         for dtype in dtypes]
    return Validation(tuple(rows), tuple(summary), tuple(by_dtype))


def _summary(device: str, dtype: str, rows: list[Row]) -> Summary:
    held_out = [row for row in rows if row.measurement.counted and not row.measurement.fitted]
    if not held_out:
        return Summary(device, dtype, 0, math.nan, math.nan, math.nan, math.nan, False)
    errors = [abs(row.error) for row in held_out]
    plain = [abs(predicted(replace(row.measurement, cluster=with_reached(
        row.measurement.cluster, row.measurement.job.dtype, 1.0))).error) for row in held_out]
    return Summary(device, dtype, len(errors), sum(errors) / len(errors), max(errors), sum(plain) / len(plain),
                   max(plain), sum(row.measurement.counted for row in rows) >= FEWEST)


def with_reached(cluster: Cluster, dtype: str, reached: float) -> Cluster:
    """The cluster with another ``Device.reached`` of a dtype, on all its devices."""
    for name in {unit.device.name for unit in cluster.units}:
        cluster = cluster.change(f"devices.{name}.reached.{dtype}", reached)
    return cluster


def predicted(measurement: Measurement) -> Row:
    """The model's closed form for one measurement."""
    work = unchecked(measurement.cluster, measurement.job, measurement.layout)
    found = estimate(work, measurement.layout)
    return Row(measurement, found.seconds, found.mfu, max(memory.total for memory in found.memory), work.memory)


@cache
def _cluster(name: str) -> Cluster:
    return load_cluster(name)


def _measurement(row: Section, device: str, counted: bool, fitted: bool) -> Measurement:
    name, cluster = row.text("name"), _cluster(row.text("cluster"))
    job = load_job(row.take("job"))
    layout = _layout(row.section("layout"))
    if "seconds" in row:
        seconds = row.number("seconds")
    elif "mfu" in row:
        work = unchecked(cluster, job, layout)
        seconds = work.flops / (row.number("mfu", most=1.0) * work.peak_flops)
    else:
        kind = row.choice("flops", ("model", "recomputed"))
        if not isinstance(job, Transformer):
            row.fail("flops", "only transformers are published in FLOP/s")
        total = job.flops() if kind == "model" else recomputed_flops(job)
        seconds = total / (row.number("tflops") * 1e12 * layout.devices)
    made = Measurement(name, row.text("source"), device, cluster, job, layout, seconds, counted, fitted,
                       row.text("note", ""), row.text("assumed", ""))
    row.done()
    return made


def _layout(section: Section) -> Layout:
    sizes = {axis: section.count(axis) for axis in AXES if axis in section}
    base = Layout(sizes)
    overlap = section.take("overlap", sorted(base.overlap))
    layout = Layout(
        sizes, schedule=section.text("schedule", base.schedule), chunks=section.count("chunks", 1),
        microbatch=section.count("microbatch", 1),
        recompute=section.choice("recompute", ("none", "selective", "full"), "none"),  # type: ignore[arg-type]
        sequence_parallel=section.flag("sequence_parallel", True), zero=section.count("zero", 1, least=0),
        overlap=frozenset(overlap))
    section.done()
    return layout
