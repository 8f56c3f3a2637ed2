"""Linear compression of fields (LCE): a linear map over the fields of a request and a candidate together.

Wukong's linear compression block (arXiv 2403.02545, section 3.4) and every field-wise linear layer; the split into two
products with the broadcast in the epilogue of the second is the in-kernel broadcast of ROCS (arXiv 2607.27744).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from semel.sharing.kernels import paths
from semel.sharing.kernels.gather_add import sum_segments
from semel.sharing.kernels.offsets import owners, require_alike, require_offsets, require_offsets_shape

CHUNK = 256
"""Candidates whose weight gradients are held at once, [CHUNK, M, K]."""


def linear_compression(w_candidate: Tensor, w_request: Tensor, e_candidate: Tensor, e_request: Tensor,
                       offsets: Tensor) -> Tensor:
    """``w_candidate`` [M, Kc], ``w_request`` [M, Kr], ``e_candidate`` [C, Kc, D], ``e_request`` [R, Kr, D],
    ``offsets`` [R + 1] -> [C, M, D]: ``w_candidate @ e_candidate[c] + w_request @ e_request[r(c)]``.

    That is ``[w_request, w_candidate] @ [e_request; e_candidate]`` of every candidate, with the request's half once a
    request. Raises ValueError for offsets that do not cover C and for shapes, types or devices that do not fit.
    """
    return _linear_compression(w_candidate, w_request, e_candidate, e_request, offsets)


def _check(w_candidate: Tensor, w_request: Tensor, e_candidate: Tensor, e_request: Tensor) -> None:
    name = "linear_compression"
    require_alike(name, w_candidate=w_candidate, w_request=w_request, e_candidate=e_candidate, e_request=e_request)
    for side, w, e in (("candidate", w_candidate, e_candidate), ("request", w_request, e_request)):
        if w.dim() != 2 or e.dim() != 3:
            raise ValueError(f"{name}: w_{side} has shape {list(w.shape)} and e_{side} {list(e.shape)}; "
                             "give [M, K] and [rows, K, D]")
        if w.shape[1] != e.shape[1]:
            raise ValueError(f"{name}: w_{side} takes {w.shape[1]} fields but e_{side} has {e.shape[1]}; "
                             "the second axes must be equal")
    if w_candidate.shape[0] != w_request.shape[0]:
        raise ValueError(f"{name}: w_candidate makes {w_candidate.shape[0]} fields and w_request {w_request.shape[0]}; "
                         "the first axes must be equal")
    if e_candidate.shape[2] != e_request.shape[2]:
        raise ValueError(f"{name}: e_candidate is {e_candidate.shape[2]} wide and e_request {e_request.shape[2]}; "
                         "the last axes must be equal")


@torch.library.custom_op("semel::linear_compression", mutates_args=())
def _linear_compression(w_candidate: Tensor, w_request: Tensor, e_candidate: Tensor, e_request: Tensor,
                        offsets: Tensor) -> Tensor:
    _check(w_candidate, w_request, e_candidate, e_request)
    candidates = len(e_candidate)
    require_offsets("linear_compression", "offsets", offsets, len(e_request), e_candidate, "e_candidate")
    if candidates == 0 or e_candidate.shape[2] == 0 or len(w_candidate) == 0:
        return e_candidate.new_empty(candidates, len(w_candidate), e_candidate.shape[2])
    if paths.uses_triton(e_candidate):
        from semel.sharing.kernels.triton_linear import linear_compression as on_device

        return on_device(w_candidate, w_request, e_candidate, e_request, owners(offsets, candidates))
    # The product accumulates into the gathered request part, so that no third [C, M, D] is written and added.
    out = torch.matmul(w_request, e_request).index_select(0, owners(offsets, candidates))
    return out.baddbmm_(w_candidate.expand(candidates, -1, -1), e_candidate)


@_linear_compression.register_fake
def _(w_candidate: Tensor, w_request: Tensor, e_candidate: Tensor, e_request: Tensor, offsets: Tensor) -> Tensor:
    _check(w_candidate, w_request, e_candidate, e_request)
    require_offsets_shape("linear_compression", "offsets", offsets, e_request.shape[0])
    return e_candidate.new_empty(e_candidate.shape[0], w_candidate.shape[0], e_candidate.shape[2])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Any:
    return *_linear_compression_backward(grad, *ctx.saved_tensors), None


_linear_compression.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("semel::linear_compression_backward", mutates_args=())
def _linear_compression_backward(grad: Tensor, w_candidate: Tensor, w_request: Tensor, e_candidate: Tensor,
                                 e_request: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad = grad.contiguous()
    down = sum_segments(grad, offsets)  # [R, M, D]: the rest of the request side runs once a request
    return (_weight_grad(grad, e_candidate), _weight_grad(down, e_request),
            torch.matmul(w_candidate.t(), grad), torch.matmul(w_request.t(), down))


@_linear_compression_backward.register_fake
def _(grad: Tensor, w_candidate: Tensor, w_request: Tensor, e_candidate: Tensor, e_request: Tensor,
      offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = [x.new_empty(x.shape) for x in (w_candidate, w_request, e_candidate, e_request)]
    return tensors[0], tensors[1], tensors[2], tensors[3]


def _weight_grad(grad: Tensor, e: Tensor) -> Tensor:
    """``grad`` [B, M, D], ``e`` [B, K, D] -> [M, K]: ``sum_b grad[b] @ e[b].T``, without [B, M, K]."""
    if grad.numel() == 0 or e.numel() == 0:
        return grad.new_zeros(grad.shape[1], e.shape[1])
    if paths.uses_triton(grad):
        from semel.sharing.kernels.triton_linear import weight_grad as on_device

        return on_device(grad, e)
    exact = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
    parts = [torch.bmm(part, fields.transpose(1, 2)).sum(0, dtype=exact)
             for part, fields in zip(grad.split(CHUNK), e.split(CHUNK), strict=True)]
    return (parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)).to(grad.dtype)
