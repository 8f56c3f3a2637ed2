"""How a shared form runs: its programs, one stage after another, and the checks of what a call brings.

``SharedModel`` runs programs that it made from a model, ``load`` gives some that were saved; both take the same calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from semel.batch import RequestBatch
from semel.sharing.emission import Stage
from semel.sharing.errors import SharingError
from semel.sharing.inputs import Signature, covers, flattened
from semel.sharing.lowering import OWNER, SLOT, TABLE

PARAMETER = "parameter:"
ORIGINAL, SHARED, EACH = "original", "shared", "each"
"""Ways of computing: the unmodified model, the shared form for all requests at once, or for one request at a time."""
_LONG = 64
"""Candidates a request from which one request at a time is taken where nothing was timed: a table would be padded."""


@dataclass(frozen=True, eq=False)
class RequestState:
    """The request side of some requests, computed: tensors by name, their first axis ``requests``; and the inputs.
    ``constants``: what depends on parameters only, the same for all. ``form``: what computed it and can score it."""

    tensors: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    requests: int
    constants: Mapping[str, Tensor] = field(repr=False)
    form: Form = field(repr=False)

    def only(self, request: int) -> RequestState:
        """The state of one of the requests, as views."""
        rows = slice(request, request + 1)
        return replace(self, tensors={name: tensor[rows] for name, tensor in self.tensors.items()},
                       inputs={name: tensor[rows] for name, tensor in self.inputs.items()}, requests=1)

    @property
    def nbytes(self) -> int:
        """What it holds of its own."""
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *self.inputs.values()))


@dataclass(frozen=True)
class Output:
    """A tensor that the model returns: its sizes, ``None`` along the batch."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]

    def empty(self, device: Any) -> Tensor:
        return torch.empty([0 if size is None else size for size in self.shape], dtype=self.dtype, device=device)


class Form:
    """One graph in its stages, for one request and for any number: ``programs[single][stage]``.

    ``outputs``: what the model returns, as ``Output`` or as a constant; ``out_spec``: their tree.
    """

    programs: Mapping[bool, Mapping[Stage, Any]]
    outputs: Sequence[Any]
    out_spec: Any
    runs_empty = True
    """Whether programs run without a row; saved and compiled ones need not."""

    def constants(self, tensors: Any) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def run(self, stage: Stage, single: bool, given: Mapping[str, Tensor], tensors: Any) -> dict[str, Tensor]:
        """``given``: inputs by name; ``tensors``: a parameter by its name."""
        program = self.programs[single][stage]
        if not program.outputs:
            return {}
        inputs = [tensors(name.removeprefix(PARAMETER)) if name.startswith(PARAMETER) else given[name]
                  for name in program.inputs]
        return dict(zip(program.outputs, program.module.forward(*inputs), strict=True))

    def result(self, outputs: Mapping[str, Any]) -> Any:
        """What the model returns, from the tensors ``output:i``."""
        return pytree.tree_unflatten([outputs.get(f"output:{i}", o) for i, o in enumerate(self.outputs)], self.out_spec)

    def empty(self, device: Any) -> Any:
        """The result for no candidate."""
        tensors = {f"output:{i}": o.empty(device) for i, o in enumerate(self.outputs) if isinstance(o, Output)}
        return self.result(tensors)


