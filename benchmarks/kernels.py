"""Each kernel of ``semel.sharing.kernels`` against what one would write otherwise: forward, and with its backward.

    python -m benchmarks.kernels [--device cpu|cuda] [--rounds 15] [--json]

On CUDA at the published points: linear compression at 1,024 candidates of 15 users, 433 outputs, 256 wide, 1,178
user and 866 candidate fields; attention of 2,048 candidates of 32 users, 2 heads of 128, 64 queries a candidate,
histories of 1,024; both in float16. On a CPU at the smaller shapes that it prints, in float32. Interleaved pairs in one
process, medians, on a CPU of CPU time; a ratio above 1 means that the kernel is faster. ``floor`` is the least time
that the bytes and FLOPs of the computation need at the device's published peaks; ``error`` is the largest difference
from float64 over the largest value.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from semel.sharing import kernels

PEAKS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.04e12)}
"""Dense float16 FLOPs and bytes a second, from the vendor's data sheets."""


@dataclass(frozen=True)
class Point:
    """One kernel at one shape. ``ours`` and ``others`` take ``inputs`` and return comparable tensors; ``flops`` and
    ``bytes`` are those of the shared forward, every operand read once."""

    name: str
    shape: str
    inputs: list[Tensor]
    ours: Callable[..., Tensor]
    others: dict[str, Callable[..., Tensor]]
    flops: float
    bytes: float


def even_offsets(rows: int, requests: int, device: str) -> Tensor:
    """Rows shared out to requests in nearly equal, not all equal parts."""
    return torch.linspace(0, rows, requests + 1, device=device).round().long()


def normal(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def owner_of(offsets: Tensor, rows: int) -> Tensor:
    requests = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(requests, offsets.diff(), output_size=rows)


def size(*tensors: Tensor) -> float:
    return float(sum(x.numel() * x.element_size() for x in tensors))


def gather_add(device: str, dtype: torch.dtype, candidates: int, requests: int, width: int) -> Point:
    offsets = even_offsets(candidates, requests, device)
    owner = owner_of(offsets, candidates)
    inputs = [normal(device, dtype, candidates, width), normal(device, dtype, requests, width)]
    return Point(
        "gather_add", f"C={candidates} R={requests} D={width}", inputs,
        lambda c, r: kernels.gather_add(c, r, offsets),
        {"broadcast, add": lambda c, r: c + r.index_select(0, owner)},
        candidates * width, 2 * size(inputs[0]) + size(inputs[1]),
    )


def linear_compression(device: str, dtype: torch.dtype, candidates: int, requests: int, m: int, width: int,
                       k_request: int, k_candidate: int) -> Point:
    offsets = even_offsets(candidates, requests, device)
    owner = owner_of(offsets, candidates)
    inputs = [normal(device, dtype, m, k_candidate), normal(device, dtype, m, k_request),
              normal(device, dtype, candidates, k_candidate, width), normal(device, dtype, requests, k_request, width)]
    scale = (k_request + k_candidate) ** -0.5
    inputs[:2] = [w * scale for w in inputs[:2]]
    ahead = torch.cat([inputs[3].index_select(0, owner), inputs[2]], 1)

    def broadcast(wc: Tensor, wr: Tensor, ec: Tensor, er: Tensor) -> Tensor:
        return torch.matmul(torch.cat([wr, wc], 1), torch.cat([er.index_select(0, owner), ec], 1))

    def broadcast_ahead(wc: Tensor, wr: Tensor, ec: Tensor, er: Tensor) -> Tensor:
        return torch.matmul(torch.cat([wr, wc], 1), ahead)

    def split(wc: Tensor, wr: Tensor, ec: Tensor, er: Tensor) -> Tensor:
        return torch.matmul(wc, ec) + torch.matmul(wr, er).index_select(0, owner)

    return Point(
        "linear_compression", f"C={candidates} R={requests} M={m} D={width} Kr={k_request} Kc={k_candidate}", inputs,
        lambda *x: kernels.linear_compression(*x, offsets),
        {"broadcast, GEMM": broadcast, "GEMM on input broadcast before": broadcast_ahead, "split GEMM, add": split},
        2.0 * m * width * (candidates * k_candidate + requests * k_request),
        size(*inputs) + candidates * m * width * inputs[0].element_size(),
    )


def pair_interaction(device: str, dtype: torch.dtype, candidates: int, requests: int, request_fields: int,
                     candidate_fields: int, width: int) -> Point:
    offsets = even_offsets(candidates, requests, device)
    owner = owner_of(offsets, candidates)
    inputs = [normal(device, dtype, requests, request_fields, width),
              normal(device, dtype, candidates, candidate_fields, width)]
    fields = request_fields + candidate_fields
    columns = torch.cat([x.flatten() for x in kernels.pair_columns(request_fields, candidate_fields)[1:]]).to(device)
    i, j = torch.triu_indices(fields, fields, 1, device=device)

    def broadcast(request: Tensor, candidate: Tensor) -> Tensor:
        """All pairs of every candidate; those with a candidate in them are then compared."""
        x = torch.cat([request.index_select(0, owner), candidate], 1)
        return torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, i * fields + j)

    def ours(request: Tensor, candidate: Tensor) -> Tensor:
        pairs = kernels.pair_interaction(request, candidate, offsets)
        return torch.cat([pairs.cross.flatten(1), pairs.candidate], 1)

    broadcast.compared = lambda out: out[:, columns]  # type: ignore[attr-defined]
    cross, own = candidate_fields * request_fields, candidate_fields * (candidate_fields - 1) // 2
    return Point(
        "pair_interaction", f"C={candidates} R={requests} Fr={request_fields} Fc={candidate_fields} K={width}", inputs,
        ours, {"broadcast, all pairs": broadcast}, 2.0 * width * candidates * (cross + own),
        size(*inputs) + candidates * (cross + own) * inputs[0].element_size(),
    )


