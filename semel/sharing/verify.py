"""Is the shared form the model? Outputs and gradients on random inputs, and that no candidate knows another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from semel.sharing.drawing import Drawing
from semel.sharing.emission import Stage
from semel.sharing.errors import SharingError

if TYPE_CHECKING:
    from semel.sharing.shared import SharedModel

EACH, SHARED = "each", "shared"
BATCHES = ((0, 5), (0, 3, 3, 7), (0, 0, 2, 4))
"""``candidate_offsets`` to compare at: one request, and several with an empty one."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference of an output, of its scale (in float64 of 1 where the scale is smaller)."""
GRADIENTS = 10.0
"""Gradients may differ by so many times more: they sum over candidates."""


@dataclass(frozen=True)
class Comparison:
    """``what``: outputs, gradients, or who moved; ``difference``: the largest, of ``scale``; ``place``: where."""

    what: str
    offsets: tuple[int, ...]
    difference: float
    scale: float
    allowed: float
    place: str

    @property
    def equal(self) -> bool:
        return self.difference <= self.allowed

    def __str__(self) -> str:
        requests = len(self.offsets) - 1
        return (f"{self.what}, {requests} {'requests' if requests != 1 else 'request'}, {self.offsets[-1]} candidates: "
                f"largest difference {self.difference:.2g} of {self.scale:.2g} at {self.place} "
                f"({self.allowed:.2g} allowed)")


@dataclass(frozen=True)
class Verification:
    """What was compared; everything in it was equal."""

    model: str
    comparisons: tuple[Comparison, ...]

    @property
    def worst(self) -> Comparison:
        return max(self.comparisons, key=lambda c: c.difference / c.allowed)

    def __str__(self) -> str:
        worst: dict[str, Comparison] = {}
        for c in self.comparisons:
            kind = c.what.split(" ", 1)[0] if not c.what.startswith("changing") else " ".join(c.what.split()[:2])
            if kind not in worst or c.difference / c.allowed > worst[kind].difference / worst[kind].allowed:
                worst[kind] = c
        batches = ", ".join(str(list(offsets)) for offsets in BATCHES)
        return "\n".join([f"{self.model}: the shared form is the model, and no candidate moves another's score "
                          f"(candidate_offsets {batches}); worst of each:", *(f"  {c}" for c in worst.values())])


def verify(shared: SharedModel, gradients: bool = True, seed: int = 0, example_inputs: Any = None) -> Verification:
    """Compares ``shared`` with its model, in eval mode; raises SharingError at the first place that differs.

    ``example_inputs``: rows to draw from (a tuple or a dict of keyword arguments, as ``share`` takes them).
    """
    with _eval(shared):
        drawing = Drawing(shared._form().model, _examples(shared, example_inputs), seed)
        done: list[Comparison] = []
        moved = False
        for offsets in BATCHES:
            request, candidate = sides(shared, drawing, offsets)
            done += [_checked(shared, c) for c in perturbations(shared, drawing, offsets, request, candidate)]
            with torch.no_grad():
                expected = shared.broadcast(request, candidate, torch.tensor(offsets))
                for way in (SHARED, EACH):
                    got = computed(shared, request, candidate, offsets, way)
                    done.append(_checked(shared, compare(f"outputs ({way})", offsets, got, expected)))
            moved |= any(len(t) and bool((t != t[:1]).any()) for t in _tensors(expected))
            if gradients and offsets[1] != 0 and any(p.requires_grad for p in shared.parameters()):
                done += [_checked(shared, c) for c in compare_gradients(shared, offsets, request, candidate)]
        if not moved:
            raise SharingError(f"all inputs drawn give {type(shared.original).__name__} the same output, so that "
                               "nothing was seen; pass example_inputs whose rows differ")
    return Verification(type(shared.original).__name__, tuple(done))


