"""``share``: an existing model, rewritten so that what belongs to the request is computed once per request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import getitem, is_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from semel.sharing.choice import SECONDS, SIZES, Choice, fastest, lost, nearest, timed
from semel.sharing.emission import Stage
from semel.sharing.errors import SharingError
from semel.sharing.export import ModelGraph, export
from semel.sharing.inputs import Signature, signature_of
from semel.sharing.interpret import Rewriter, interpret, updated
from semel.sharing.lowering import OWNER, TABLE, Program, lower
from semel.sharing.naming import tensor_named
from semel.sharing.runtime import (
    EACH,
    ORIGINAL,
    PARAMETER,
    SHARED,
    Form,
    Output,
    RequestState,
    Scoring,
    check_offsets,
    layout,
)

if TYPE_CHECKING:
    from semel.sharing.explain import Explanation
    from semel.sharing.verify import Verification

_SEVERAL = 4  # requests, where many of them are timed


class _Parameters(dict[str, Any]):
    """Of a shared model; ``changes`` counts how often one of any was replaced, so that a call need not look at all."""

    changes = 0

    def __setitem__(self, name: str, parameter: Any) -> None:
        _Parameters.changes += 1
        super().__setitem__(name, parameter)


class _Bank(nn.Module):
    """Parameters under their dotted names, as ``state_dict`` has them. They stay where they are and whole."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_parameters"] = _Parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_parameters", ()) and hasattr(value, "device_mesh"):
            raise SharingError(_NOT_SHARDED.format(name))
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._parameters:
            raise SharingError(_NOT_SHARDED.format(name))
        super().__delattr__(name)


_NOT_SHARDED = ("parameter {!r} of a shared model cannot be sharded or taken out, as FSDP does: its graphs need it "
                "whole; share first, then wrap in DistributedDataParallel, or apply FSDP to parts that are not shared")