def broadcast_attention(device: str, dtype: torch.dtype, candidates: int, requests: int, queries: int, heads: int,
                        width: int, length: int, ragged: bool) -> Point:
    if ragged:  # lengths from a quarter to all of ``length``
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(length // 4, length + 1, (requests,), generator=generator)
    else:
        lengths = torch.full((requests,), length)
    history = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
    offsets = even_offsets(candidates, requests, device)
    owner = owner_of(offsets, candidates)
    tokens = int(lengths.sum())
    inputs = [normal(device, dtype, candidates, queries, heads, width), normal(device, dtype, tokens, heads, width),
              normal(device, dtype, tokens, heads, width)]
    steps = torch.arange(length, device=device)
    seen = steps < lengths.to(device)[:, None]
    place = torch.where(seen, history[:-1, None] + steps, 0)
    mask = None if not ragged else seen[owner][:, None, None, :]

    def broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (x[place][owner].transpose(1, 2) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask).transpose(1, 2)

    others: dict[str, Callable[..., Tensor]] = {"broadcast K and V, SDPA": broadcast}
    others |= _rows(offsets, history) if device == "cpu" else _folded(offsets, history, queries, lengths, owner)
    pairs = float((offsets.diff().cpu() * lengths).sum()) * queries
    shape = f"C={candidates} R={requests} N={queries} H={heads} D={width} L={'to ' if ragged else ''}{length}"
    return Point("broadcast_attention", shape, inputs, lambda *x: kernels.broadcast_attention(*x, offsets, history),
                 others, 4.0 * pairs * heads * width, size(*inputs) + size(inputs[0]))


def _rows(offsets: Tensor, history: Tensor) -> dict[str, Callable[..., Tensor]]:
    """The compiled loops that HSTU's causal attention runs on a CPU; here nothing is causal."""
    from semel.models.attention import AttentionPlan, jagged_attention

    def rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = AttentionPlan(offsets * q.shape[1], history, causal=False)
        scale = q.shape[-1] ** -0.5
        return jagged_attention(q.flatten(0, 1), k, v, plan, weighting="softmax", scale=scale).view(q.shape)

    return {"compiled rows (semel.models)": rows}


def _folded(offsets: Tensor, history: Tensor, queries: int, lengths: Tensor,
            owner: Tensor) -> dict[str, Callable[..., Tensor]]:
    """Queries of a request's candidates as one sequence: the variable-length flash path, and FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.attention.varlen import varlen_attn

    q_ends, k_ends = (offsets * queries).int(), history.int()
    longest_q, longest_k = int(q_ends.diff().max()), int(lengths.max())
    of_query = owner.repeat_interleave(queries)
    of_key = owner_of(history, int(lengths.sum()))
    flex = torch.compile(flex_attention)

    @cache
    def block() -> Any:
        return create_block_mask(lambda b, h, i, j: of_query[i] == of_key[j], None, None, len(of_query), len(of_key),
                                 device=str(owner.device), _compile=True)  # else [queries, keys] lie in memory

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(q.flatten(0, 1), k, v, q_ends, k_ends, longest_q, longest_k).view(q.shape)

    def flexible(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_, k_, v_ = (x.transpose(0, 1).unsqueeze(0) for x in (q.flatten(0, 1), k, v))
        return flex(q_, k_, v_, block_mask=block())[0].transpose(0, 1).reshape(q.shape)

    return {"folded, varlen flash": varlen, "folded, FlexAttention": flexible}


def points(device: str) -> list[Callable[[], Point]]:
    """Built one after another, so that only one lies in memory."""
    if device == "cuda":
        half = torch.float16
        return [
            lambda: linear_compression(device, half, 1024, 15, 433, 256, 1178, 866),
            lambda: broadcast_attention(device, half, 2048, 32, 64, 2, 128, 1024, False),
            lambda: broadcast_attention(device, half, 2048, 32, 64, 2, 128, 1024, True),
            lambda: pair_interaction(device, half, 8192, 16, 80, 20, 32),
            lambda: gather_add(device, half, 16384, 32, 1024),
        ]
    single = torch.float32
    return [
        lambda: linear_compression(device, single, 512, 8, 32, 32, 80, 20),
        lambda: linear_compression(device, single, 128, 4, 108, 64, 294, 216),
        lambda: broadcast_attention(device, single, 512, 8, 1, 2, 32, 200, False),
        lambda: broadcast_attention(device, single, 512, 8, 8, 2, 32, 200, True),
        lambda: broadcast_attention(device, single, 1024, 128, 1, 2, 32, 100, True),
        lambda: pair_interaction(device, single, 512, 4, 80, 20, 32),
        lambda: gather_add(device, single, 4096, 8, 512),
    ]


def seconds(call: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        started = time.process_time()
        call()
        return time.process_time() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def step(function: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> Callable[[], Any]:
    if not backward:
        def forward() -> Tensor:
            with torch.no_grad():
                return function(*inputs)
        return forward
    leaves = [x.detach().requires_grad_() for x in inputs]
    down = torch.ones_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, down, allow_unused=True)


def compare(ours: Callable[[], Any], other: Callable[[], Any], device: str, rounds: int) -> dict[str, float]:
    a, b = [], []
    for _ in range(rounds + 3):
        a.append(seconds(ours, device))
        b.append(seconds(other, device))
    a, b = a[3:], b[3:]
    ratios = sorted(y / x for x, y in zip(a, b, strict=True))
    return {"kernel_ms": 1e3 * statistics.median(a), "other_ms": 1e3 * statistics.median(b),
            "ratio": statistics.median(ratios), "ratio_low": ratios[0], "ratio_high": ratios[-1]}


def error(function: Callable[..., Tensor], inputs: list[Tensor], truth: Tensor) -> float:
    with torch.no_grad():
        out = function(*inputs)
    out = getattr(function, "compared", lambda x: x)(out)
    return float((out.double() - truth).abs().max() / truth.abs().max())


def measure(point: Point, device: str, rounds: int) -> list[dict[str, Any]]:
    with torch.no_grad():
        truth = point.ours(*(x.double() for x in point.inputs))  # float64 runs torch operations on every device
    result = []
    for name, other in point.others.items():
        for backward in (False, True):
            if backward and "before" in name:
                continue  # its input does not depend on the leaves
            row: dict[str, Any] = {
                "kernel": point.name, "shape": point.shape, "against": name, "backward": backward,
                "gflop": point.flops / 1e9, "megabytes": point.bytes / 1e6,
                "floor_ms": None if backward else floor(point, device)}
            try:
                row |= compare(step(point.ours, point.inputs, backward), step(other, point.inputs, backward), device,
                               rounds)
                row |= {"error": error(point.ours, point.inputs, truth),
                        "other_error": error(other, point.inputs, truth)}
            except Exception as failure:  # time on a device is scarce: what does not run there is a line, not the end
                row["failed"] = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
            result.append(row)
    return result


def floor(point: Point, device: str) -> float | None:
    if device == "cpu":
        return None
    known = [peak for name, peak in PEAKS.items() if name in torch.cuda.get_device_name()]
    return 1e3 * max(point.flops / known[0][0], point.bytes / known[0][1]) if known else None


def show(result: dict[str, Any]) -> None:
    print(f"{result['device']}, {result['type']}, torch {result['torch']}, {result['threads']} threads")
    before = None
    for row in result["rows"]:
        head = f"{row['kernel']}   {row['shape']}   {row['gflop']:.2f} GFLOP, {row['megabytes']:.1f} MB"
        if row["floor_ms"] is not None:
            head += f", floor {row['floor_ms']:.3f} ms"
        if (row["kernel"], row["shape"]) != before:
            print(f"\n{head}")
            before = row["kernel"], row["shape"]
        how = "forward + backward" if row["backward"] else "forward"
        if "failed" in row:
            print(f"  {row['against']:32} {how:18} {row['failed']}")
            continue
        print(f"  {row['against']:32} {how:18} {row['kernel_ms']:9.3f} ms   other {row['other_ms']:9.3f} ms   "
              f"ratio {row['ratio']:6.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})   "
              f"error {row['error']:.1e}, other {row['other_error']:.1e}")


def run(device: str, rounds: int) -> dict[str, Any]:
    rows = [row for make in points(device) for row in measure(make(), device, rounds)]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "type": "float16" if device == "cuda" else "float32", "torch": torch.__version__,
            "threads": torch.get_num_threads(), "rounds": rounds, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved pairs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device; use --device cpu")
    result = run(arguments.device, arguments.rounds)
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
