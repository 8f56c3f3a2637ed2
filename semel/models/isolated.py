"""The parts of isolated models: request rows never see candidates, so their side is computed once per request.

Generalized layer masking with two groups (ROCS, arXiv 2607.27744, section 3.1): every block maps request units to
request units, and both to candidate units. Its weight is block lower triangular,

    y_r = W_rr x_r + b_r                  once per request
    y_c = (W_cr x_r + b_c) + W_cc x_c     the bracket once per request

Every block here has three ways in:

    y_r, shared = block.request(x_r)           [R, ...]: the next request units, and what candidates will read
    y_c = block.candidate(x_c, shared, owner)  [C, ...]; ``owner`` [C]: the request of each candidate
    y_r, y_c = block(x_r, x_c, owner)          both

``shared`` is a tensor or a list of them, first axis R: keep it, and any number of candidates can be scored later. A
chain of such blocks is such a block. ``semel.models.reference`` has each as a masked module run per candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from semel.models.dropout import Dropout


@dataclass(frozen=True)
class Sides:
    """How many units (or fields) there are on each side."""

    request: int
    candidate: int

    @property
    def total(self) -> int:
        return self.request + self.candidate

    def times(self, factor: int) -> Sides:
        return Sides(self.request * factor, self.candidate * factor)

    def plus(self, other: Sides) -> Sides:
        return Sides(self.request + other.request, self.candidate + other.candidate)

    def share(self, units: int, request_width: float = 1.0, candidate_width: float = 1.0, multiple: int = 1) -> Sides:
        """``units`` of a hidden layer in proportion to these, each side then widened; at least a ``multiple`` each."""
        by_request = units * self.request / self.total

        def rounded(units: float) -> int:
            return max(1, round(units / multiple)) * multiple

        return Sides(rounded(by_request * request_width), rounded((units - by_request) * candidate_width))


def owners(candidate_offsets: Tensor, candidates: int) -> Tensor:
    """[R + 1] offsets -> [C] int64: the request of each candidate. ValueError for offsets that do not cover C."""
    if candidate_offsets.device.type == "cpu" and int(candidate_offsets[-1]) != candidates:
        raise ValueError(f"candidate_offsets end at {int(candidate_offsets[-1])}, there are {candidates} candidates: "
                         f"they must cover all")
    lengths = candidate_offsets[1:] - candidate_offsets[:-1]
    rows = torch.arange(len(lengths), device=lengths.device)
    return torch.repeat_interleave(rows, lengths, output_size=candidates)


class IsolatedBlock(nn.Module):
    """``request`` and ``candidate`` as above; called, it gives both."""

    def request(self, x: Tensor) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def candidate(self, x: Tensor, shared: Any, owner: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, request: Tensor, candidate: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        own, shared = self.request(request)
        return own, self.candidate(candidate, shared, owner)


class IsolatedLinear(IsolatedBlock):
    """A block-lower-triangular linear layer over the last axis. ``outputs.request`` may be 0: the last layer of a model
    has candidate units only. Each row starts as in ``nn.Linear``, by the number of units that it reads."""

    def __init__(self, inputs: Sides, outputs: Sides, bias: bool = True) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        # One product gives the next request units and the request part of the candidate units.
        self.from_request = nn.Linear(inputs.request, outputs.total, bias)
        self.from_candidate = nn.Linear(inputs.candidate, outputs.candidate, bias=False)
        limit = inputs.total ** -0.5
        with torch.no_grad():
            for parameter in self.from_request.parameters():
                parameter[outputs.request :].uniform_(-limit, limit)
            self.from_candidate.weight.uniform_(-limit, limit)

    def request(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[R, ..., inputs.request] -> [R, ..., outputs.request] and [R, ..., outputs.candidate]."""
        own, shared = self.from_request(x).split([self.outputs.request, self.outputs.candidate], -1)
        return own, shared

    def candidate(self, x: Tensor, shared: Tensor, owner: Tensor) -> Tensor:
        """[C, ..., inputs.candidate] -> [C, ..., outputs.candidate]."""
        return self.from_candidate(x) + shared.index_select(0, owner)


class IsolatedMLP(IsolatedBlock):
    """Isolated linear layers with ReLU and dropout between them, the last one bare, as ``semel.models.heads.mlp``."""

    def __init__(self, widths: Sequence[Sides], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(IsolatedLinear(a, b) for a, b in pairwise(widths))
        self.dropout = Dropout(dropout)

    def request(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        kept = []
        for number, layer in enumerate(self.layers):
            x, shared = layer.request(x if not number else self._between(x))
            kept.append(shared)
        return x, kept

    def candidate(self, x: Tensor, shared: Sequence[Tensor], owner: Tensor) -> Tensor:
        for number, (layer, kept) in enumerate(zip(self.layers, shared, strict=True)):
            x = layer.candidate(x if not number else self._between(x), kept, owner)
        return x

    def _between(self, x: Tensor) -> Tensor:
        return self.dropout(torch.relu(x))


class IsolatedStack(IsolatedBlock):
    """Blocks one after the other."""

    def __init__(self, blocks: Iterable[IsolatedBlock]) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)

    def request(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        kept = []
        for block in self.blocks:
            x, shared = block.request(x)
            kept.append(shared)
        return x, kept

    def candidate(self, x: Tensor, shared: Sequence[Any], owner: Tensor) -> Tensor:
        for block, kept in zip(self.blocks, shared, strict=True):
            x = block.candidate(x, kept, owner)
        return x


class IsolatedNorm(nn.Module):
    """LayerNorm over the last axis with statistics of each side's own units: shared statistics would show candidates
    to the request."""

    def __init__(self, widths: Sides) -> None:
        super().__init__()
        self.request = nn.LayerNorm(widths.request)
        self.candidate = nn.LayerNorm(widths.candidate)

    def forward(self, request: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
        return self.request(request), self.candidate(candidate)


class IsolatedCompression(IsolatedBlock):
    """Linear compression of fields, ``Y = W X`` with X [fields, dim] and W block lower triangular (Wukong's LCB, arXiv
    2403.02545, section 3.4). ``semel.sharing.kernels`` has the same product as one kernel."""

    def __init__(self, inputs: Sides, outputs: Sides) -> None:
        super().__init__()
        self.linear = IsolatedLinear(inputs, outputs, bias=False)

    def request(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[R, inputs.request, dim] -> [R, outputs.request, dim] and [R, dim, outputs.candidate]."""
        own, shared = self.linear.request(x.transpose(1, 2))
        return own.transpose(1, 2), shared

    def candidate(self, x: Tensor, shared: Tensor, owner: Tensor) -> Tensor:
        return self.linear.candidate(x.transpose(1, 2), shared, owner).transpose(1, 2)


class IsolatedHead(IsolatedMLP):
    """Both sides' last units -> logits: hidden layers of both sides, then candidate units only."""

    def __init__(self, inputs: Sides, hidden: Sequence[Sides], tasks: int, dropout: float) -> None:
        super().__init__([inputs, *hidden, Sides(0, tasks)], dropout)
