"""``share``: an existing model, rewritten so that what belongs to the request is computed once per request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from semel.batch import RequestBatch
from semel.sharing.emission import Stage
from semel.sharing.errors import SharingError
from semel.sharing.export import ModelGraph, export
from semel.sharing.inputs import Signature, signature_of
from semel.sharing.interpret import Rewriter, interpret
from semel.sharing.lowering import OWNER, SLOT, TABLE, Program, lower


@dataclass(frozen=True, eq=False)
class RequestState:
    """The request side of some requests, computed: tensors by name, their first axis ``requests``."""

    tensors: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    requests: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class _Bank(nn.Module):
    """Parameters under their dotted names, as ``state_dict`` has them."""


class SharedModel(nn.Module):
    """The shared form of a model, over the same parameters (same names in ``state_dict``).

    ``shared(request_inputs, candidate_inputs, candidate_offsets)`` takes dicts by the names of ``forward``'s inputs, with
    R rows on the request side and C on the candidate side, and gives the model's output for the C candidates;
    ``candidate_offsets`` [R + 1] says which candidates are whose. ``request`` and ``score`` are its two halves.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], signature: Signature) -> None:
        super().__init__()
        self._original = [model]  # in a list, so that its parameters are not there twice
        self.signature = signature
        for name, parameter in model.named_parameters(remove_duplicate=False):
            _place(self, name, parameter, False)
        persistent = set(model.state_dict(keep_vars=True))
        for name, buffer in model.named_buffers(remove_duplicate=False):
            _place(self, name, buffer, name in persistent)
        self._example = (args, dict(kwargs))
        self._forms: dict[bool, _Form] = {}
        self.training = model.training
        self._form()

    @property
    def original(self) -> nn.Module:
        return self._original[0]

    def train(self, mode: bool = True) -> SharedModel:
        """Train and eval are two graphs over the same parameters."""
        self.training = mode
        self.original.train(mode)
        for child in self.children():
            child.train(mode)
        return self

    def _form(self) -> _Form:
        if self.training not in self._forms:
            self.original.train(self.training)
            args, kwargs = self._example
            self._forms[self.training] = _Form(export(self.original, args, kwargs), self.signature, self._tensor)
        return self._forms[self.training]

    def _tensor(self, name: str) -> Tensor:
        module: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            module = module._modules[part]  # type: ignore[assignment]
        found = module._parameters.get(last)
        return module._buffers[last] if found is None else found  # type: ignore[return-value]

    def forward(self, request_inputs: Mapping[str, Any] | RequestBatch, candidate_inputs: Mapping[str, Any] | None = None,
                candidate_offsets: Any = None) -> Any:
        """[C, ...], as the model gives it. Raises SharingError for inputs or offsets that do not fit."""
        if isinstance(request_inputs, RequestBatch):
            batch = request_inputs
            return self(batch.request, batch.candidate, batch.candidate_offsets)
        if candidate_inputs is None:
            raise SharingError("candidate_inputs are missing; pass (request_inputs, candidate_inputs, candidate_offsets)")
        return self.score(self.request(request_inputs), candidate_inputs, candidate_offsets)

    def request(self, request_inputs: Mapping[str, Any]) -> RequestState:
        """The request side, to be kept and scored against candidates as often as wanted."""
        inputs, count = self.signature.collect(request_inputs, Stage.REQUEST)
        form = self._form()
        given = {f"{Stage.REQUEST}:{name}": tensor for name, tensor in inputs.items()}
        device = next(iter(inputs.values())).device
        given[TABLE] = torch.empty(count, 1, dtype=torch.bool, device=device)
        tensors = form.constants(self._tensor) | {}
        request = form.run(Stage.REQUEST, count == 1, {**tensors, **given}, self._tensor)
        return RequestState({**tensors, **request}, inputs, count)

    def score(self, state: RequestState, candidate_inputs: Mapping[str, Any], candidate_offsets: Any = None) -> Any:
        """[C, ...] of candidates against requests whose state is known. Without offsets: all are of the one request."""
        inputs, count = self.signature.collect(candidate_inputs, Stage.CANDIDATE)
        offsets = check_offsets(candidate_offsets, state.requests, count)
        device = next(iter(inputs.values())).device
        given = {f"{Stage.CANDIDATE}:{name}": tensor for name, tensor in inputs.items()}
        given.update({f"{Stage.REQUEST}:{name}": tensor for name, tensor in state.inputs.items()})
        given.update(layout(offsets, device))
        form = self._form()
        outputs = form.run(Stage.CANDIDATE, state.requests == 1, {**state.tensors, **given}, self._tensor)
        return form.result(list(outputs.values()), self._tensor)

    def broadcast(self, request_inputs: Mapping[str, Any], candidate_inputs: Mapping[str, Any],
                  candidate_offsets: Any = None) -> Any:
        """The unmodified model, its request inputs repeated for every candidate."""
        request, requests = self.signature.collect(request_inputs, Stage.REQUEST)
        candidate, count = self.signature.collect(candidate_inputs, Stage.CANDIDATE)
        offsets = check_offsets(candidate_offsets, requests, count)
        args, kwargs = self.signature.call(self.repeated(request, candidate, offsets))
        return self.original(*args, **kwargs)

    def repeated(self, request: Mapping[str, Tensor], candidate: Mapping[str, Tensor], offsets: Tensor) -> list[Tensor]:
        """The model's inputs in order, one row a candidate."""
        device = next(iter(candidate.values())).device
        owner = layout(offsets, device)[OWNER]
        tensors = []
        for item in self.signature.inputs:
            if item.columns is None and item.stage == Stage.CANDIDATE:
                tensors.append(candidate[item.name])
                continue
            mine = request[item.name].index_select(0, owner)
            if item.columns is not None:
                theirs = candidate[item.name]
                order = torch.from_numpy(_inverse(item.columns, item.others)).to(device)
                mine = torch.cat([mine, theirs], 1).index_select(1, order)
            tensors.append(mine)
        return tensors


