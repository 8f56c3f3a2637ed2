"""``candidate + request[owner]`` and its backward, the sum over each request's candidates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from semel.sharing.kernels import paths
from semel.sharing.kernels.offsets import owners, require_alike, require_offsets, require_offsets_shape


def gather_add(candidate: Tensor, request: Tensor, offsets: Tensor) -> Tensor:
    """``candidate`` [C, ...], ``request`` [R, ...], ``offsets`` [R + 1] -> [C, ...]: ``candidate[c] + request[r(c)]``.

    The request's term is read in place: [C, ...] of it is never written. Raises ValueError for offsets that do not
    cover C and for shapes, types or devices that differ.
    """
    return _gather_add(candidate, request, offsets)


def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """``x`` [C, ...], ``offsets`` [R + 1] -> [R, ...]: the sum of each request's rows, zeros where it has none.

    float16 and bfloat16 are summed in float32; on a CPU and by Triton always in the same order. Raises ValueError for
    offsets that do not cover C.
    """
    return _segment_sum(x, offsets)


def _check(candidate: Tensor, request: Tensor) -> None:
    require_alike("gather_add", candidate=candidate, request=request)
    if candidate.dim() < 1 or candidate.dim() != request.dim() or candidate.shape[1:] != request.shape[1:]:
        raise ValueError(f"gather_add: candidate has shape {list(candidate.shape)} and request {list(request.shape)}; "
                         "all axes but the first must be equal")


@torch.library.custom_op("semel::gather_add", mutates_args=())
def _gather_add(candidate: Tensor, request: Tensor, offsets: Tensor) -> Tensor:
    _check(candidate, request)
    require_offsets("gather_add", "offsets", offsets, len(request), candidate, "candidate")
    if candidate.numel() == 0:
        return torch.empty_like(candidate, memory_format=torch.contiguous_format)
    candidate, request = candidate.contiguous(), request.contiguous()
    if paths.uses_triton(candidate):
        from semel.sharing.kernels.triton_gather import gather_add as on_device

        return on_device(candidate, request, owners(offsets, len(candidate)))
    if len(request) == 1:
        return candidate + request
    # Adding into the gathered rows passes over memory once less than adding two tensors into a third.
    return request.index_select(0, owners(offsets, len(candidate))).add_(candidate)


@_gather_add.register_fake
def _(candidate: Tensor, request: Tensor, offsets: Tensor) -> Tensor:
    _check(candidate, request)
    require_offsets_shape("gather_add", "offsets", offsets, request.shape[0])
    return torch.empty_like(candidate, memory_format=torch.contiguous_format)


def _save_offsets(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[-1])
    ctx.rows = inputs[0].shape[0]


def _gather_add_backward(ctx: Any, grad: Tensor) -> Any:
    (offsets,) = ctx.saved_tensors
    down = _segment_sum(grad, offsets) if ctx.needs_input_grad[1] else None
    return grad if ctx.needs_input_grad[0] else None, down, None


_gather_add.register_autograd(_gather_add_backward, setup_context=_save_offsets)


@torch.library.custom_op("semel::segment_sum", mutates_args=())
def _segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    require_alike("segment_sum", x=x)
    requests = len(offsets) - 1
    require_offsets("segment_sum", "offsets", offsets, requests, x, "x")
    return sum_segments(x, offsets)


@_segment_sum.register_fake
def _(x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, *x.shape[1:])


def sum_segments(x: Tensor, offsets: Tensor) -> Tensor:
    """``segment_sum`` of offsets that were checked, for use within operators."""
    requests = len(offsets) - 1
    if x.numel() == 0 or requests == 0:
        return x.new_zeros(requests, *x.shape[1:])
    x = x.contiguous()
    if paths.uses_triton(x):
        from semel.sharing.kernels.triton_gather import segment_sum as on_device

        return on_device(x, offsets)
    if requests == 1:
        return x.sum(0, keepdim=True)
    exact = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    total = exact.new_zeros(requests, *x.shape[1:])
    return total.index_add_(0, owners(offsets, len(x)), exact).to(x.dtype)


@torch.library.custom_op("semel::spread", mutates_args=())
def _spread(request: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """The backward of a sum: each candidate gets its request's row."""
    return request.index_select(0, owners(offsets, rows))


@_spread.register_fake
def _(request: Tensor, offsets: Tensor, rows: int) -> Tensor:
    return request.new_empty(rows, *request.shape[1:])


def _segment_sum_backward(ctx: Any, grad: Tensor) -> Any:
    return _spread(grad, ctx.saved_tensors[0], ctx.rows), None


_segment_sum.register_autograd(_segment_sum_backward, setup_context=_save_offsets)
