"""One training step of a sequence recommender: sharded tables, and a dense part on every rank."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from semel.planning.axes import Axes, compression
from semel.planning.cluster import Cluster
from semel.planning.compute import elementwise, peak, recommender_dense, update
from semel.planning.job import Lengths, Recommender, Table
from semel.planning.layout import Layout
from semel.planning.network import Span
from semel.planning.transformer import fabric
from semel.planning.units import BYTES
from semel.planning.workload import Chunk, Infeasible, Transfer, Workload

ID = 8.0
"""Bytes of an id on the wire."""


def moments(lengths: Lengths) -> tuple[float, float]:
    """(mean, mean of squares) of a log-normal of this mean, cut to [least, most]: values outside move to the ends."""
    if lengths.sigma == 0:
        value = min(max(lengths.mean, lengths.least), lengths.most or math.inf)
        return value, value * value
    mu, sigma = math.log(lengths.mean) - lengths.sigma**2 / 2, lengths.sigma
    below = lambda x: 0.5 * (1 + math.erf((math.log(x) - mu) / (sigma * math.sqrt(2))))  # noqa: E731
    part = lambda x, k: 0.5 * (1 + math.erf((math.log(x) - mu - k * sigma**2) / (sigma * math.sqrt(2))))  # noqa: E731
    low, high = float(lengths.least), float(lengths.most or lengths.mean * math.exp(12 * sigma))
    found = []
    for k in (1, 2):
        whole = math.exp(k * mu + (k * sigma) ** 2 / 2)
        found.append(low**k * below(low) + whole * (part(high, k) - part(low, k)) + high**k * (1 - below(high)))
    return found[0], found[1]


def rows_read(job: Recommender, table: Table, samples: float) -> float:
    """Rows of all tables of this kind that ``samples`` requests read."""
    each = table.pooling
    if table.sequence:
        each = moments(job.lengths)[0]
    elif table.candidate:
        each = job.candidates * table.pooling
    return samples * each * table.count


def vectors_sent(job: Recommender, table: Table, samples: float) -> float:
    """Vectors that travel to the rank of the sample: a pooled feature is one, however many rows it has."""
    if table.sequence:
        return rows_read(job, table, samples)
    return samples * (job.candidates if table.candidate else 1.0) * table.count


def recommender_flops(job: Recommender, samples: float) -> float:
    """Model FLOPs of forward and backward over ``samples`` requests, matrix products only."""
    mean, square = moments(job.lengths)
    inner = job.heads * job.head_width
    encoder = job.layers * samples * inner * (2 * mean * 5 * job.width + 2 * square)
    nets = sum(2 * rows * a * b for net, rows in ((job.bottom, samples), (job.top, samples * job.candidates))
               for a, b in pairwise(net))
    return 3 * (encoder + nets)


def recommender_workload(cluster: Cluster, job: Recommender, layout: Layout) -> Workload:
    """See ``workload.workload``; memory is not checked. Every rank has mean lengths: what unequal ones cost is for the
    simulator, which draws them."""
    for axis in ("tp", "cp", "ep", "pp"):
        if layout.size(axis) > 1:
            raise Infeasible(f"a recommender is laid over dp, fsdp and table; {axis} = {layout.size(axis)}", axis)
    if layout.chunks > 1:
        raise Infeasible(f"a recommender has no pipeline to split into {layout.chunks} chunks", "pp")
    axes = Axes.of(cluster, layout)
    per_rank, left = divmod(job.batch, layout.devices)
    if left or not per_rank or per_rank % layout.microbatch:
        raise Infeasible(f"a batch of {job.batch} does not divide into {layout.devices} ranks x micro-batches of "
                         f"{layout.microbatch}", "microbatch")
    units = axes.stage_units(1, layout.devices)[0]
    device = min((unit.device for unit in units), key=lambda each: peak(each, job.dtype))
    network = fabric(cluster, layout.network)
    samples = float(layout.microbatch)
    mean, square = moments(job.lengths)
    dense = recommender_dense(device, job, samples, samples * mean, samples * square)

    shards, copies = layout.size("table"), layout.size("dp") * layout.size("fsdp")
    table_bytes, exchange = BYTES[job.table_dtype], BYTES[job.exchange_dtype]
    over, world = axes.group("table"), axes.group("table", "fsdp", "dp")
    skew = max(table.skew for table in job.tables)
    ids = sum(rows_read(job, table, samples) for table in job.tables) * ID
    sent = sum(vectors_sent(job, table, samples) * table.width for table in job.tables) * exchange
    read = sum(rows_read(job, table, samples) * table.width for table in job.tables) * table_bytes
    kept = sum(table.rows * table.width * table.count for table in job.tables) * table_bytes * skew / shards
    rows = sum(table.rows * table.count for table in job.tables) * skew / shards
    found: list[Transfer] = []

    def move(axis: str, collective: str, group: Span, size: float, phase: str, hidden: bool, **how: Any) -> None:
        if group.n > 1 and size > 0:
            latency, loads = network.collective(collective, group, size, **how)
            found.append(Transfer(axis, collective, size, latency, loads, phase, hidden))

    beside = "table" in layout.overlap
    move("table", "all_to_all", over, ids, "forward", True, skew=skew)  # ids of the next micro-batch, beside this one
    move("table", "all_to_all", over, sent, "forward", beside, skew=skew)
    move("table", "all_to_all", over, sent, "backward", beside, skew=skew)
    if copies > 1:  # replicas of a shard exchange the gradients of the rows that they touched
        move("table", "all_gather", axes.group("fsdp", "dp"), read / table_bytes * exchange * copies, "end",
             "dp" in layout.overlap)
    weights = job.dense_parameters()
    gradient, size = BYTES[job.gradient_dtype], BYTES[job.storage_dtype]
    ratio = compression(layout, job.gradient_dtype)
    spread = layout.size("fsdp")
    if spread > 1:
        group = axes.group("fsdp")
        move("fsdp", "all_gather", group, weights * size, "forward", "fsdp" in layout.overlap)
        move("fsdp", "all_gather", group, weights * size, "backward", "fsdp" in layout.overlap)
        move("fsdp", "reduce_scatter", group, weights * gradient, "weight", "fsdp" in layout.overlap, ratio=ratio)
        move("dp", "all_reduce", axes.group("table", "dp"), weights * gradient / spread, "end", "dp" in layout.overlap,
             ratio=ratio)
    elif layout.zero:
        move("dp", "reduce_scatter", world, weights * gradient, "end", "dp" in layout.overlap, ratio=ratio)
        move("dp", "all_gather", world, weights * size, "start", "dp" in layout.overlap)
    else:
        move("dp", "all_reduce", world, weights * gradient, "end", "dp" in layout.overlap, ratio=ratio)
    state = weights / (spread if spread > 1 else world.n if layout.zero else 1)
    chunk = Chunk(
        forward=dense.forward + elementwise(device, read * skew, len(job.tables)),
        backward_input=dense.backward_input,
        backward_weight=dense.backward_weight + elementwise(device, 3 * read * skew, len(job.tables)),
        transfers=tuple(found), send=None, weights=weights * size / spread + kept,
        gradients=weights * gradient / spread,
        optimizer=state * job.optimizer.state + rows * job.optimizer.table_state,
        activation=dense.activation + 2 * sent * skew, peak=sent, update=update(device, state, job))
    return Workload((chunk,), layout.devices, 1, per_rank // layout.microbatch, network.links,
                    min(unit.device.memory - unit.device.reserved for unit in units),
                    recommender_flops(job, float(job.batch)), layout.devices * peak(device, job.dtype))
