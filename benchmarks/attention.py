"""Jagged attention and the fused softmax loss against what one would write otherwise, forward and backward.

    python -m benchmarks.attention [--rounds 9] [--json]

Attention: 128 histories with the lengths of MovieLens-1M (log-normal, at most 200), 2 heads of 32, relative bias by
position and time. Against the same in padded tensors under plain autograd, the bias looked up by indexing. Loss: the
same number of positions, 64 wide, 512 shared negatives, against the plain form. Interleaved, medians, in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from semel.models import reference
from semel.models.attention import AttentionPlan, jagged_attention
from semel.models.attention_chunks import ChunksAttention, plan_chunks
from semel.models.softmax import sample_negatives, softmax_loss
from semel.models.time_bias import TIME_BUCKETS, time_bucket

ROWS, LONGEST = 128, 200


def lengths(generator: torch.Generator) -> Tensor:
    drawn = torch.exp(4.5 + 0.9 * torch.randn(ROWS, generator=generator)).long()
    return drawn.clamp(3, LONGEST)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, time_us: Tensor, position_bias: Tensor,
                     time_bias: Tensor) -> Tensor:
    """SiLU attention over [rows, heads, longest, longest], everything kept for the backward."""
    size = offsets[1:] - offsets[:-1]
    steps = torch.arange(int(size.max()))
    mask = steps < size[:, None]

    def pad(x: Tensor) -> Tensor:
        out = x.new_zeros(len(size), len(steps), *x.shape[1:])
        out[mask] = x
        return out

    qp, kp, vp = (pad(x).transpose(1, 2) for x in (q, k, v))
    when = pad(time_us)
    gap = steps[:, None] - steps
    bias = position_bias[gap.clamp(0, len(position_bias) - 1)] + \
        time_bias[time_bucket(when[:, :, None] - when[:, None, :]).long()]
    weights = torch.nn.functional.silu(qp @ kp.transpose(-1, -2) + bias[:, None]) / LONGEST
    out = weights.masked_fill(gap < 0, 0.0) @ vp
    return out.transpose(1, 2)[mask]


def timed(step: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    step().sum().backward()
    return time.perf_counter() - started


def compare(fast: Callable[[], Tensor], other: Callable[[], Tensor], rounds: int) -> dict[str, float]:
    a, b = [], []
    for _ in range(rounds + 2):
        a.append(timed(fast))
        b.append(timed(other))
    a, b = a[2:], b[2:]
    ratios = sorted(y / x for x, y in zip(a, b, strict=True))
    return {"fast_ms": 1e3 * statistics.median(a), "other_ms": 1e3 * statistics.median(b),
            "ratio": statistics.median(ratios), "ratio_low": ratios[0], "ratio_high": ratios[-1]}


def run(rounds: int, heads: int, width: int) -> dict[str, dict[str, float]]:
    g = torch.Generator().manual_seed(0)
    size = lengths(g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)])
    tokens = int(offsets[-1])
    q, k, v = (torch.randn(tokens, heads, width, generator=g, requires_grad=True) for _ in range(3))
    position_bias, time_bias = (torch.zeros(n, requires_grad=True) for n in (LONGEST, TIME_BUCKETS))
    when = torch.randint(0, 10**14, (tokens,), generator=g)

    def fast() -> Tensor:
        plan = AttentionPlan(offsets, offsets, causal=True, positions=LONGEST, query_time=when, key_time=when)
        return jagged_attention(q, k, v, plan, weighting="silu", scale=1.0, norm=LONGEST, position_bias=position_bias,
                                time_bias=time_bias)

    def padded() -> Tensor:
        return padded_attention(q, k, v, offsets, when, position_bias, time_bias)

    def chunked() -> Tensor:
        plan = plan_chunks(offsets, offsets, True, LONGEST, when, when)
        nothing = q.new_empty(0)
        return ChunksAttention.apply(q, k, v, nothing, nothing, position_bias, time_bias, plan, "silu", 1.0, LONGEST)

    difference = float((fast() - padded()).detach().abs().max())
    table = torch.randn(3707, 64, generator=g, requires_grad=True)
    query = torch.randn(tokens, 64, generator=g, requires_grad=True)
    target = torch.randint(1, 3707, (tokens,), generator=g)
    negative, log_q = sample_negatives(3706, 512, g)

    def loss(function: Callable[..., Tensor]) -> Tensor:
        return function(query, table[target], target, table[negative], negative, log_q, 1.0)

    return {
        "attention": {**compare(fast, padded, rounds), "tokens": tokens, "max_difference": difference},
        "attention, chunked": {**compare(fast, chunked, rounds), "tokens": tokens,
                               "max_difference": float((fast() - chunked()).detach().abs().max())},
        "softmax_loss": {**compare(lambda: loss(softmax_loss), lambda: loss(reference.softmax_loss), rounds),
                         "tokens": tokens,
                         "max_difference": float((loss(softmax_loss) - loss(reference.softmax_loss)).detach().abs())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=32, help="of a head")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = {"threads": torch.get_num_threads(), **run(arguments.rounds, arguments.heads, arguments.width)}
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{result['threads']} threads, forward and backward")
    for name in ("attention", "attention, chunked", "softmax_loss"):
        row = result[name]
        print(f"{name:18} {row['fast_ms']:8.1f} ms   other {row['other_ms']:8.1f} ms   ratio {row['ratio']:.2f} "
              f"({row['ratio_low']:.2f}-{row['ratio_high']:.2f})   {row['tokens']} tokens, max difference "
              f"{row['max_difference']:.1e}")


if __name__ == "__main__":
    main()
