"""Which inputs belong to the request, and how a call's inputs are named.

An input is named by the parameter of ``forward`` it comes in through, and inside dicts, lists and tuples by a path:
``features.user_id``, ``fields.0``. ``request_inputs`` names inputs (a name stands for all below it), or maps names to
columns of one wide tensor ``[B, columns, ...]``: a slice or a list of numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from semel.sharing.emission import Stage
from semel.sharing.errors import SharingError


@dataclass(frozen=True)
class Input:
    """One tensor of ``forward``. ``columns``: the request's columns [n] where it has some of each side, else None."""

    name: str
    stage: Stage
    dtype: torch.dtype
    shape: tuple[int, ...]
    columns: np.ndarray | None = None

    @cached_property
    def others(self) -> np.ndarray:
        """The candidate's columns."""
        assert self.columns is not None
        return np.setdiff1d(np.arange(self.shape[1]), self.columns)

    @cached_property
    def order(self) -> Tensor:
        """Where each column of the model's input lies in the request's columns and, behind them, the candidate's."""
        return torch.from_numpy(np.argsort(np.concatenate([self.columns, self.others]), kind="stable"))

    @cached_property
    def behind(self) -> bool:
        """Whether the candidate's columns are the last, so that putting them behind the request's is all to do."""
        return bool((self.order == torch.arange(len(self.order))).all())

    def joined(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """The model's input from the request's columns, a row a candidate, and the candidate's."""
        both = torch.cat([mine, theirs], 1)
        if self.behind:
            return both
        return both.index_select(1, self.order if both.device.type == "cpu" else self.order.to(both.device))

    def expected(self, stage: Stage) -> tuple[int, ...]:
        """The shape behind the rows of what a request (or a candidate) brings."""
        if self.columns is None:
            return self.shape[1:]
        return (len(self.columns if stage == Stage.REQUEST else self.others), *self.shape[2:])


@dataclass(frozen=True)
class Signature:
    """``inputs`` in the order of the exported graph; ``spec``: the tree of (args, kwargs); ``fixed``: leaves that are
    no tensors, by their place."""

    inputs: tuple[Input, ...]
    spec: Any
    fixed: Mapping[int, Any]

    def __deepcopy__(self, memo: Any) -> Signature:
        return self  # nothing in it changes

    def names(self, stage: Stage) -> list[str]:
        """The inputs that a request (or a candidate) brings."""
        return list(self._names[stage])

    @cached_property
    def _names(self) -> dict[Stage, list[str]]:
        return {stage: [name for name, *_ in wanted] for stage, wanted in self._wanted.items()}

    @cached_property
    def _keys(self) -> dict[Stage, dict[str, str]]:
        return {stage: {name: f"{stage}:{name}" for name in names} for stage, names in self._names.items()}

    def placed(self, values: Mapping[str, Tensor], stage: Stage) -> dict[str, Tensor]:
        """Inputs of one side by the names that they have in the programs."""
        keys = self._keys[stage]
        return {keys[name]: tensor for name, tensor in values.items()}

    @cached_property
    def wide(self) -> bool:
        """Whether an input has columns of both sides."""
        return any(item.columns is not None for item in self.inputs)

    @cached_property
    def _wanted(self) -> dict[Stage, list[tuple[str, tuple[int, ...], torch.dtype]]]:
        """By side: name, shape behind the rows and dtype of each input."""
        return {stage: [(i.name, i.expected(stage), i.dtype) for i in self.inputs
                        if i.columns is not None or i.stage == stage] for stage in (Stage.REQUEST, Stage.CANDIDATE)}

    @cached_property
    def _groups(self) -> dict[Stage, list[tuple[str, list[str]]]]:
        """By side: the names that a call's dict has, and the keys of the dicts below them ([]: a tensor)."""
        found: dict[Stage, list[tuple[str, list[str]]]] = {}
        for stage in self._wanted:
            groups: list[tuple[str, list[str]]] = []
            for name in self.names(stage):
                top, _, key = name.partition(".")
                if not key or not groups or groups[-1][0] != top:
                    groups.append((top, []))
                groups[-1][1].extend([key] if key else [])
            found[stage] = groups
        return found

    @cached_property
    def _kinds(self) -> dict[tuple[int | None, int | None], list[tuple[tuple[int, ...], torch.dtype]]]:
        """What ``_expected`` gave, by the number of rows of each side."""
        return {}

    @cached_property
    def _arguments(self) -> list[tuple[list[Any] | None, list[int]]] | None:
        """Of each argument of ``forward``: its keys where it is a dict (None: a tensor), and which tensors it takes.
        None where there are keywords, other values or deeper trees."""
        args, kwargs = pytree.tree_unflatten(list(range(self.spec.num_leaves)), self.spec)
        flat = all(isinstance(a, int) or (type(a) is dict and all(isinstance(i, int) for i in a.values()))
                   for a in args)
        if self.fixed or kwargs or not flat:
            return None
        return [(None, [a]) if isinstance(a, int) else (list(a), list(a.values())) for a in args]

    def call(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of ``forward`` from its tensors in order."""
        if self._arguments is not None:
            return tuple([tensors[at[0]] if keys is None else dict(zip(keys, [tensors[i] for i in at], strict=True))
                          for keys, at in self._arguments]), {}
        rest = iter(tensors)
        leaves = [self.fixed[i] if i in self.fixed else next(rest) for i in range(self.spec.num_leaves)]
        return pytree.tree_unflatten(leaves, self.spec)

    def collect(self, values: Mapping[str, Any], stage: Stage) -> tuple[dict[str, Tensor], int]:
        """The tensors of one side by name, and how many rows they have. SharingError for wrong names, kinds or rows."""
        found = None if torch.compiler.is_compiling() else self._at_once(values, stage)
        if found is not None:
            return found
        flat = flattened(values)
        wanted = self.names(stage)
        if list(flat) != wanted and set(flat) != set(wanted):
            side = stage
            missing = [n for n in wanted if n not in flat]
            extra = [n for n in flat if n not in wanted]
            words = [*([f"lack {', '.join(missing)}"] if missing else []),
                     *([f"have {', '.join(extra)}, which the {side} side does not take"] if extra else [])]
            raise SharingError(f"the {side} inputs {' and '.join(words)}; they are {', '.join(wanted) or 'none'}")
        count = -1
        for item in self.inputs:
            if item.name not in flat or (item.columns is None and item.stage != stage):
                continue
            tensor = flat[item.name]
            if not isinstance(tensor, Tensor):
                raise SharingError(f"{stage} input {item.name!r} must be a tensor, got {type(tensor).__name__}")
            shape = item.expected(stage)
            if tensor.dim() != len(shape) + 1 or tuple(tensor.shape[1:]) != shape:
                want = ", ".join(["rows", *map(str, shape)])
                raise SharingError(f"{stage} input {item.name!r} has shape {list(tensor.shape)}, it must be [{want}]")
            if tensor.dtype != item.dtype:
                raise SharingError(f"{stage} input {item.name!r} has dtype {tensor.dtype}, it must be {item.dtype} as "
                                   "in example_inputs")
            if count >= 0 and len(tensor) != count:
                raise SharingError(f"{stage} input {item.name!r} has {len(tensor)} rows, the inputs before it {count}")
            count = len(tensor)
        return flat, max(count, 0)

    def _at_once(self, values: Any, stage: Stage) -> tuple[dict[str, Tensor], int] | None:
        """``collect`` of inputs of which nothing is wrong, in the order of ``names``: a call for all of them and none
        for each, as a hundred checks take as long as a small model. None for any others."""
        tensors = self.listed(values, stage)
        if not tensors or {*map(type, tensors)} != _TENSORS:
            return None
        size = tensors[0].shape
        rows = size[0] if size else 0
        request = stage == Stage.REQUEST
        if list(map(_kind, tensors)) != self._expected(rows if request else None, None if request else rows):
            return None
        return dict(zip(self._names[stage], tensors, strict=True)), rows

    def listed(self, values: Any, stage: Stage) -> list[Any] | None:
        """What a call's dict holds, in the order of ``names``; None where it is not in that order."""
        if type(values) is not dict:
            return None
        if list(values) == self._names[stage]:
            return [*values.values()]
        groups = self._groups[stage]
        if len(values) != len(groups):
            return None
        found: list[Any] = []
        for name, keys in groups:
            value = values.get(name)
            if not keys:
                found.append(value)
            elif type(value) is dict and list(value) == keys:
                found += value.values()
            else:
                return None
        return found

    def of_one_request(self, request_inputs: Any, candidate_inputs: Any,
                       offsets: Any) -> tuple[list[Tensor], int] | None:
        """The tensors of one request and its candidates, side by side, and how many candidates; checked as ``collect``
        and ``check_offsets`` do, in a few microseconds. None for anything else, wrong inputs among them."""
        mine, theirs = self.listed(request_inputs, Stage.REQUEST), self.listed(candidate_inputs, Stage.CANDIDATE)
        if not mine or not theirs:
            return None
        tensors = mine + theirs
        if {*map(type, tensors)} != _TENSORS:
            return None
        size = theirs[0].shape
        count = size[0] if size else 0
        if not count or list(map(_kind, tensors)) != self._expected(1, count) or not covers(offsets, count):
            return None
        return tensors, count

    def _expected(self, requests: int | None, candidates: int | None) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each input of the sides that are asked for, the request's first."""
        key = requests, candidates
        found = self._kinds.get(key)
        if found is None:
            found = [((rows, *shape), dtype) for rows, stage in zip(key, self._wanted, strict=True) if rows is not None
                     for _, shape, dtype in self._wanted[stage]]
            if len(self._kinds) > 256:
                self._kinds.clear()
            self._kinds[key] = found
        return found

    @cached_property
    def _steps(self) -> list[tuple[Input, int | None, int | None]]:
        """Of each input of the model: where its part of the request lies in what ``of_one_request`` gives, and its part
        of the candidates."""
        mine, theirs = self._names[Stage.REQUEST], self._names[Stage.CANDIDATE]
        at = [{name: i for i, name in enumerate(mine)}, {name: i for i, name in enumerate(theirs, len(mine))}]
        return [(item, at[0].get(item.name), at[1].get(item.name)) for item in self.inputs]

    @cached_property
    def _picks(self) -> list[tuple[list[Any] | None, Any]] | None:
        """Of each argument of ``forward`` its keys, where it is a dict, and what takes its tensors out of those of a
        call. None where that is not all to do."""
        if self.wide or self._arguments is None:
            return None
        places = [mine if mine is not None else theirs for _, mine, theirs in self._steps]
        if any(keys is not None and len(at) < 2 for keys, at in self._arguments):
            return None  # one item is taken out bare
        return [(keys, itemgetter(*[places[i] for i in at])) for keys, at in self._arguments]

    def arguments(self, tensors: list[Tensor], count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of ``forward`` from what ``of_one_request`` gives: a row a candidate."""
        if count > 1:
            requests = len(self._names[Stage.REQUEST])
            tensors = [x.expand(count, *x.shape[1:]) for x in tensors[:requests]] + tensors[requests:]
        if self._picks is not None:
            return tuple([take(tensors) if keys is None else dict(zip(keys, take(tensors), strict=True))
                          for keys, take in self._picks]), {}
        return self.call([tensors[theirs] if mine is None else  # type: ignore[index]
                          tensors[mine] if theirs is None else item.joined(tensors[mine], tensors[theirs])
                          for item, mine, theirs in self._steps])

    def apart(self, tensors: list[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What ``of_one_request`` gives by name: the request's side and the candidates'."""
        mine, theirs = self._names[Stage.REQUEST], self._names[Stage.CANDIDATE]
        return dict(zip(mine, tensors, strict=False)), dict(zip(theirs, tensors[len(mine):], strict=True))


def covers(offsets: Any, candidates: int) -> bool:
    """Whether the offsets are, beyond doubt, those of one request with all candidates."""
    if offsets is None:
        return True
    numbers = offsets.tolist() if type(offsets) is Tensor else offsets
    return type(numbers) is list and numbers == [0, candidates] and type(numbers[1]) is int


_TENSORS = {Tensor}
_kind = attrgetter("shape", "dtype")


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts and lists as one dict by path."""
    if not isinstance(values, Mapping):
        raise SharingError(f"inputs come as a dict by name, got {type(values).__name__}")
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            out.update({f"{name}.{key}": item for key, item in flattened(value).items()})
        elif isinstance(value, (list, tuple)) and all(isinstance(v, (Tensor, Mapping, list, tuple)) for v in value):
            inside = flattened({str(i): item for i, item in enumerate(value)})
            out.update({f"{name}.{key}": item for key, item in inside.items()})
        else:
            out[name] = value
    return out


def signature_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                 request_inputs: Iterable[str] | Mapping[str, Any]) -> Signature:
    """Names and sides of a model's inputs. SharingError where ``request_inputs`` does not fit them."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise SharingError(f"example_inputs do not fit {type(model).__name__}.forward: {error}") from error
    names = _parameter_names(model, bound, args)
    leaves, spec = pytree.tree_flatten_with_path((args, dict(kwargs)))
    wanted = _wanted(request_inputs)
    inputs, fixed, matched = [], {}, set()
    for place, (path, leaf) in enumerate(leaves):
        name = _path_name(path, names)
        if not isinstance(leaf, Tensor):
            fixed[place] = leaf
            continue
        if leaf.dim() == 0:
            raise SharingError(f"input {name!r} is a scalar tensor; every input needs the batch as its first axis")
        rule = next((key for key in wanted if name == key or name.startswith(key + ".")), None)
        columns = None
        stage = Stage.CANDIDATE
        if rule is not None:
            matched.add(rule)
            stage = Stage.REQUEST
            if wanted[rule] is not None:
                columns = _columns(name, wanted[rule], leaf)
                if len(columns) == leaf.shape[1]:
                    columns = None
                elif not len(columns):
                    columns, stage = None, Stage.CANDIDATE
                else:
                    stage = Stage.CANDIDATE
        inputs.append(Input(name, stage, leaf.dtype, tuple(leaf.shape), columns))
    unknown = [key for key in wanted if key not in matched]
    known = ", ".join(item.name for item in inputs)
    if unknown:
        raise SharingError(f"request_inputs name {', '.join(map(repr, unknown))}; the model's inputs are {known}")
    if not any(item.stage == Stage.REQUEST or item.columns is not None for item in inputs):
        raise SharingError(f"no input belongs to the request, so there is nothing to share; the inputs are {known}")
    if all(item.stage == Stage.REQUEST for item in inputs):
        raise SharingError(f"no input belongs to the candidate: all of {known} are request inputs")
    sizes = {item.shape[0] for item in inputs}
    if len(sizes) > 1:
        rows = ", ".join(f"{item.name} {item.shape[0]}" for item in inputs)
        raise SharingError(f"example inputs have different batch sizes ({rows}); give every input one row a candidate")
    if min(sizes) < 2:
        raise SharingError(f"example inputs have {min(sizes)} row; give at least two, so that the batch is told apart")
    return Signature(tuple(inputs), spec, fixed)


def _wanted(request_inputs: Any) -> dict[str, Any]:
    if isinstance(request_inputs, str):
        return {request_inputs: None}
    if isinstance(request_inputs, Mapping):
        return {_joined(name): columns for name, columns in request_inputs.items()}
    if not isinstance(request_inputs, Iterable):
        raise SharingError(f"request_inputs must be names, or a dict from names to columns, got {request_inputs!r}")
    return {_joined(name): None for name in request_inputs}


def _joined(name: Any) -> str:
    return ".".join(map(str, name)) if isinstance(name, tuple) else str(name)


def _columns(name: str, columns: Any, leaf: Tensor) -> np.ndarray:
    if leaf.dim() < 2:
        raise SharingError(f"input {name!r} has shape {list(leaf.shape)}: it has no columns to choose from")
    width = leaf.shape[1]
    if isinstance(columns, slice):
        return np.arange(width)[columns]
    array = np.asarray(columns)
    if array.dtype == bool or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise SharingError(f"the columns of {name!r} must be a slice or a list of numbers, got {columns!r}")
    if array.size and (array.min() < -width or array.max() >= width):
        raise SharingError(f"the columns of {name!r} run from {array.min()} to {array.max()}; it has {width}")
    positions = array.astype(np.int64) % width
    if len(np.unique(positions)) != len(positions):
        raise SharingError(f"the columns of {name!r} name one twice: {columns!r}")
    return positions


def _parameter_names(model: nn.Module, bound: inspect.BoundArguments, args: tuple[Any, ...]) -> list[str]:
    """The name of each positional argument."""
    names: list[str] = []
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}.{i}" for i in range(len(bound.arguments.get(name, ())))]
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(name)
    return names[: len(args)]


def _path_name(path: Sequence[Any], names: Sequence[str]) -> str:
    top, *rest = [_key(part) for part in path]
    if top == "0":
        head, *rest = rest
        return ".".join([names[int(head)], *rest])
    return ".".join(rest)


def _key(part: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)