def _inverse(first: Any, second: Any) -> Any:
    import numpy as np

    return np.argsort(np.concatenate([first, second]), kind="stable")


def _place(root: nn.Module, name: str, tensor: Tensor, persistent: bool) -> None:
    module = root
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module._modules[part] = _Bank()  # not add_module, which refuses names that this class has for itself
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module._parameters[last] = tensor
    else:
        module._buffers[last] = tensor
        if not persistent:
            module._non_persistent_buffers_set.add(last)


def check_offsets(candidate_offsets: Any, requests: int, candidates: int) -> Tensor:
    """[R + 1] int64 on the host. SharingError where they do not cover the candidates in order."""
    if candidate_offsets is None:
        if requests != 1:
            raise SharingError(f"{requests} requests need candidate_offsets [{requests + 1}]")
        return torch.tensor([0, candidates])
    offsets = torch.as_tensor(candidate_offsets)
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


def layout(offsets: Tensor, device: Any) -> dict[str, Tensor]:
    """Whose each candidate is [C], its place in a table [R, slots], and such a table (of no content)."""
    lengths = offsets[1:] - offsets[:-1]
    requests, candidates = len(lengths), int(offsets[-1])
    owner = torch.repeat_interleave(torch.arange(requests), lengths, output_size=candidates)
    slots = int(lengths.max()) if requests else 0
    slot = torch.arange(candidates) - offsets[:-1].index_select(0, owner) + owner * slots
    table = torch.empty(requests, slots, dtype=torch.bool, device=device)
    return {OWNER: owner.to(device), SLOT: slot.to(device), TABLE: table}


class _Form:
    """One graph (train or eval) in its stages, for one request and for many."""

    def __init__(self, model: ModelGraph, signature: Signature, tensors: Any) -> None:
        self.model = model
        self.rewriter, self.outputs = interpret(model, signature, tensors)
        self.programs = {single: lower(self.rewriter.emit, self.outputs, single) for single in (True, False)}
        self._constants: tuple[Any, dict[str, Tensor]] | None = None

    def constants(self, tensors: Any) -> dict[str, Tensor]:
        """What depends on parameters only; kept while none of them changes and no gradient is asked for."""
        program = self.programs[True][Stage.CONSTANT]
        if not program.outputs:
            return {}
        names = [name.removeprefix("parameter:") for name in program.inputs if name.startswith("parameter:")]
        used = [tensors(name) for name in names]
        version = tuple((id(t), t._version, t.data_ptr()) for t in used)
        if torch.is_grad_enabled() and any(t.requires_grad for t in used):
            return self.run(Stage.CONSTANT, True, {}, tensors)
        if self._constants is None or self._constants[0] != version:
            self._constants = version, self.run(Stage.CONSTANT, True, {}, tensors)
        return self._constants[1]

    def run(self, stage: Stage, single: bool, given: Mapping[str, Tensor], tensors: Any) -> dict[str, Tensor]:
        program: Program = self.programs[single][stage]
        inputs = [tensors(name.removeprefix("parameter:")) if name.startswith("parameter:") else given[name]
                  for name in program.inputs]
        return dict(zip(program.outputs, program.module.forward(*inputs), strict=True))

    def result(self, outputs: Sequence[Any], tensors: Any) -> Any:
        return pytree.tree_unflatten(list(outputs), self.model.out_spec)


def share(model: nn.Module, example_inputs: Any, request_inputs: Iterable[str] | Mapping[str, Any],
          candidates_hint: int = 512, mode: str = "exact", example_kwargs: Mapping[str, Any] | None = None) -> SharedModel:
    """``model`` with its request side computed once per request: the same outputs and gradients.

    ``model`` takes tensors that all have one row a candidate; ``example_inputs``: a tuple of them (or a dict of keyword
    arguments), at least two rows. ``request_inputs``: names of those that are the same for all candidates of a request,
    or name -> columns. ``candidates_hint``: how many candidates a request is expected to have. Raises SharingError.
    """
    if mode != "exact":
        raise SharingError(f"mode {mode!r} is none of exact; for a model that never mixes the sides see semel.isolate")
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(example_inputs)
    else:
        args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        kwargs = dict(example_kwargs or {})
    signature = signature_of(model, args, kwargs, request_inputs)
    return SharedModel(model, args, kwargs, signature)


__all__ = ["RequestState", "Rewriter", "SharedModel", "share"]
