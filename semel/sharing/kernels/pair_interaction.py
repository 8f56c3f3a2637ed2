"""Dot products of all pairs of fields (FM, DLRM's interaction), the pairs within a request once a request."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semel.sharing.kernels import paths
from semel.sharing.kernels.offsets import owners, require_alike, require_offsets, require_offsets_shape

SMALL = 8
"""Below so many rows a request (candidates times their fields) a loop over requests costs more than gathering them."""


class Pairs(NamedTuple):
    """``request`` [R, Fr (Fr - 1) / 2], ``cross`` [C, Fc, Fr], ``candidate`` [C, Fc (Fc - 1) / 2]: the pairs within a
    request, between a candidate's and its request's fields, and within a candidate. Pairs i < j of one side lie in the
    order of ``torch.triu_indices(F, F, 1)``."""

    request: Tensor
    cross: Tensor
    candidate: Tensor


def pair_interaction(request: Tensor, candidate: Tensor, offsets: Tensor) -> Pairs:
    """``request`` [R, Fr, K], ``candidate`` [C, Fc, K], ``offsets`` [R + 1] -> ``Pairs``.

    Together they are the F (F - 1) / 2 pairs of the F = Fr + Fc fields of every candidate; ``pair_columns`` says which
    lies where, so that a linear layer over them can be split by columns. Raises ValueError for offsets that do not
    cover C and for shapes, types or devices that do not fit.
    """
    cross = _cross_pairs(request, candidate, offsets)
    return Pairs(_within(request), cross, _within(candidate))


def pair_columns(request_fields: int, candidate_fields: int) -> Pairs:
    """Where each of the ``Pairs`` lies among the pairs i < j of all fields, the request's first, in the order of
    ``torch.triu_indices(F, F, 1)``: int64 of shapes [Fr (Fr - 1) / 2], [Fc, Fr], [Fc (Fc - 1) / 2]."""
    fields = request_fields + candidate_fields
    place = torch.zeros(fields, fields, dtype=torch.int64)
    i, j = torch.triu_indices(fields, fields, 1)
    place[i, j] = torch.arange(len(i))
    ri, rj = torch.triu_indices(request_fields, request_fields, 1)
    ci, cj = torch.triu_indices(candidate_fields, candidate_fields, 1) + request_fields
    return Pairs(place[ri, rj], place[:request_fields, request_fields:].t().contiguous(), place[ci, cj])


def _within(x: Tensor) -> Tensor:
    """[B, F, K] -> [B, F (F - 1) / 2]. One batched product and one gather of columns, on any device."""
    fields = x.shape[1]
    i, j = torch.triu_indices(fields, fields, 1, device=x.device)
    return torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, i * fields + j)


def _check(request: Tensor, candidate: Tensor) -> None:
    require_alike("pair_interaction", request=request, candidate=candidate)
    if request.dim() != 3 or candidate.dim() != 3 or request.shape[2] != candidate.shape[2]:
        raise ValueError(f"pair_interaction: request has shape {list(request.shape)} and candidate "
                         f"{list(candidate.shape)}; give [R, Fr, K] and [C, Fc, K] with the same K")


def _loops(candidate: Tensor, requests: int) -> bool:
    return candidate.device.type == "cpu" and len(candidate) * candidate.shape[1] >= SMALL * requests


@torch.library.custom_op("semel::cross_pairs", mutates_args=())
def _cross_pairs(request: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    """``candidate[c] @ request[r(c)].T``: [C, Fc, Fr]."""
    _check(request, candidate)
    require_offsets("pair_interaction", "offsets", offsets, len(request), candidate, "candidate")
    request, candidate = request.contiguous(), candidate.contiguous()
    candidates, own, depth = candidate.shape
    out = candidate.new_empty(candidates, own, request.shape[1])
    if out.numel() == 0:
        return out
    if paths.uses_triton(candidate):
        from semel.sharing.kernels.triton_pairs import multiply

        return multiply(candidate, request.transpose(1, 2), offsets)
    if _loops(candidate, len(request)):  # all candidates of a request in one matrix product
        rows, result = candidate.view(-1, depth), out.view(-1, request.shape[1])
        for r, start, stop in _spans(offsets, own):
            torch.mm(rows[start:stop], request[r].t(), out=result[start:stop])
        return out
    return torch.bmm(candidate, request.index_select(0, owners(offsets, candidates)).transpose(1, 2))


@_cross_pairs.register_fake
def _(request: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    _check(request, candidate)
    require_offsets_shape("pair_interaction", "offsets", offsets, request.shape[0])
    return candidate.new_empty(candidate.shape[0], candidate.shape[1], request.shape[1])


@torch.library.custom_op("semel::cross_pairs_backward", mutates_args=())
def _cross_pairs_backward(grad: Tensor, request: Tensor, candidate: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    grad, request, candidate = grad.contiguous(), request.contiguous(), candidate.contiguous()
    if grad.numel() == 0:
        return torch.zeros_like(request), torch.zeros_like(candidate)
    if paths.uses_triton(candidate):
        from semel.sharing.kernels.triton_pairs import multiply, multiply_sum

        return multiply_sum(grad, candidate, offsets), multiply(grad, request, offsets)
    down, across = torch.zeros_like(request), torch.empty_like(candidate)
    if _loops(candidate, len(request)):
        rows, of_rows = candidate.view(-1, candidate.shape[2]), across.view(-1, candidate.shape[2])
        grads = grad.view(-1, request.shape[1])
        for r, start, stop in _spans(offsets, candidate.shape[1]):
            torch.mm(grads[start:stop].t(), rows[start:stop], out=down[r])
            torch.mm(grads[start:stop], request[r], out=of_rows[start:stop])
        return down, across
    owner = owners(offsets, len(candidate))
    down.index_add_(0, owner, torch.bmm(grad.transpose(1, 2), candidate))
    return down, torch.bmm(grad, request.index_select(0, owner))


@_cross_pairs_backward.register_fake
def _(grad: Tensor, request: Tensor, candidate: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    return request.new_empty(request.shape), candidate.new_empty(candidate.shape)


def _spans(offsets: Tensor, per: int) -> list[tuple[int, int, int]]:
    bounds = offsets.tolist()
    return [(r, start * per, stop * per) for r, (start, stop) in enumerate(pairwise(bounds)) if start < stop]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Any:
    return *_cross_pairs_backward(grad, *ctx.saved_tensors), None


_cross_pairs.register_autograd(_backward, setup_context=_save)
