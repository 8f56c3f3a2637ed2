"""Seconds and bytes of the parts of a model on one device: matrix products, attention, element-wise kernels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from semel.planning.cluster import Device
from semel.planning.job import Recommender, Transformer
from semel.planning.layout import Layout
from semel.planning.units import BYTES

MASK = 1.0
"""Bytes of a dropout mask's element."""


def harmonic(m: float, n: float, k: float) -> float:
    """Harmonic mean of the dimensions of an [m, k] x [k, n] product: the size that its efficiency is looked up by,
    since the smallest dimension decides it."""
    return 3.0 / (1.0 / m + 1.0 / n + 1.0 / k)


def product(device: Device, dtype: str, m: float, n: float, k: float, size: float = 2.0,
            times: float = 1.0) -> float:
    """Seconds of ``times`` products [m, k] x [k, n]: a roofline with the device's efficiency curve.

    ``size``: bytes of an element at rest. Raises KeyError for a dtype that the device has no peak for.
    """
    flops = 2.0 * m * n * k
    moved = size * (m * k + k * n + m * n)
    busy = flops / (peak(device, dtype) * device.matmul(harmonic(m, n, k)) * reached(device, dtype))
    return times * (max(busy, moved / (device.memory_bandwidth * device.vector)) + device.kernel)


_TWIN = {"fp16": "bf16", "bf16": "fp16"}


def peak(device: Device, dtype: str) -> float:
    """FLOP/s; fp16 and bf16 stand in for each other. KeyError names the dtypes that there are."""
    for name in (dtype, _TWIN.get(dtype, dtype)):
        if name in device.peak:
            return device.peak[name]
    raise KeyError(f"device {device.name!r} has no peak for {dtype!r}; it has: {', '.join(device.peak)}")


def reached(device: Device, dtype: str) -> float:
    """``Device.reached`` of a dtype; fp16 and bf16 stand in for each other."""
    return device.reached.get(dtype, device.reached.get(_TWIN.get(dtype, dtype), 1.0))


def elementwise(device: Device, moved: float, kernels: float = 1.0) -> float:
    """Seconds of kernels that only move ``moved`` bytes."""
    return moved / (device.memory_bandwidth * device.vector) + kernels * device.kernel


@dataclass(frozen=True)
class Part:
    """A layer, or an end of the model, on one device for one micro-batch."""

    forward: float
    backward_input: float
    backward_weight: float
    """Seconds; recomputation is in ``backward_input``."""
    activation: float
    """Bytes kept from forward to backward."""
    peak: float
    """Bytes on top while it runs backward."""

    def __add__(self, other: Part) -> Part:
        return Part(self.forward + other.forward, self.backward_input + other.backward_input,
                    self.backward_weight + other.backward_weight, self.activation + other.activation,
                    max(self.peak, other.peak))


NOTHING = Part(0.0, 0.0, 0.0, 0.0, 0.0)