class Scoring:
    """The calls of a shared form, over ``signature``, ``_form()`` and ``_tensor(name)``."""

    signature: Signature

    def _form(self) -> Form:
        raise NotImplementedError

    def _tensor(self, name: str) -> Tensor:
        raise NotImplementedError

    def forward(self, request_inputs: Mapping[str, Any] | RequestBatch,
                candidate_inputs: Mapping[str, Any] | None = None, candidate_offsets: Any = None) -> Any:
        """[C, ...], as the model gives it. A ``RequestBatch`` brings all three; what the model does not take of it is
        left aside. Raises SharingError for inputs or offsets that do not fit."""
        if isinstance(request_inputs, RequestBatch):
            if candidate_inputs is not None or candidate_offsets is not None:
                raise SharingError("a RequestBatch brings its candidates and offsets; pass it alone")
            batch = request_inputs
            request_inputs = taken(batch.request, self.signature.names(Stage.REQUEST))
            candidate_inputs = taken(batch.candidate, self.signature.names(Stage.CANDIDATE))
            candidate_offsets = batch.candidate_offsets
        if candidate_inputs is None:
            raise SharingError("candidate_inputs are missing; pass (request_inputs, candidate_inputs, "
                               "candidate_offsets)")
        at_once = None if torch.compiler.is_compiling() else \
            self.signature.of_one_request(request_inputs, candidate_inputs, candidate_offsets)
        if at_once is not None:
            return self._one_request(*at_once)
        request, requests = self.signature.collect(request_inputs, Stage.REQUEST)
        candidate, count = self.signature.collect(candidate_inputs, Stage.CANDIDATE)
        offsets = check_offsets(candidate_offsets, requests, count)
        way = self.way(requests, count, "call")
        if way == ORIGINAL:
            return self._broadcast(request, candidate, offsets)
        return self._score(self._request(request, requests), candidate, offsets, way)

    def _one_request(self, tensors: list[Tensor], count: int) -> Any:
        """A call whose inputs are known to be right; ``tensors``: the request's, then its candidates'."""
        way = self.way(1, count, "call")
        if way == ORIGINAL:
            return self._unmodified(*self.signature.arguments(tensors, count))
        request, candidate = self.signature.apart(tensors)
        return self._score(self._request(request, 1), candidate, _whole(count), way)

    def request(self, request_inputs: Mapping[str, Any]) -> RequestState:
        """The request side, to be kept and scored against candidates as often as wanted."""
        return self._request(*self.signature.collect(request_inputs, Stage.REQUEST))

    def score(self, state: RequestState, candidate_inputs: Mapping[str, Any], candidate_offsets: Any = None) -> Any:
        """[C, ...] of candidates against requests whose state is known. Without offsets: all are of the one request."""
        candidate, count = self.signature.collect(candidate_inputs, Stage.CANDIDATE)
        offsets = check_offsets(candidate_offsets, state.requests, count)
        if state.form is not self._form():
            raise SharingError("this request state was computed by another model, or before train(), eval() or a "
                               "change of dtype; call request() again")
        way = self.way(state.requests, count, "score")
        if way == ORIGINAL:
            return self._broadcast(state.inputs, candidate, offsets)
        return self._score(state, candidate, offsets, way)

    def way(self, requests: int, candidates: int, what: str) -> str:
        """How a call is computed: ``shared``, ``each`` or ``original``. ``what``: ``call``, or ``score`` of a state."""
        return EACH if requests > 1 and candidates >= _LONG * requests else SHARED

    def _broadcast(self, request: Mapping[str, Tensor], candidate: Mapping[str, Tensor], offsets: Tensor) -> Any:
        raise NotImplementedError("a saved form does not have the original")

    def _unmodified(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError("a saved form does not have the original")

    def _request(self, inputs: Mapping[str, Tensor], count: int) -> RequestState:
        form = self._form()
        if not count and not form.runs_empty:
            return RequestState({}, inputs, 0, {}, form)
        given = self.signature.placed(inputs, Stage.REQUEST)
        device = next(iter(inputs.values())).device
        given[TABLE] = torch.empty(count, 1, dtype=torch.bool, device=device)
        constants = form.constants(self._tensor)
        tensors = form.run(Stage.REQUEST, count == 1, {**constants, **given}, self._tensor)
        return RequestState(tensors, inputs, count, constants, form)

    def _score(self, state: RequestState, candidate: Mapping[str, Tensor], offsets: Tensor, way: str) -> Any:
        if way == EACH:
            return self._each(state, candidate, offsets)
        form = self._form()
        device = next(iter(candidate.values())).device
        if not int(offsets[-1]):
            return form.empty(device)  # what splits the batch into parts of its own size cannot run on none
        given = self.signature.placed(candidate, Stage.CANDIDATE)
        given.update(self.signature.placed(state.inputs, Stage.REQUEST))
        given.update(layout(offsets, device))
        given.update(state.constants)
        given.update(state.tensors)
        return form.result(form.run(Stage.CANDIDATE, state.requests == 1, given, self._tensor))

    def _each(self, state: RequestState, candidate: Mapping[str, Tensor], offsets: Tensor) -> Any:
        """Request by request: nothing is padded."""
        outputs = []
        for request, (start, stop) in enumerate(pairwise(offsets.tolist())):
            if stop > start:
                rows = {name: tensor[start:stop] for name, tensor in candidate.items()}
                outputs.append(self._score(state.only(request), rows, torch.tensor([0, stop - start]), SHARED))
        if not outputs:
            return self._score(state, candidate, offsets, SHARED)
        leaves, specs = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
        joined = [torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*leaves, strict=True)]
        return pytree.tree_unflatten(joined, specs[0])


