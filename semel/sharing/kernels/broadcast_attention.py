"""Attention of candidates to their request's history: keys and values once a request, never broadcast.

All queries of a request's candidates are folded into one matrix against its keys (query folding), which turns C small
attentions into R large ones. Axes: ``C`` candidates, ``N`` queries a candidate, ``S`` history tokens of all requests,
``H`` heads, ``D`` head width, ``M`` own tokens a candidate.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from semel.sharing.kernels import paths
from semel.sharing.kernels.attention_groups import history_backward, history_forward
from semel.sharing.kernels.offsets import require_alike, require_offsets, require_offsets_shape

Weighting = Literal["softmax", "silu"]


def broadcast_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    candidate_offsets: Tensor,
    history_offsets: Tensor,
    *,
    weighting: Weighting = "softmax",
    scale: float | None = None,
    norm: float = 1.0,
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
) -> Tensor:
    """``q`` [C, N, H, D], ``k`` and ``v`` [S, H, D], ``candidate_offsets`` and ``history_offsets`` [R + 1] ->
    [C, N, H, D].

    Every query of candidate c sees the history of c's request, and the candidate's own tokens ``own_k``, ``own_v``
    [C, M, H, D] where given; never another candidate. Weights are the softmax of ``q.k * scale`` over what a query
    sees, or ``silu(q.k * scale)`` (HSTU, arXiv 2402.17152, eq. 2), both divided by ``norm``; ``scale`` defaults to
    ``D ** -0.5``. A query that sees nothing gets zeros. Memory is linear in the lengths: the backward computes the
    weights again.

    Raises ValueError for offsets that do not cover C or S and for shapes, types or devices that do not fit.
    """
    if weighting not in ("softmax", "silu"):
        raise ValueError(f"broadcast_attention: weighting is {weighting!r}; give 'softmax' or 'silu'")
    if (own_k is None) != (own_v is None):
        raise ValueError("broadcast_attention: only one of own_k and own_v is given; give both or neither")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, _ = _attention(q, k, v, own_k, own_v, candidate_offsets, history_offsets, weighting, scale)
    return out if norm == 1.0 else out / norm


def _check(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor | None, own_v: Tensor | None) -> None:
    name = "broadcast_attention"
    require_alike(name, q=q, k=k, v=v, own_k=own_k, own_v=own_v)
    if q.dim() != 4 or k.dim() != 3:
        raise ValueError(f"{name}: q has shape {list(q.shape)} and k {list(k.shape)}; "
                         "give [C, N, H, D] and [S, H, D]")
    if k.shape[1:] != q.shape[2:]:
        raise ValueError(f"{name}: k has heads and width {list(k.shape[1:])} but q {list(q.shape[2:])}; "
                         "they must be equal")
    if v.shape != k.shape:
        raise ValueError(f"{name}: v has shape {list(v.shape)} but k {list(k.shape)}; they must be equal")
    if own_k is None or own_v is None:
        return
    if own_k.dim() != 4 or own_k.shape[0] != q.shape[0] or own_k.shape[1] < 1 or own_k.shape[2:] != q.shape[2:]:
        expected = [q.shape[0], "M", *q.shape[2:]]
        raise ValueError(f"{name}: own_k has shape {list(own_k.shape)}; give {expected} with at least one token, "
                         "or None")
    if own_v.shape != own_k.shape:
        raise ValueError(f"{name}: own_v has shape {list(own_v.shape)} but own_k {list(own_k.shape)}; "
                         "they must be equal")


@torch.library.custom_op("semel::broadcast_attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor | None, own_v: Tensor | None, candidate_offsets: Tensor,
               history_offsets: Tensor, weighting: str, scale: float) -> tuple[Tensor, Tensor]:
    """The result and, for softmax, the log of each query's sum of exponentials [C, N, H], which the backward needs."""
    _check(q, k, v, own_k, own_v)
    requests = len(candidate_offsets) - 1
    require_offsets("broadcast_attention", "candidate_offsets", candidate_offsets, requests, q, "q")
    require_offsets("broadcast_attention", "history_offsets", history_offsets, requests, k, "k")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if q.numel() == 0:
        return torch.empty_like(q), _sums(q, weighting)
    if _on_triton(q):
        from semel.sharing.kernels.triton_attention import history_forward as on_device

        out, lse = on_device(q, k, v, candidate_offsets, history_offsets, weighting, scale)
    else:
        out, lse = history_forward(q, k, v, candidate_offsets, history_offsets, weighting, scale)
    if own_k is None or own_v is None:
        return out.to(q.dtype), lse
    scores = _own_scores(q, own_k, scale, lse.dtype)
    values = own_v.to(scores.dtype)
    if weighting == "silu":
        return (out + _weigh(torch.nn.functional.silu(scores), values)).to(q.dtype), lse
    total = torch.logaddexp(lse, scores.logsumexp(-1))
    out = out * (lse - total).exp().unsqueeze(-1) + _weigh((scores - total.unsqueeze(-1)).exp(), values)
    return out.to(q.dtype), total


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor | None, own_v: Tensor | None, candidate_offsets: Tensor,
      history_offsets: Tensor, weighting: str, scale: float) -> tuple[Tensor, Tensor]:
    _check(q, k, v, own_k, own_v)
    require_offsets_shape("broadcast_attention", "history_offsets", history_offsets, candidate_offsets.shape[0] - 1)
    return q.new_empty(q.shape), _sums(q, weighting)