class SharedModel(Scoring, _Bank):
    """The shared form of a model, over the same parameters (same names in ``state_dict``).

    ``shared(request_inputs, candidate_inputs, candidate_offsets)`` takes dicts by the names of ``forward``'s inputs,
    with R rows on the request side and C on the candidate side, and gives the model's output for the C candidates;
    ``candidate_offsets`` [R + 1] says which candidates are whose. ``request`` and ``score`` are its two halves.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                 signature: Signature, candidates: int = 512) -> None:
        super().__init__()
        self.candidates = candidates
        self.choices: dict[tuple[str, bool], tuple[Choice, ...]] = {}
        self._nearest: tuple[Any, dict[tuple[str, int, int], str]] = None, {}
        self._original = [model]  # in a list, so that its parameters are not there twice
        self._owned = -1  # changes of parameters when they were last seen to be the model's
        self.signature = signature
        self._example = (args, dict(kwargs))
        self._forms: dict[bool, _Form] = {}
        self._compile_options: dict[str, Any] | None = None
        self._compiled_original: list[Any] = []  # in a list, as the original
        self.training = model.training
        self._bind()
        self._form()

    def _bind(self) -> None:
        """Takes the model's parameters and buffers for its own."""
        persistent = set(self.original.state_dict(keep_vars=True))
        bound = [(*_place(self, name, parameter, False), parameter)
                 for name, parameter in self.original.named_parameters(remove_duplicate=False)]
        self._bound = tuple(zip(*bound, strict=True)) or ((), (), ())  # who holds it, under which name; the parameter
        for name, buffer in self.original.named_buffers(remove_duplicate=False):
            _place(self, name, buffer, name in persistent)

    def _apply(self, fn: Any, recurse: bool = True) -> SharedModel:
        """``to``, ``double``, ``cuda``: the model itself moves, and its graphs are made again."""
        self.original._apply(fn, recurse)
        self._bind()
        self._example = pytree.tree_map_only(Tensor, fn, self._example)
        moved = [leaf for leaf in pytree.tree_leaves(self._example) if isinstance(leaf, Tensor)]
        inputs = [replace(item, dtype=leaf.dtype) for item, leaf in zip(self.signature.inputs, moved, strict=True)]
        self.signature = replace(self.signature, inputs=tuple(inputs))
        self._forms = {}
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        result = self.original.load_state_dict(state_dict, strict, assign)
        self._bind()
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the graphs behind, which are made again when needed."""
        return {**self.__dict__, "_forms": {}, "_bound": ((), (), ()), "_owned": -1,
                "_nearest": (None, {}), "_compiled_original": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def compile(self, **options: Any) -> None:
        """``torch.compile`` for each stage, in place and when first used; ``options`` are its. R and C are dynamic: a
        stage is compiled once, and once more for a single candidate. Which way was fastest before says nothing now: the
        shared form is taken, until ``choose`` has timed the compiled ways."""
        self._compile_options = options
        self._compiled_original = []
        self.choices = {}
        for form in self._forms.values():
            form.compile(options)

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
            form = _Form(export(self.original, args, kwargs), self.signature, self._tensor, self.candidates,
                         self.training)
            if self._compile_options is not None:
                form.compile(self._compile_options)
            self._forms[self.training] = form
        return self._forms[self.training]

    def _tensor(self, name: str) -> Tensor:
        return tensor_named(self, name)

    def save(self, folder: str | Path, backend: str = "aoti") -> None:
        """The eval form in a folder, for ``semel.sharing.load``: see ``semel.sharing.package``. Raises SharingError."""
        from semel.sharing.package import save

        save(self, folder, backend)

    def broadcast(self, request_inputs: Mapping[str, Any], candidate_inputs: Mapping[str, Any],
                  candidate_offsets: Any = None) -> Any:
        """The unmodified model, its request inputs repeated for every candidate."""
        request, requests = self.signature.collect(request_inputs, Stage.REQUEST)
        candidate, count = self.signature.collect(candidate_inputs, Stage.CANDIDATE)
        offsets = check_offsets(candidate_offsets, requests, count)
        args, kwargs = self.signature.call(self.repeated(request, candidate, offsets))
        return self.original(*args, **kwargs)

    def _broadcast(self, request: Mapping[str, Tensor], candidate: Mapping[str, Tensor], offsets: Tensor) -> Any:
        return self._unmodified(*self.signature.call(self.repeated(request, candidate, offsets)))

    def _unmodified(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._compile_options is not None and not self._compiled_original:
            self._compiled_original = [torch.compile(self.original, **{"dynamic": True, **self._compile_options})]
        return (self._compiled_original or self._original)[0](*args, **kwargs)

    def way(self, requests: int, candidates: int, what: str) -> str:
        if self.training:
            return SHARED  # one pass: a buffer that the model updates is updated once
        if self._nearest[0] is not self.choices:
            self._nearest = self.choices, {}
        known = self._nearest[1]
        way = known.get((what, requests, candidates))
        if way is None:
            choices = self.choices.get((what, requests != 1), ())
            way = nearest(choices, candidates // max(requests, 1)).way if choices and candidates else ""
            if len(known) > 1024:
                known.clear()
            known[what, requests, candidates] = way
        if not way or (way == ORIGINAL and not self._own()):
            return super().way(requests, candidates, what)
        return way

    def _own(self) -> bool:
        """Whether parameters are the model's: torch.func.functional_call puts others in their place for a while."""
        if self._owned != _Parameters.changes:
            holders, names, parameters = self._bound
            if not all(map(is_, map(getitem, holders, names), parameters)):
                return False
            self._owned = _Parameters.changes
        return True

    def choose(self, sizes: Sequence[int] = (), seconds: float = SECONDS) -> None:
        """Times the ways on rows of the example inputs, for ``sizes`` of candidates a request (by default some up to
        ``candidates``), and keeps the fastest. The rounds take about ``seconds`` in all; where a single run of each way
        takes longer, that long. A way that has clearly lost is not tried with more candidates if it would take long."""
        sizes = sorted({*sizes} or {*(size for size in SIZES if size < self.candidates), self.candidates})
        self.choices = {}
        found: dict[tuple[str, bool], list[Choice]] = {}
        cases = [(many, size) for many in (False, True) for size in sizes
                 if not many or size * _SEVERAL <= max(sizes)]
        compiled = self._compile_options is not None
        hopeless: dict[bool, float] = {}  # seconds a candidate of an original that has lost
        for left, (many, size) in zip(range(len(cases), 0, -1), cases, strict=True):
            share, rows = seconds / left, size * (_SEVERAL if many else 1)
            ways, groups = self._ways(_SEVERAL if many else 1, size)
            if hopeless.get(many, 0.0) * rows > share:
                ways.pop(ORIGINAL)
            start = time.perf_counter()
            took = timed(ways, [group.values() for group in groups.values()], share, compiled)
            seconds = max(seconds - (time.perf_counter() - start), 0.0)
            for what, group in groups.items():
                mine = {way: took[name] for way, name in group.items() if name in took}
                found.setdefault((what, many), []).append(Choice(size, fastest(mine, ORIGINAL), mine))
            if ORIGINAL in took and all(lost(one[-1].seconds, ORIGINAL) for (_, m), one in found.items() if m == many):
                hopeless[many] = took[ORIGINAL] / rows
        self.choices = {key: tuple(value) for key, value in found.items()}

    def _ways(self, requests: int, size: int) -> tuple[dict[str, Callable[[], Any]], dict[str, dict[str, str]]]:
        """All ways on drawn inputs by name; and those to compute a call, and to score a state: way -> name."""
        request, candidate = self._drawn(requests, requests * size)
        offsets = torch.arange(requests + 1) * size
        with torch.no_grad():
            state = self._request(request, requests)
        shared = (SHARED,) if requests == 1 else (SHARED, EACH)

        def original() -> Any:
            return self._broadcast(request, candidate, offsets)

        def call(way: str) -> Callable[[], Any]:
            return lambda: self._score(self._request(request, requests), candidate, offsets, way)

        def score(way: str) -> Callable[[], Any]:
            return lambda: self._score(state, candidate, offsets, way)

        ways = {ORIGINAL: original, **{f"call {way}": call(way) for way in shared},
                **{f"score {way}": score(way) for way in shared}}
        groups = {what: {ORIGINAL: ORIGINAL, **{way: f"{what} {way}" for way in shared}} for what in ("call", "score")}
        return ways, groups

    def _drawn(self, requests: int, candidates: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rows of the example inputs, again and again."""
        leaves = [leaf for leaf in pytree.tree_leaves(self._example) if isinstance(leaf, Tensor)]
        request, candidate = {}, {}

        def rows(tensor: Tensor, count: int) -> Tensor:
            return tensor.index_select(0, torch.arange(count, device=tensor.device) % len(tensor))

        for item, tensor in zip(self.signature.inputs, leaves, strict=True):
            if item.columns is not None:
                request[item.name] = rows(tensor, requests)[:, torch.from_numpy(item.columns)]
                candidate[item.name] = rows(tensor, candidates)[:, torch.from_numpy(item.others)]
            elif item.stage == Stage.REQUEST:
                request[item.name] = rows(tensor, requests)
            else:
                candidate[item.name] = rows(tensor, candidates)
        return request, candidate

    def explain(self) -> Explanation:
        """What each operator costs, shared and before, and why one could not be shared: print it or take ``rows``."""
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
        first = next(iter(candidate.values()))
        count, device = first.shape[0], first.device
        single = offsets.shape[0] == 2  # len of a tensor takes a microsecond
        if single and count == 1 and not self.signature.wide:
            both = {**request, **candidate}
            return [both[item.name] for item in self.signature.inputs]
        owner = None if single else layout(offsets, device)[OWNER]
        tensors = []
        for item in self.signature.inputs:
            if item.columns is None and item.stage == Stage.CANDIDATE:
                tensors.append(candidate[item.name])
                continue
            mine = request[item.name]
            if owner is not None:
                mine = mine.index_select(0, owner)
            elif count != 1:
                mine = mine.expand(count, *mine.shape[1:])
            if item.columns is not None:
                mine = item.joined(mine, candidate[item.name])
            tensors.append(mine)
        return tensors


def _place(root: nn.Module, name: str, tensor: Tensor, persistent: bool) -> tuple[dict[str, Any], str]:
    """Puts a tensor where its dotted name says; gives the dict that holds it, and its name there."""
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
    return (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers), last


class _Form(Form):
    """One graph (train or eval) of a model. ``results``: what it returns, and the buffers it updates, as nodes."""

    def __init__(self, model: ModelGraph, signature: Signature, tensors: Any, candidates: int,
                 training: bool) -> None:
        self.model = model
        self.rewriter, self.results = interpret(model, signature, tensors, candidates, training)
        self.updated = tuple(model.mutated.values())
        self.results += [updated(self.rewriter, node) for node in model.mutated]
        self.programs = {single: lower(self.rewriter.emit, self.results, single) for single in (True, False)}
        self.outputs = [_described(model, item) for item in model.outputs]
        self.out_spec = model.out_spec
        self.runs_empty = not self.updated  # statistics of no row are none
        self._draws = any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
                          for node in self.programs[True][Stage.CONSTANT].module.graph.nodes)
        self._constants: tuple[Any, dict[str, Tensor]] | None = None

    def compile(self, options: Mapping[str, Any]) -> None:
        fixed = self.programs[True][Stage.CONSTANT].outputs
        self.programs = {single: {stage: replace(program, module=_Compiled(program, fixed, options))
                                  for stage, program in stages.items()}
                         for single, stages in self.programs.items()}

    def constants(self, tensors: Any) -> dict[str, Tensor]:
        """What depends on parameters only; kept while none of them changes and no gradient is asked for."""
        program = self.programs[True][Stage.CONSTANT]
        if not program.outputs:
            return {}
        names = [name.removeprefix(PARAMETER) for name in program.inputs if name.startswith(PARAMETER)]
        used = [tensors(name) for name in names]
        if self._draws or (torch.is_grad_enabled() and any(t.requires_grad for t in used)):
            return self.run(Stage.CONSTANT, True, {}, tensors)
        version = (torch.is_inference_mode_enabled(), *((id(t), t._version, t.data_ptr()) for t in used))
        if self._constants is None or self._constants[0] != version:
            self._constants = version, self.run(Stage.CONSTANT, True, {}, tensors)
        return self._constants[1]

    def run(self, stage: Stage, single: bool, given: Mapping[str, Tensor], tensors: Any) -> dict[str, Tensor]:
        if not self.updated:
            return super().run(stage, single, given, tensors)

        def kept(name: str) -> Tensor:  # backward may want the statistics as they were
            return tensors(name).detach().clone() if name in self.updated else tensors(name)

        results = super().run(stage, single, given, kept)
        if stage == Stage.CANDIDATE:
            new = {name: results.pop(f"output:{len(self.outputs) + i}") for i, name in enumerate(self.updated)}
            if len(given[OWNER]) == 1 and not all(bool(value.isfinite().all()) for value in new.values()):
                raise SharingError("one candidate has no variance, which BatchNorm needs in train mode; bring two or "
                                   "more, or call eval()")
            with torch.no_grad():
                for name, value in new.items():
                    buffer = tensors(name)
                    buffer.copy_(value.reshape(buffer.shape))
        return results


class _Compiled:
    """A program through ``torch.compile``, its rows dynamic. Without a row it runs as it is."""

    def __init__(self, program: Program, fixed: Iterable[str], options: Mapping[str, Any]) -> None:
        self.plain = program.module
        self.compiled = torch.compile(program.module, **options)
        self.rows = [i for i, name in enumerate(program.inputs) if not name.startswith(PARAMETER) and name not in fixed]
        self.table = program.inputs.index(TABLE) if TABLE in program.inputs else None

    def forward(self, *inputs: Tensor) -> Any:
        if any(0 in inputs[i].shape for i in self.rows):
            return self.plain.forward(*inputs)
        for i in self.rows:
            if len(inputs[i]) > 1:
                torch._dynamo.maybe_mark_dynamic(inputs[i], 0)
            if i == self.table and inputs[i].shape[1] > 1:
                torch._dynamo.maybe_mark_dynamic(inputs[i], 1)
        return self.compiled(*inputs)


def _described(model: ModelGraph, item: Any) -> Any:
    if not isinstance(item, fx.Node):
        return item
    value = item.meta["val"]
    return Output(value.dtype, tuple(None if batched else size for size, batched in model.shape(value)))


def share(model: nn.Module, example_inputs: Any, request_inputs: Iterable[str] | Mapping[str, Any],
          candidates_hint: int = 512, mode: str = "exact",
          example_kwargs: Mapping[str, Any] | None = None) -> SharedModel:
    """``model`` with its request side computed once per request: the same outputs and gradients.

    ``model`` takes tensors that all have one row a candidate; ``example_inputs``: a tuple of them (or a dict of keyword
    arguments), at least two rows. ``request_inputs``: names of those that are the same for all candidates of a request,
    or name -> columns. ``candidates_hint``: how many candidates a request is expected to have. Raises SharingError.
    """
    if not isinstance(model, nn.Module):
        raise SharingError(f"share takes a torch.nn.Module, got {type(model).__name__}")
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
        shared.choose()
    return shared


__all__ = ["RequestState", "Rewriter", "SharedModel", "share"]