def taken(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of ``values`` that a model takes, by path."""
    if type(values) is dict and all(map(values.__contains__, names)):
        return {name: values[name] for name in names}
    flat = flattened(values)
    wanted = set(names)
    missing = [name for name in names if name not in flat]
    if missing:
        raise SharingError(f"the batch lacks {', '.join(missing)}; it has {', '.join(flat) or 'nothing'} on that side")
    return {name: value for name, value in flat.items() if name in wanted}


def check_offsets(candidate_offsets: Any, requests: int, candidates: int) -> Tensor:
    """[R + 1] int64 on the host. SharingError where they do not cover the candidates in order."""
    if candidate_offsets is None:
        if requests != 1:
            raise SharingError(f"{requests} requests need candidate_offsets [{requests + 1}]")
        return _whole(candidates)
    if requests == 1 and covers(candidate_offsets, candidates):  # the common case, in microseconds
        return _whole(candidates)
    try:
        offsets = torch.as_tensor(candidate_offsets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SharingError(f"candidate_offsets must be a vector of integers, got {candidate_offsets!r}") from error
    if offsets.dtype.is_floating_point or offsets.dtype == torch.bool or offsets.dim() != 1:
        raise SharingError(f"candidate_offsets must be a vector of integers, got {offsets.dtype} {list(offsets.shape)}")
    offsets = offsets.cpu().to(torch.int64)
    if len(offsets) != requests + 1:
        raise SharingError(f"candidate_offsets has {len(offsets)} numbers; {requests} requests need {requests + 1}")
    if int(offsets[0]) != 0 or int(offsets[-1]) != candidates:
        raise SharingError(f"candidate_offsets run from {int(offsets[0])} to {int(offsets[-1])}; they must cover the "
                           f"{candidates} candidates from 0")
    if bool((offsets[1:] < offsets[:-1]).any()):
        raise SharingError(f"candidate_offsets must not fall: {offsets.tolist()}")
    return offsets


@lru_cache(maxsize=1024)
def _whole(candidates: int) -> Tensor:
    """Offsets of one request's candidates; whoever gets them only reads them."""
    return torch.tensor([0, candidates])


def layout(offsets: Tensor, device: Any) -> dict[str, Tensor]:
    """Whose each candidate is [C], its place in a table [R, slots], and such a table (of no content)."""
    candidates = int(offsets[-1])
    if len(offsets) == 2:
        return {OWNER: torch.zeros(candidates, dtype=torch.int64, device=device),
                SLOT: torch.arange(candidates, device=device),
                TABLE: torch.empty(1, candidates, dtype=torch.bool, device=device)}
    lengths = offsets[1:] - offsets[:-1]
    requests = len(lengths)
    owner = torch.repeat_interleave(torch.arange(requests), lengths, output_size=candidates)
    slots = int(lengths.max()) if requests else 0
    slot = torch.arange(candidates) - offsets[:-1].index_select(0, owner) + owner * slots
    table = torch.empty(requests, slots, dtype=torch.bool, device=device)
    return {OWNER: owner.to(device), SLOT: slot.to(device), TABLE: table}
