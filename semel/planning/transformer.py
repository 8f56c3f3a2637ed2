"""One training step of a transformer, stage by stage: compute, transfers, bytes kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semel.planning.axes import Axes, boundaries, compression, even_layers, split_layers
from semel.planning.cluster import Cluster, Device
from semel.planning.compute import NOTHING, Part, embedding, head, peak, transformer_layer, update
from semel.planning.job import Transformer
from semel.planning.layout import Layout, placement
from semel.planning.network import Fabric, Span
from semel.planning.units import BYTES
from semel.planning.workload import Chunk, Infeasible, Transfer, Workload


def transformer_workload(cluster: Cluster, job: Transformer, layout: Layout, over: Fabric | None = None) -> Workload:
    """See ``workload.workload``; memory is not checked. ``over``: what transfers cost, by default on the cluster."""
    axes = Axes.of(cluster, layout)
    microbatches = _fits(job, layout)
    stages, count = layout.size("pp"), layout.size("pp") * layout.chunks
    where = placement(layout.schedule, stages, layout.chunks)
    if cluster.uniform:
        devices, least = [cluster.device] * stages, cluster.device.memory - cluster.device.reserved
        layers = list(even_layers(job.layers, count))
    else:
        units = axes.stage_units(stages, layout.devices)
        devices = [min((unit.device for unit in found), key=lambda device: peak(device, job.dtype)) for found in units]
        least = min(unit.device.memory - unit.device.reserved for found in units for unit in found)
        speed = {id(device): 1.0 / layer_part(device, job, layout, job.experts > 0).forward for device in devices}
        layers = split_layers(job.layers, [speed[id(devices[stage])] for stage in where])
    builder = _Builder(job, layout, axes, over or fabric(cluster, layout.network))
    hops = boundaries(cluster, axes.block, where)
    chunks: list[Chunk] = []
    first, dense_layers = 0, job.dense_layers if job.experts else job.layers
    for index in range(count):
        after = first + layers[index]
        moe = max(0, after - max(first, dense_layers))
        chunks.append(builder.chunk(devices[where[index]], layers[index] - moe, moe, index == 0, index == count - 1,
                                    hops[index]))
        first = after
    each = layout.devices / stages
    return Workload(tuple(chunks), layout.devices, stages, microbatches, builder.fabric.links, least, _flops(job),
                    sum(each * peak(device, job.dtype) for device in devices))


def _fits(job: Transformer, layout: Layout) -> int:
    """Micro-batches a step; raises Infeasible for counts that do not divide."""
    tp, cp, pp, ep = (layout.size(axis) for axis in ("tp", "cp", "pp", "ep"))
    if layout.size("table") > 1:
        raise Infeasible("a transformer has no tables to shard", "table", 0, "leave the table axis out")
    if job.heads % tp:
        raise Infeasible(f"tp = {tp} does not divide {job.heads} heads", "tp")
    if job.sequence % (2 * cp if cp > 1 and job.causal else cp):
        raise Infeasible(f"cp = {cp} does not divide the sequence of {job.sequence} into balanced halves", "cp")
    if ep > 1 and (not job.experts or job.experts % ep):
        raise Infeasible(f"ep = {ep} does not divide {job.experts} experts", "ep")
    if pp * layout.chunks > job.layers + (2 if pp > 1 else 0):  # the ends may hold an embedding or a head alone
        raise Infeasible(f"{pp} stages x {layout.chunks} chunks are more than {job.layers} layers and two ends", "pp")
    replicas = layout.size("dp") * layout.size("fsdp")
    per_replica, left = divmod(job.batch, replicas)
    if left or per_replica % layout.microbatch:
        raise Infeasible(f"a batch of {job.batch} does not divide into dp x fsdp = {replicas} replicas x micro-batches "
                         f"of {layout.microbatch}", "microbatch")
    return per_replica // layout.microbatch


@dataclass
class _Builder:
    job: Transformer
    layout: Layout
    axes: Axes
    fabric: Fabric

    def __post_init__(self) -> None:
        job, layout = self.job, self.layout
        self.size = BYTES[job.storage_dtype]
        self.rows = layout.microbatch * job.sequence / layout.size("cp")
        self.tp = layout.size("tp")
        self.known: dict[tuple, Chunk] = {}
        self.key = (id(job), id(self.fabric), tuple(self.axes.parts.items()), self.axes.expert, layout.microbatch,
                    layout.recompute, layout.sequence_parallel, layout.zero, layout.overlap,
                    tuple(sorted(layout.compress.items())))
        self.patterns = _patterns(self.axes) if any(t.routing == "circuit" for t in self.fabric.technologies) else None
        dense, routed = job.layer_parameters(0)[0], 0.0
        if job.experts:
            self.moe_dense, routed = job.layer_parameters(job.layers - 1)
        else:
            self.moe_dense = 0.0
        self.dense_layer, self.routed_layer = dense / self.tp, routed / self.tp / layout.size("ep")
        self.moe_dense /= self.tp

    def chunk(self, device: Device, dense: int, moe: int, first: bool, last: bool, hop: int) -> Chunk:
        """``hop``: level to the next stage; -1 for the last one, and for a next one on the same device."""
        key = (id(device), dense, moe, first, last, hop)
        found = self.known.get(key)
        if found is None:
            across = (self.key, key)
            kept = _CHUNKS.get(across)
            if kept is None:
                if len(_CHUNKS) > 50_000:
                    _CHUNKS.clear()
                kept = (device, self.job, self.fabric, self._chunk(device, dense, moe, first, last, hop))
                _CHUNKS[across] = kept
            found = self.known[key] = kept[3]
        return found

    def _chunk(self, device: Device, dense: int, moe: int, first: bool, last: bool, hop: int) -> Chunk:
        job, layout = self.job, self.layout
        one_dense = layer_part(device, job, layout, False) if dense else NOTHING
        one_moe = layer_part(device, job, layout, True) if moe else NOTHING
        ends = [end_part(device, job, layout, is_head) for is_head, here in ((False, first), (True, last)) if here]
        total = lambda name: (dense * getattr(one_dense, name) + moe * getattr(one_moe, name)  # noqa: E731
                              + sum(getattr(end, name) for end in ends))
        shared = dense * self.dense_layer + moe * self.moe_dense
        vocabulary = job.vocabulary * job.width / self.tp
        copies = (1 if first else 0) + (1 if last and not (job.tied and first) else 0)
        shared += copies * vocabulary + (job.positions * job.width if first else 0)
        shared += (job._norm() if last else 0)
        routed = moe * self.routed_layer
        weights, gradients, optimizer, gathered = self._kept(shared, routed, dense + moe)
        transfers = (*self._tensor(dense, moe, first, last), *self._context(dense + moe), *self._expert(moe),
                     *self._weights(shared, routed, dense + moe), *self._tied(first, last))
        peak_bytes = max(one_dense.peak, one_moe.peak, *(end.peak for end in ends), 0.0) + gathered
        state = (shared / self._shards(False) + routed / self._shards(True))
        return Chunk(total("forward"), total("backward_input"), total("backward_weight"), transfers,
                     self._send(hop), weights, gradients, optimizer, total("activation"), peak_bytes,
                     update(device, state, job))

    # Bytes kept

    def _shards(self, experts: bool) -> float:
        """Ranks that the optimizer state of a weight is split over."""
        layout = self.layout
        if layout.size("fsdp") > 1:
            return self._ranks(experts, ["cp", "fsdp"])  # HSDP: replicas across dp hold the same shards
        return self._ranks(experts, ["cp", "dp"] if layout.zero else [])

    def _ranks(self, experts: bool, axes: list[str]) -> float:
        group = self.axes.experts(*axes) if experts else self.axes.group(*axes)
        return float(group.n)

    def _kept(self, shared: float, routed: float, layers: int) -> tuple[float, float, float, float]:
        """(weights, gradients, optimizer, gathered layer) in bytes."""
        job, layout = self.job, self.layout
        gradient = BYTES[job.gradient_dtype]
        optimizer = job.optimizer.state * (shared / self._shards(False) + routed / self._shards(True))
        if layout.size("fsdp") > 1 and layout.size("pp") == 1:
            axes = ["cp", "fsdp"]
            held = shared / self._ranks(False, axes) + routed / self._ranks(True, axes)
            layer = max(self.dense_layer, self.moe_dense + self.routed_layer)
            return held * self.size, held * gradient, optimizer, 2 * layer * self.size + layer * gradient
        return (shared + routed) * self.size, (shared + routed) * gradient, optimizer, 0.0

    # Transfers

    def _move(self, axis: str, collective: str, group: Span, size: float, phase: str, count: int = 1,
              hidden: bool | None = None, **how: Any) -> list[Transfer]:
        if group.n <= 1 or count <= 0 or size <= 0:
            return []
        key = (collective, group, size, how.get("skew"), how.get("copies"), how.get("units"),
               tuple(sorted((how.get("ratio") or {}).items())))
        found = None if self.patterns else self.fabric.known.get(key)
        if found is None:
            found = self.fabric.collective(collective, group, size, patterns=self.patterns, **how)
            if not self.patterns and len(self.fabric.known) < 100_000:
                self.fabric.known[key] = found
        latency, loads = found
        beside = axis in self.layout.overlap if hidden is None else hidden
        return [Transfer(axis, collective, size, latency, loads, phase, beside, count)]

    def _tensor(self, dense: int, moe: int, first: bool, last: bool) -> list[Transfer]:
        """All-reduces of activations (arXiv 1909.08053, section 3), or with sequence parallelism the all-gathers and
        reduce-scatters they split into, and saved inputs gathered beside backward (arXiv 2205.05198, section 4.2.2)."""
        if self.tp == 1:
            return []
        group, again = self.axes.group("tp"), self.layout.recompute == "full"
        block = self.size * self.rows * self.job.width
        wide = block * self.job.top_k
        blocks = 2 * dense + moe
        found: list[Transfer] = []
        if not self.layout.sequence_parallel:
            found += self._move("tp", "all_reduce", group, block, "forward", blocks + first)
            found += self._move("tp", "all_reduce", group, block, "backward", blocks * (2 if again else 1) + last)
            found += self._move("tp", "all_reduce", group, wide, "forward", moe)
            found += self._move("tp", "all_reduce", group, wide, "backward", moe * (2 if again else 1))
            return found
        for collective, in_forward, in_backward in (("all_gather", int(last), int(first)),
                                                    ("reduce_scatter", int(first), int(last))):
            found += self._move("tp", collective, group, block, "forward", blocks + in_forward)
            found += self._move("tp", collective, group, block, "backward", blocks * (2 if again else 1) + in_backward)
            found += self._move("tp", collective, group, wide, "forward", moe)
            found += self._move("tp", collective, group, wide, "backward", moe * (2 if again else 1))
        return found + self._move("tp", "all_gather", group, block, "backward", blocks, hidden=True)

    def _context(self, layers: int) -> list[Transfer]:
        """Keys and values gathered in every layer, their gradients scattered (arXiv 2407.21783, section 3.3.2)."""
        cp = self.layout.size("cp")
        if cp == 1:
            return []
        job, group = self.job, self.axes.group("cp")
        width = job.kv_rank + job.rope_width if job.kv_rank else 2 * job.kv_heads * job.head_width / self.tp
        size = self.size * self.rows * cp * width
        again = 2 if self.layout.recompute == "full" else 1
        return [*self._move("cp", "all_gather", group, size, "forward", layers),
                *self._move("cp", "all_gather", group, size, "backward", layers * again),
                *self._move("cp", "reduce_scatter", group, size, "backward", layers)]

    def _expert(self, moe: int) -> list[Transfer]:
        """Tokens out to their experts and back, forward and backward."""
        if self.layout.size("ep") == 1 or not moe:
            return []
        job = self.job
        group = self.axes.group_of(self.axes.expert)
        size = self.size * self.rows * job.top_k * job.width / self.tp
        again = 2 if self.layout.recompute == "full" else 1
        how: dict[str, Any] = {"skew": job.expert_skew, "copies": job.top_k, "units": job.expert_units}
        return [*self._move("ep", "all_to_all", group, size, "forward", 2 * moe, **how),
                *self._move("ep", "all_to_all", group, size, "backward", 2 * moe * again, **how)]

    def _weights(self, shared: float, routed: float, layers: int) -> list[Transfer]:
        """Gradients reduced and weights gathered: over fsdp a layer at a time, or once a step; over dp once a step."""
        layout, found = self.layout, []
        gradient, ratio = BYTES[self.job.gradient_dtype], compression(layout, self.job.gradient_dtype)
        for size, experts in ((shared, False), (routed, True)):
            if not size:
                continue
            pick = self.axes.experts if experts else self.axes.group
            if layout.size("fsdp") == 1:
                group = pick("cp", "dp")
                n = self._buckets("dp", size, group.n, layers)
                if layout.zero:
                    found += self._move("dp", "reduce_scatter", group, size * gradient / n, "end", n, ratio=ratio)
                    found += self._move("dp", "all_gather", group, size * self.size / n, "start", n)
                else:
                    found += self._move("dp", "all_reduce", group, size * gradient / n, "end", n, ratio=ratio)
                continue
            group, across = pick("cp", "fsdp"), pick("dp")
            if layout.size("pp") == 1:
                each = size / max(1, layers)
                found += self._move("fsdp", "all_gather", group, each * self.size, "forward", layers)
                found += self._move("fsdp", "all_gather", group, each * self.size, "backward", layers)
                found += self._move("fsdp", "reduce_scatter", group, each * gradient, "weight", layers, ratio=ratio)
            else:
                n = self._buckets("fsdp", size, group.n, layers)
                found += self._move("fsdp", "all_gather", group, size * self.size / n, "start", n)
                found += self._move("fsdp", "reduce_scatter", group, size * gradient / n, "end", n, ratio=ratio)
            n = self._buckets("dp", size, across.n, layers)
            found += self._move("dp", "all_reduce", across, size / group.n * gradient / n, "end", n, ratio=ratio)
        return found

    def _buckets(self, axis: str, weights: float, ranks: int, layers: int) -> int:
        """Parts that a once-a-step transfer is cut into, to begin before the last backward ends: of 40 million weights,
        or a million a rank where that is more (Megatron-Core's bucket_size), a layer or more each."""
        if axis not in self.layout.overlap:
            return 1
        return max(1, min(layers, round(weights / max(40e6, 1e6 * ranks))))

    def _tied(self, first: bool, last: bool) -> list[Transfer]:
        """Gradients of an embedding that the first and the last stage share."""
        if not self.job.tied or first == last:
            return []
        stages = self.layout.size("pp")
        size = self.job.vocabulary * self.job.width / self.tp * BYTES[self.job.gradient_dtype]
        latency, loads = self.fabric.send(self.axes.boundary(0, stages - 1), size, self.axes.block, self.patterns)
        return [Transfer("pp", "all_reduce", size, latency, loads, "end", False)]

    def _send(self, hop: int) -> Transfer | None:
        """Activations to the next stage, each tensor-parallel rank a part of them (arXiv 2104.04473, section 4.1)."""
        if hop < 0:
            return None
        size = self.size * self.rows * self.job.width / self.tp
        latency, loads = self.fabric.send(hop, size, self.axes.block, self.patterns)
        return Transfer("pp", "send", size, latency, loads, "forward", "pp" in self.layout.overlap)


def _patterns(axes: Axes) -> Mapping[int, int]:
    """Level -> axes that cross it."""
    crossed: dict[int, int] = {}
    for axis in axes.parts:
        for index, factor in enumerate(axes.group(axis).factors):
            if factor > 1:
                crossed[index] = crossed.get(index, 0) + 1
    return crossed


# Remembered between calls: a search asks for few distinct parts, a hundred thousand times ----------------------------

_CHUNKS: dict[tuple, tuple[Device, Transformer, Fabric, Chunk]] = {}
_FABRICS: dict[tuple, tuple[Cluster, Fabric]] = {}
_PARTS: dict[tuple, tuple[tuple[Device, Transformer], Part]] = {}
_FLOPS: dict[int, tuple[Transformer, float]] = {}


def fabric(cluster: Cluster, network: Mapping[str, str]) -> Fabric:
    """``Fabric.choose``, remembered."""
    key = (id(cluster), tuple(sorted(network.items())))
    if key not in _FABRICS:
        if len(_FABRICS) > 500:
            _FABRICS.clear()
        _FABRICS[key] = (cluster, Fabric.choose(cluster, network))
    return _FABRICS[key][1]


def _part_key(device: Device, job: Transformer, layout: Layout, what: str) -> tuple:
    return (id(device), id(job), what, layout.size("tp"), layout.size("cp"), layout.size("ep"), layout.microbatch,
            layout.recompute, layout.sequence_parallel)


def layer_part(device: Device, job: Transformer, layout: Layout, moe: bool) -> Part:
    """``compute.transformer_layer``, remembered."""
    key = _part_key(device, job, layout, "moe" if moe else "dense")
    if key not in _PARTS:
        _remember(key, device, job, transformer_layer(device, job, layout, moe))
    return _PARTS[key][1]


def end_part(device: Device, job: Transformer, layout: Layout, is_head: bool) -> Part:
    """``compute.head`` or ``compute.embedding``, remembered."""
    key = _part_key(device, job, layout, "head" if is_head else "embedding")
    if key not in _PARTS:
        _remember(key, device, job, (head if is_head else embedding)(device, job, layout))
    return _PARTS[key][1]


def _remember(key: tuple, device: Device, job: Transformer, part: Part) -> None:
    if len(_PARTS) > 50_000:
        _PARTS.clear()
    _PARTS[key] = ((device, job), part)


def _flops(job: Transformer) -> float:
    if id(job) not in _FLOPS:
        if len(_FLOPS) > 500:
            _FLOPS.clear()
        _FLOPS[id(job)] = (job, job.flops())
    return _FLOPS[id(job)][1]