def _products(device: Device, job: Transformer, shapes: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    """(forward, backward for the input, backward for the weight) of linear layers [m, k] x [k, n]."""
    size = BYTES[job.storage_dtype]
    forward = sum(product(device, job.dtype, m, n, k, size) for m, n, k in shapes)
    towards_input = sum(product(device, job.dtype, m, k, n, size) for m, n, k in shapes)
    towards_weight = sum(product(device, job.dtype, k, n, m, size) for m, n, k in shapes)
    return forward, towards_input, towards_weight


def attention_core(device: Device, job: Transformer, layout: Layout) -> tuple[float, float, float]:
    """(forward seconds, backward seconds, bytes kept) of softmax(Q K^T) V, without its projections.

    Fused kernels do 2 products forward and 5 backward (FlashAttention-2, arXiv 2307.08691, section 3), on half of the
    blocks if causal. Otherwise scores lie in memory: softmax, its dropout and the products read and write them; kept
    are the softmax, the mask and the dropped-out scores, 5 a s^2 b bytes (arXiv 2205.05198, section 4.1).
    """
    tp, cp = layout.size("tp"), layout.size("cp")
    size = BYTES[job.storage_dtype]
    heads = job.heads / tp
    rows = layout.microbatch * job.sequence / cp
    scores = rows * job.sequence * heads
    wide = job.head_width + (job.rope_width if job.kv_rank else 0)
    flops = 2.0 * scores * (wide + job.head_width)
    if job.fused_attention:
        flops *= 0.5 if job.causal else 1.0
        dtype = "bf16" if BYTES[job.dtype] < 2 else job.dtype  # 8-bit training computes attention in 16
        speed = peak(device, dtype) * device.attention(job.sequence) * reached(device, dtype)
        return flops / speed + device.kernel, 2.5 * flops / speed + device.kernel, 4.0 * rows * heads
    per_head = layout.microbatch * heads
    length = job.sequence / cp
    multiply = (product(device, job.dtype, length, job.sequence, wide, size, per_head)
                + product(device, job.dtype, length, job.head_width, job.sequence, size, per_head))
    multiply -= 2 * (per_head - 1) * device.kernel  # one batched kernel each
    drop = MASK + 2 * size if job.dropout else 0.0
    through = scores * (2 * size + drop)  # the products' own traffic is in their roofline
    kept = scores * (size + ((MASK + size) if job.dropout else 0.0))
    forward = multiply + elementwise(device, through, 2)
    return forward, 2 * multiply + elementwise(device, scores * (3 * size + drop), 2), kept


def transformer_layer(device: Device, job: Transformer, layout: Layout, moe: bool) -> Part:
    """One layer. Bytes follow arXiv 2205.05198, section 4, term by term: 34 s b h + 5 a s^2 b with GELU and dropout."""
    tp, cp, ep = (float(layout.size(axis)) for axis in ("tp", "cp", "ep"))
    size = BYTES[job.storage_dtype]
    rows = layout.microbatch * job.sequence / cp
    split = tp if layout.sequence_parallel else 1
    queries, keys = job.heads * job.head_width, job.kv_heads * job.head_width
    linear: list[tuple[float, float, float]] = []
    if job.kv_rank:
        rope, turned = job.rope_width, job.heads * (job.head_width + job.rope_width)
        down = job.query_rank + job.kv_rank + rope
        linear += [(rows, down, job.width), (rows, turned / tp, job.query_rank or job.width),
                   (rows, 2 * queries / tp, job.kv_rank)]
        projected = size * rows * (down + (turned + 2 * queries) / tp)
    else:
        linear += [(rows, (queries + 2 * keys) / tp, job.width)]
        projected = size * rows * (queries + 2 * keys) / tp
    linear += [(rows, job.width, queries / tp)]
    blocks: list[tuple[float, float]] = []  # (rows, inner width a device) of feed-forward blocks
    if moe:
        routed = rows * job.top_k * job.expert_skew
        if job.shared_experts:
            blocks.append((rows, job.shared_experts * job.expert_width / tp))
        blocks.append((routed, job.expert_width / tp))  # what ranks send out comes in as much, skew apart
    else:
        blocks.append((rows, job.feedforward / tp))
    up = 2.0 if job.gated else 1.0
    forward, towards_input, towards_weight = _products(device, job, linear)
    local = max(1.0, job.experts / ep) if moe else 1.0
    for index, (count, inner) in enumerate(blocks):
        experts = local if index == len(blocks) - 1 else 1.0
        share = max(1.0, count / experts)
        times = _products(device, job, [(share, up * inner, job.width), (share, job.width, inner)])
        forward, towards_input, towards_weight = (forward + experts * times[0], towards_input + experts * times[1],
                                                  towards_weight + experts * times[2])
    wide_rows = sum(count * inner for count, inner in blocks)
    token = rows * job.width / split
    drop = MASK if job.dropout else 0.0
    norms = 2 * 2 * size * token
    residuals = 2 * (3 * size + drop) * token
    activation = (up + 1) * size * wide_rows
    routing = 4 * size * rows * job.top_k * job.width / tp if moe else 0.0  # gather to experts and back, weighted
    moved = norms + residuals + activation + routing
    core, core_back, scores = attention_core(device, job, layout)
    forward += core + elementwise(device, moved, 6)
    back = core_back + elementwise(device, 2 * moved, 8)
    kept_norms = 2 * size * token  # inputs of the norms
    kept_inputs = 2 * size * token  # inputs of the two blocks
    kept_masks = 2 * drop * token
    expert_rows = (blocks[-1][0] * job.width * size / tp) if moe else 0.0
    kept_wide = (up * size + size) * wide_rows + expert_rows
    context = size * rows * queries / tp
    kept = kept_norms + kept_inputs + kept_masks + projected + context + scores + kept_wide
    if layout.recompute == "full":
        return Part(forward, towards_input + back + forward, towards_weight, size * token, kept)
    if layout.recompute == "selective":
        if job.fused_attention:  # norms and the activation function again: cheap, and they hold half of the rest
            saved, again = kept_inputs + size * wide_rows, elementwise(device, norms + activation, 3)
        else:
            saved, again = scores, core
        return Part(forward, towards_input + back + again, towards_weight, kept - saved, saved)
    return Part(forward, towards_input + back, towards_weight, kept, 0.0)


def embedding(device: Device, job: Transformer, layout: Layout) -> Part:
    """Looking up tokens, and adding their gradients."""
    size = BYTES[job.storage_dtype]
    rows = layout.microbatch * job.sequence / layout.size("cp")
    split = layout.size("tp") if layout.sequence_parallel else 1
    moved = 2 * size * rows * job.width
    return Part(elementwise(device, moved), 0.0, elementwise(device, 2 * moved),
                MASK * rows * job.width / split if job.dropout else 0.0, 0.0)


def head(device: Device, job: Transformer, layout: Layout) -> Part:
    """Last norm, logits and cross-entropy over a vocabulary that is split by ``tp``. Kept: both inputs, and logits in
    fp32 (arXiv 2205.05198, section 4.3)."""
    tp, size = layout.size("tp"), BYTES[job.storage_dtype]
    rows = layout.microbatch * job.sequence / layout.size("cp")
    split = tp if layout.sequence_parallel else 1
    words = job.vocabulary / tp
    forward, towards_input, towards_weight = _products(device, job, [(rows, words, job.width)])
    loss = rows * words * (size + 4.0)
    return Part(forward + elementwise(device, loss + 2 * size * rows * job.width / split, 4),
                towards_input + elementwise(device, loss, 2), towards_weight,
                2 * size * rows * job.width / split + 4.0 * rows * words, size * rows * words)


def update(device: Device, parameters: float, job: Transformer | Recommender) -> float:
    """Seconds of an optimizer step over ``parameters`` on a device: gradient read, state read and written, weight
    written."""
    moved = BYTES[job.gradient_dtype] + 2 * job.optimizer.state + BYTES[job.storage_dtype]
    return elementwise(device, parameters * moved)


def _dense(device: Device, job: Recommender, rows: float, widths: tuple[int, ...]) -> Part:
    forward = back = weight = kept = 0.0
    size = BYTES[job.storage_dtype]
    for k, n in pairwise(widths):
        forward += product(device, job.dtype, rows, n, k, size) + elementwise(device, 2 * size * rows * n)
        back += product(device, job.dtype, rows, k, n, size) + elementwise(device, 2 * size * rows * n)
        weight += product(device, job.dtype, k, n, rows, size)
        kept += 2 * size * rows * n
    return Part(forward, back, weight, kept, 0.0)


def hstu_layer(device: Device, job: Recommender, events: float, squares: float) -> Part:
    """One HSTU layer over histories with ``events`` tokens in all and ``squares`` the sum of squared lengths.

    u, v, q, k in one product with SiLU; pointwise attention silu(q k^T) v on the causal half; norm, gate by u, and one
    product back (arXiv 2402.17152, section 3.1).
    """
    size = BYTES[job.storage_dtype]
    inner = job.heads * job.head_width
    shapes = [(events, 4.0 * inner, float(job.width)), (events, float(job.width), float(inner))]
    forward = sum(product(device, job.dtype, m, n, k, size) for m, n, k in shapes)
    back = sum(product(device, job.dtype, m, k, n, size) for m, n, k in shapes)
    weight = sum(product(device, job.dtype, k, n, m, size) for m, n, k in shapes)
    flops = 0.5 * 4.0 * squares * inner
    length = squares / max(1.0, events)
    speed = peak(device, job.dtype) * device.attention(max(1.0, length)) * reached(device, job.dtype)
    moved = size * events * (2 * job.width + 8 * inner + 3 * inner + 3 * job.width)
    return Part(forward + flops / speed + elementwise(device, moved, 5),
                back + 2.5 * flops / speed + elementwise(device, 2 * moved, 7), weight,
                size * events * (2 * job.width + 4 * inner + 4 * inner + 2 * inner), 0.0)


def recommender_dense(device: Device, job: Recommender, samples: float, events: float, squares: float) -> Part:
    """The dense part over ``samples`` requests: encoder over histories, networks over dense features and candidates."""
    part = NOTHING
    for _ in range(job.layers):
        part += hstu_layer(device, job, events, squares)
    part += _dense(device, job, samples, job.bottom)
    return part + _dense(device, job, samples * job.candidates, job.top)
