"""``share``: an existing model, rewritten so that what belongs to the request is computed once per request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from semel.batch import RequestBatch
from semel.sharing.choice import SIZES, Choice, fastest, nearest, timed
from semel.sharing.emission import Stage
from semel.sharing.errors import SharingError
from semel.sharing.export import ModelGraph, export
from semel.sharing.inputs import Signature, signature_of
from semel.sharing.interpret import Rewriter, interpret
from semel.sharing.lowering import OWNER, SLOT, TABLE, Program, lower

if TYPE_CHECKING:
    from semel.sharing.explain import Explanation
    from semel.sharing.verify import Verification


ORIGINAL, SHARED, EACH = "original", "shared", "each"
_SEVERAL = 4


@dataclass(frozen=True, eq=False)
class RequestState:
    """The request side of some requests, computed. ``tensors`` by name: those in ``by_request`` have ``requests`` rows, the
    others depend on parameters only."""

    tensors: Mapping[str, Tensor]
    by_request: Collection[str]
    inputs: Mapping[str, Tensor]
    requests: int

    def only(self, request: int) -> RequestState:
        """The state of one of the requests, as views."""
        rows = slice(request, request + 1)
        tensors = {name: t[rows] if name in self.by_request else t for name, t in self.tensors.items()}
        return RequestState(tensors, self.by_request, {name: t[rows] for name, t in self.inputs.items()}, 1)

    @property
    def nbytes(self) -> int:
        return sum(self.tensors[name].nbytes for name in self.by_request)


class _Bank(nn.Module):
    """Parameters under their dotted names, as ``state_dict`` has them."""


class SharedModel(nn.Module):
    """The shared form of a model, over the same parameters (same names in ``state_dict``).

    ``shared(request_inputs, candidate_inputs, candidate_offsets)`` takes dicts by the names of ``forward``'s inputs, with
    R rows on the request side and C on the candidate side, and gives the model's output for the C candidates;
    ``candidate_offsets`` [R + 1] says which candidates are whose. ``request`` and ``score`` are its two halves.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], signature: Signature,
                 candidates: int) -> None:
        super().__init__()
        self.candidates = candidates
        self.choices: dict[tuple[str, bool], tuple[Choice, ...]] = {}
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
            self._forms[self.training] = _Form(export(self.original, args, kwargs), self.signature, self._tensor,
                                               self.candidates)
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
        request, requests = self.signature.collect(request_inputs, Stage.REQUEST)
        candidate, count = self.signature.collect(candidate_inputs, Stage.CANDIDATE)
        offsets = check_offsets(candidate_offsets, requests, count)
        way = self.way(requests, count, "call")
        if way == ORIGINAL:
            return self._original_way(request, candidate, offsets)
        return self._scored(self._request(request, requests), candidate, offsets, way)

    def request(self, request_inputs: Mapping[str, Any]) -> RequestState:
        """The request side, to be kept and scored against candidates as often as wanted."""
        inputs, count = self.signature.collect(request_inputs, Stage.REQUEST)
        return self._request(inputs, count)

    def score(self, state: RequestState, candidate_inputs: Mapping[str, Any], candidate_offsets: Any = None) -> Any:
        """[C, ...] of candidates against requests whose state is known. Without offsets: all are of the one request."""
        inputs, count = self.signature.collect(candidate_inputs, Stage.CANDIDATE)
        offsets = check_offsets(candidate_offsets, state.requests, count)
        way = self.way(state.requests, count, "score")
        if way == ORIGINAL:
            return self._original_way(state.inputs, inputs, offsets)
        return self._scored(state, inputs, offsets, way)

    def broadcast(self, request_inputs: Mapping[str, Any], candidate_inputs: Mapping[str, Any],
                  candidate_offsets: Any = None) -> Any:
        """The unmodified model, its request inputs repeated for every candidate."""
        request, requests = self.signature.collect(request_inputs, Stage.REQUEST)
        candidate, count = self.signature.collect(candidate_inputs, Stage.CANDIDATE)
        return self._original_way(request, candidate, check_offsets(candidate_offsets, requests, count))

    def way(self, requests: int, candidates: int, what: str) -> str:
        """How a call is computed: ``shared``, ``each`` (request by request) or ``original``. ``what``: call or score."""
        choices = () if self.training else self.choices.get((what, requests != 1), ())
        if not choices or not candidates:
            return SHARED
        return nearest(choices, candidates // max(requests, 1)).way

    def choose(self, sizes: Sequence[int]) -> None:
        """Times the ways on rows of the example inputs, for numbers of candidates a request, and keeps what was fastest."""
        self.choices = {}
        found: dict[tuple[str, bool], list[Choice]] = {}
        for many in (False, True):
            requests = _SEVERAL if many else 1
            for size in sorted(set(sizes)):
                if many and size * requests > 2 * max(sizes):
                    continue
                request, candidate = self._drawn(requests, requests * size)
                offsets = torch.arange(requests + 1) * size
                with torch.no_grad():
                    state = self._request(request, requests)
                ways: dict[str, Any] = {
                    ORIGINAL: lambda: self._original_way(request, candidate, offsets),  # noqa: B023 run before the next
                    SHARED: lambda: self._scored(self._request(request, requests), candidate, offsets, SHARED)}  # noqa: B023
                cached: dict[str, Any] = {
                    ORIGINAL: ways[ORIGINAL],
                    SHARED: lambda: self._scored(state, candidate, offsets, SHARED)}  # noqa: B023
                if many:
                    ways[EACH] = lambda: self._scored(self._request(request, requests), candidate, offsets, EACH)  # noqa: B023
                    cached[EACH] = lambda: self._scored(state, candidate, offsets, EACH)  # noqa: B023
                for what, alternatives in (("call", ways), ("score", cached)):
                    seconds = timed(alternatives)
                    found.setdefault((what, many), []).append(Choice(size, fastest(seconds, ORIGINAL), seconds))
        self.choices = {key: tuple(value) for key, value in found.items()}

    def _drawn(self, requests: int, candidates: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rows of the example inputs, again and again."""
        leaves = [leaf for leaf in pytree.tree_leaves(self._example) if isinstance(leaf, Tensor)]
        request, candidate = {}, {}
        for item, tensor in zip(self.signature.inputs, leaves, strict=True):
            def rows(count: int, tensor: Tensor = tensor) -> Tensor:
                return tensor.index_select(0, torch.arange(count, device=tensor.device) % len(tensor))

            if item.columns is not None:
                request[item.name] = rows(requests)[:, torch.from_numpy(item.columns)]
                candidate[item.name] = rows(candidates)[:, torch.from_numpy(item.others)]
            elif item.stage == Stage.REQUEST:
                request[item.name] = rows(requests)
            else:
                candidate[item.name] = rows(candidates)
        return request, candidate

    def _request(self, inputs: Mapping[str, Tensor], count: int) -> RequestState:
        form = self._form()
        given = {f"{Stage.REQUEST}:{name}": tensor for name, tensor in inputs.items()}
        device = next(iter(inputs.values())).device
        given[TABLE] = torch.empty(count, 1, dtype=torch.bool, device=device)
        constants = form.constants(self._tensor)
        request = form.run(Stage.REQUEST, count == 1, {**constants, **given}, self._tensor)
        return RequestState({**constants, **request}, request.keys(), inputs, count)

    def _scored(self, state: RequestState, candidate: Mapping[str, Tensor], offsets: Tensor, way: str) -> Any:
        if way == EACH:
            return self._each(state, candidate, offsets)
        device = next(iter(candidate.values())).device
        given = {f"{Stage.CANDIDATE}:{name}": tensor for name, tensor in candidate.items()}
        given.update({f"{Stage.REQUEST}:{name}": tensor for name, tensor in state.inputs.items()})
        given.update(layout(offsets, device))
        form = self._form()
        outputs = form.run(Stage.CANDIDATE, state.requests == 1, {**state.tensors, **given}, self._tensor)
        return form.result(list(outputs.values()), self._tensor)

    def _each(self, state: RequestState, candidate: Mapping[str, Tensor], offsets: Tensor) -> Any:
        """Request by request: nothing is padded."""
        bounds = offsets.tolist()
        outputs = []
        for r, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if stop > start or len(bounds) == 2:
                rows = {name: tensor[start:stop] for name, tensor in candidate.items()}
                outputs.append(self._scored(state.only(r), rows, torch.tensor([0, stop - start]), SHARED))
        if not outputs:
            return self._scored(state, candidate, offsets, SHARED)
        leaves, spec = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
        joined = [torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*leaves, strict=True)]
        return pytree.tree_unflatten(joined, spec[0])

    def _original_way(self, request: Mapping[str, Tensor], candidate: Mapping[str, Tensor], offsets: Tensor) -> Any:
        args, kwargs = self.signature.call(self.repeated(request, candidate, offsets))
        return self.original(*args, **kwargs)

    def explain(self) -> Explanation:
        """What each operator costs, shared and before, and why one could not be shared: print it, or take its ``rows``."""
        from semel.sharing.explain import explain

        return explain(self)

    def verify(self, gradients: bool = True, seed: int = 0, example_inputs: Any = None) -> Verification:
        """Outputs (and ``gradients``) against the model's own on random inputs, and that no candidate moves another's.

        In eval mode. Inputs are drawn from those given to ``share``, or from ``example_inputs``. Raises SharingError
        with the worst place.
        """
        from semel.sharing.verify import verify

        return verify(self, gradients, seed, example_inputs)

    def repeated(self, request: Mapping[str, Tensor], candidate: Mapping[str, Tensor], offsets: Tensor) -> list[Tensor]:
        """The model's inputs in order, one row a candidate."""
        device = next(iter(candidate.values())).device
        count = int(offsets[-1])
        owner = None if len(offsets) == 2 else layout(offsets, device)[OWNER]
        tensors = []
        for item in self.signature.inputs:
            if item.columns is None and item.stage == Stage.CANDIDATE:
                tensors.append(candidate[item.name])
                continue
            mine = request[item.name]
            mine = mine.expand(count, *mine.shape[1:]) if owner is None else mine.index_select(0, owner)
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

    def __init__(self, model: ModelGraph, signature: Signature, tensors: Any, candidates: int) -> None:
        self.model = model
        self.rewriter, self.outputs = interpret(model, signature, tensors, candidates)
        self.programs = {single: lower(self.rewriter.emit, self.outputs, single) for single in (True, False)}
        self._constants: tuple[Any, dict[str, Tensor]] | None = None

    def constants(self, tensors: Any) -> dict[str, Tensor]:
        """What depends on parameters only; kept while none of them changes and no gradient is asked for."""
        program = self.programs[True][Stage.CONSTANT]
        if not program.outputs:
            return {}
        names = [name.removeprefix("parameter:") for name in program.inputs if name.startswith("parameter:")]
        used = [tensors(name) for name in names]
        version = (torch.is_inference_mode_enabled(), *((id(t), t._version, t.data_ptr()) for t in used))
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
    if candidates_hint < 1:
        raise SharingError(f"candidates_hint must be at least 1, got {candidates_hint}")
    shared = SharedModel(model, args, kwargs, signature, candidates_hint)
    if not model.training:
        shared.choose([*(size for size in SIZES if size < candidates_hint), candidates_hint])
    return shared


__all__ = ["RequestState", "Rewriter", "SharedModel", "share"]