def _on_triton(q: Tensor) -> bool:
    return q.shape[-1] <= 256 and paths.uses_triton(q)  # a tile holds whole heads: wider ones do not fit on chip


def _sums(q: Tensor, weighting: str) -> Tensor:
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape[:3] if weighting == "softmax" else (0,), dtype=exact)


def _own_scores(q: Tensor, own_k: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return torch.einsum("cnhd,cmhd->cnhm", q.to(dtype), own_k.to(dtype)) * scale


def _weigh(weights: Tensor, values: Tensor) -> Tensor:
    return torch.einsum("cnhm,cmhd->cnhd", weights, values)


@torch.library.custom_op("semel::broadcast_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor | None, own_v: Tensor | None, out: Tensor,
    lse: Tensor, candidate_offsets: Tensor, history_offsets: Tensor, weighting: str, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad, q, k, v = grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    down_k = torch.zeros_like(own_k if own_k is not None else q[:0], memory_format=torch.contiguous_format)
    down_v = torch.zeros_like(down_k)
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), down_k, down_v
    # With the result and the sums over history *and* own tokens, each part's gradient is that of the whole softmax.
    if _on_triton(q):
        from semel.sharing.kernels.triton_attention import history_backward as on_device

        dq, dk, dv = on_device(grad, q, k, v, out, lse, candidate_offsets, history_offsets, weighting, scale)
    else:
        dq, dk, dv = history_backward(grad, q, k, v, out, lse, candidate_offsets, history_offsets, weighting, scale)
    if own_k is not None and own_v is not None:
        scores = _own_scores(q, own_k, scale, lse.dtype)
        exact_grad = grad.to(scores.dtype)
        dweights = torch.einsum("cnhd,cmhd->cnhm", exact_grad, own_v.to(scores.dtype))
        if weighting == "silu":
            weights = torch.nn.functional.silu(scores)
            dscores = torch.ops.aten.silu_backward(dweights, scores)
        else:
            weights = (scores - lse.unsqueeze(-1)).exp()
            dscores = weights * (dweights - (exact_grad * out).sum(-1, keepdim=True))
        dscores *= scale
        dq = dq + _weigh(dscores, own_k.to(scores.dtype))
        down_k.copy_(torch.einsum("cnhm,cnhd->cmhd", dscores, q.to(scores.dtype)))
        down_v.copy_(torch.einsum("cnhm,cnhd->cmhd", weights, exact_grad))
    return dq.to(q.dtype), dk, dv, down_k, down_v


@_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor | None, own_v: Tensor | None, out: Tensor,
      lse: Tensor, candidate_offsets: Tensor, history_offsets: Tensor, weighting: str,
      scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    own = own_k.shape if own_k is not None else (0, *q.shape[1:])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), q.new_empty(own), q.new_empty(own)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, own_k, own_v, candidate_offsets, history_offsets, ctx.weighting, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, own_k, own_v, out, lse, candidate_offsets, history_offsets)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    q, k, v, own_k, own_v, *rest = ctx.saved_tensors
    dq, dk, dv, down_k, down_v = _attention_backward(grad, q, k, v, own_k, own_v, *rest, ctx.weighting, ctx.scale)
    own = (None, None) if own_k is None else (down_k, down_v)
    return dq, dk, dv, *own, None, None, None, None


_attention.register_autograd(_backward, setup_context=_save)