def computed(shared: SharedModel, request: Mapping[str, Tensor], candidate: Mapping[str, Tensor],
             offsets: Sequence[int], way: str = SHARED) -> Any:
    """The output by one way, whatever the timings say."""
    return shared._score(shared._request(request, len(offsets) - 1), candidate, torch.tensor(offsets), way)


@contextmanager
def _eval(shared: SharedModel) -> Iterator[None]:
    mode = shared.training
    shared.eval()
    try:
        yield
    finally:
        shared.train(mode)


def _examples(shared: SharedModel, example_inputs: Any) -> list[Tensor]:
    args, kwargs = shared._example
    if example_inputs is not None:
        args, kwargs = ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (
            example_inputs if isinstance(example_inputs, tuple) else (example_inputs,), {})
    found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    wanted = shared.signature.inputs
    if [t.shape[1:] for t in found] != [torch.Size(i.shape[1:]) for i in wanted] or any(
            t.dtype != i.dtype for t, i in zip(found, wanted, strict=True)):
        raise SharingError("example_inputs must have the structure, dtypes and row shapes of those given to share: "
                           + ", ".join(f"{i.name} {list(i.shape[1:])} {i.dtype}" for i in wanted))
    return found


def sides(shared: SharedModel, drawing: Drawing, offsets: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random inputs of the requests and of the candidates, by name."""
    return (_side(shared, drawing.rows(len(offsets) - 1), Stage.REQUEST),
            _side(shared, drawing.rows(offsets[-1]), Stage.CANDIDATE))


def _side(shared: SharedModel, rows: Sequence[Tensor], stage: Stage) -> dict[str, Tensor]:
    found = {}
    for item, tensor in zip(shared.signature.inputs, rows, strict=True):
        if item.columns is not None:
            columns = item.columns if stage == Stage.REQUEST else item.others
            found[item.name] = tensor[:, torch.from_numpy(columns).to(tensor.device)]
        elif item.stage == stage:
            found[item.name] = tensor
    return found


def perturbations(shared: SharedModel, drawing: Drawing, offsets: Sequence[int], request: Mapping[str, Tensor],
                  candidate: Mapping[str, Tensor]) -> Iterator[Comparison]:
    """One candidate's inputs change, then one request's: nothing else moves, in the model itself and when shared."""
    other_request, other_candidate = sides(shared, drawing, offsets)
    j, r = offsets[-1] // 2, len(offsets) - 2
    still = torch.arange(offsets[-1]) != j
    changes: list[tuple[str, Mapping[str, Tensor], Mapping[str, Tensor], Tensor]] = [
        (f"changing candidate {j}", request, _with_row(candidate, other_candidate, j), still)]
    if offsets[r] > 0:
        changes.append((f"changing request {r}", _with_row(request, other_request, r), candidate,
                        torch.arange(offsets[-1]) < offsets[r]))
    at = torch.tensor(offsets)
    runs: dict[str, Callable[..., Any]] = {"the model itself": lambda a, b: shared.broadcast(a, b, at),
                                           "the shared form": lambda a, b: computed(shared, a, b, offsets)}
    for form, run in runs.items():
        with torch.no_grad():
            before = run(request, candidate)
            for what, a, b, same in changes:
                after = run(a, b)
                yield compare(f"{what} in {form}", offsets, _masked(after, same), _masked(before, same))


def _with_row(values: Mapping[str, Tensor], others: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: torch.cat([tensor[:row], others[name][row : row + 1], tensor[row + 1 :]])
            for name, tensor in values.items()}


def _masked(outputs: Any, rows: Tensor) -> Any:
    """The outputs whose rows must not move; the others are set to zero."""
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        keep = rows.to(leaf.device).reshape(-1, *[1] * (leaf.dim() - 1))
        return torch.where(keep, leaf, torch.zeros_like(leaf))

    return pytree.tree_map(one, outputs)


def compare_gradients(shared: SharedModel, offsets: Sequence[int], request: Mapping[str, Tensor],
                      candidate: Mapping[str, Tensor]) -> Iterator[Comparison]:
    """Of a random weighted sum of the outputs, by parameter."""
    names, parameters = zip(*((n, p) for n, p in shared.named_parameters() if p.requires_grad), strict=True)
    generator = torch.Generator().manual_seed(7)
    weights: list[Tensor] = []

    def gradients(outputs: Any) -> list[Tensor]:
        tensors = [t for t in _tensors(outputs) if t.requires_grad]
        if not weights:
            weights.extend(torch.randn(t.shape, generator=generator).to(t) for t in tensors)
        total = sum(((t * w).sum() for t, w in zip(tensors, weights, strict=True)), torch.zeros(()))
        if not total.requires_grad:
            return [torch.zeros_like(p) for p in parameters]
        found = torch.autograd.grad(total, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    at = torch.tensor(offsets)
    with torch.enable_grad():
        expected = gradients(shared.broadcast(request, candidate, at))
        got = gradients(computed(shared, request, candidate, offsets))
    scale = max((float(g.abs().max()) for g in expected if g.numel()), default=0.0)
    worst = max((compare("gradients", offsets, {name: g}, {name: e}, scale) for name, g, e in
                 zip(names, got, expected, strict=True)), key=lambda c: c.difference, default=None)
    if worst is not None:
        yield replace(worst, allowed=worst.allowed * GRADIENTS)


def compare(what: str, offsets: Sequence[int], got: Any, expected: Any, scale: float | None = None) -> Comparison:
    """The largest difference of two trees of tensors; infinite where their structure, shapes or dtypes differ."""
    worst = Comparison(what, tuple(offsets), 0.0, 0.0, 1e-10, "any")
    a, spec = pytree.tree_flatten_with_path(got)
    b, other = pytree.tree_flatten_with_path(expected)
    if spec != other:
        return replace(worst, difference=float("inf"), place=f"the structure, {spec} instead of {other}")
    for (path, mine), (_, theirs) in zip(a, b, strict=True):
        name = pytree.keystr(path) or "the output"
        if not isinstance(theirs, Tensor):
            if mine != theirs:
                return replace(worst, difference=float("inf"), place=f"{name}: {mine!r} instead of {theirs!r}")
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return replace(worst, difference=float("inf"), place=(
                f"{name}: {mine.dtype} {list(mine.shape)} instead of {theirs.dtype} {list(theirs.shape)}"))
        if not theirs.numel():
            continue
        found = _difference(what, offsets, name, mine, theirs, scale)
        if found.difference / found.allowed > worst.difference / worst.allowed or worst.place == "any":
            worst = found
    return worst


def _difference(what: str, offsets: Sequence[int], name: str, mine: Tensor, theirs: Tensor,
                scale: float | None) -> Comparison:
    mine, theirs = mine.detach(), theirs.detach()
    allowed = TOLERANCE.get(theirs.dtype, 0.0)
    same = (mine == theirs) | ((mine != mine) & (theirs != theirs))
    apart = torch.where(same, 0.0, (mine.to(torch.float64) - theirs.to(torch.float64)).abs())
    apart = torch.where(torch.isnan(apart), torch.inf, apart)
    finite = theirs[torch.isfinite(theirs)]
    size = float(finite.abs().max()) if scale is None and finite.numel() else scale or 0.0
    least = 1.0 if theirs.dtype == torch.float64 else torch.finfo(torch.float32).tiny
    flat = int(apart.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), apart.shape)]
    return Comparison(what, tuple(offsets), float(apart.flatten()[flat]), size, max(allowed * max(size, least), 1e-300),
                      f"{name}{index}")


def _checked(shared: SharedModel, comparison: Comparison) -> Comparison:
    if comparison.equal:
        return comparison
    model = type(shared.original).__name__
    if "in the model itself" in comparison.what:
        raise SharingError(f"{model} mixes the rows of a batch, so that a score depends on the other candidates; "
                           f"compute that a row, or outside the model ({comparison})")
    raise SharingError(f"the shared form of {model} is not the model: {comparison}; please report it with the model's "
                       "operators (shared.explain())")


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
