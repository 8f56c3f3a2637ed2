"""``isolate``: a mixed model as one whose request units never see the candidate (generalized layer masking)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from semel.sharing.errors import SharingError
from semel.sharing.export import ModelGraph, export, place
from semel.sharing.inputs import Signature, signature_of
from semel.sharing.isolation.report import IsolationReport, report
from semel.sharing.isolation.sided import REQUEST
from semel.sharing.isolation.walk import Piece, Walk, walk
from semel.sharing.naming import tensor_named
from semel.sharing.shared import _place


class _Graph(nn.Module):
    """One graph (train or eval): what it reads, runs and updates."""

    def __init__(self, model: ModelGraph, walker: Walk) -> None:
        super().__init__()
        for name, value in walker.writer.constants.items():
            self.register_buffer(name, value, persistent=False)
        graph = walker.writer.graph
        graph.lint()
        for node in graph.nodes:  # not the model's own graph, which would be kept and copied with it
            origin = node.meta.get("origin")
            node.meta = {"sides": node.meta.get("sides"), "place": "" if origin is None else place(origin)}
        self.module = fx.GraphModule(self, graph)
        self.reads = [walker.pieces[n].name if n in walker.pieces else None
                      for n in graph.nodes if n.op == "placeholder"]
        self.updates = list(model.mutated.values())
        self.spec = model.out_spec


class IsolatedModel(nn.Module):
    """Called like the model that it was made from, one row a candidate; an ordinary module with its own parameters.

    ``splits``: the request's units of each module that has some of both sides. ``pieces``: how each parameter is cut
    from one of the original model.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], signature: Signature,
                 split: Mapping[str, Any], compact: bool) -> None:
        super().__init__()
        self.signature = signature
        self._example = (args, dict(kwargs))
        self._called = inspect.signature(model.forward)
        tensors: dict[str, Tensor] = {**dict(model.named_parameters(remove_duplicate=False)),
                                      **dict(model.named_buffers(remove_duplicate=False))}
        self.splits: dict[str, tuple[int, ...]] = {}
        self.pieces: dict[str, Piece] = {}
        graphs: dict[bool, _Graph] = {}
        was = model.training
        try:
            for mode in (False, True):
                model.train(mode)
                graph = export(model, args, kwargs)
                walker, _ = walk(graph, signature, tensors.__getitem__, compact, split)
                pieces = {piece.name: piece for piece in walker.pieces.values()}
                # what both modes read must be cut alike
                if mode and any(self.pieces.get(name, piece) != piece for name, piece in pieces.items()):
                    raise SharingError(f"{type(model).__name__} computes other things in train mode than in eval mode; "
                                       "name the units with split")
                self.splits.update(walker.splits)
                self.pieces.update(pieces)
                if not mode:
                    self._report = report(walker)
                graphs[mode] = _Graph(graph, walker).to(_device(args, kwargs))
        finally:
            model.train(was)
        unknown = [key for key in split if key not in self.splits]
        if unknown:
            raise SharingError(f"split names {', '.join(map(repr, unknown))}; modules with units of both sides are "
                               f"{', '.join(map(repr, self.splits)) or 'none'}")
        if not compact:  # all names, also of what no output depends on
            self.pieces.update({name: Piece(name, name) for name in tensors if name not in self.pieces})
        persistent = set(model.state_dict(keep_vars=True))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        made: dict[tuple[int, Piece], nn.Parameter] = {}
        for piece in self.pieces.values():
            source = tensors[piece.source]
            if piece.source in parameters:
                key = (id(source), Piece("", "", piece.rows, piece.columns))
                if key not in made:
                    made[key] = nn.Parameter(piece.of(source.detach()).clone(), requires_grad=source.requires_grad)
                _place(self, piece.name, made[key], True)
            else:
                _place(self, piece.name, source.detach().clone(), piece.source in persistent)
        self._graphs = nn.ModuleDict({"in_train" if mode else "in_eval": graph for mode, graph in graphs.items()})
        self.training = was

    @property
    def forward(self) -> Any:  # type: ignore[override]  # a property, so that it has the signature of the model's
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        forward.__signature__ = self._called  # type: ignore[attr-defined]
        return forward

    def _graph(self) -> Any:
        return self._graphs["in_train" if self.training else "in_eval"]

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        if not self._example[1]:  # positional ones may come by name
            bound = self._called.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec != self.signature.spec:
            raise SharingError(f"the inputs must be nested like example_inputs: {self.signature.spec}; got {spec}")
        for i, known in self.signature.fixed.items():
            if leaves[i] != known:
                raise SharingError(f"an input that is no tensor is {leaves[i]!r}; the model was isolated for {known!r}")
        return [leaf for i, leaf in enumerate(leaves) if i not in self.signature.fixed]

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        graph = self._graph()
        inputs = iter(self._inputs(args, kwargs))
        # what is updated is read from a copy, which the backward pass can keep
        results = graph.module(*(next(inputs) if name is None else self._tensor(name).clone() if name in graph.updates
                                 else self._tensor(name) for name in graph.reads))
        kept = len(results) - len(graph.updates)
        for name, value in zip(graph.updates, results[kept:], strict=True):
            with torch.no_grad():
                self._tensor(name).copy_(value)
        return pytree.tree_unflatten(list(results[:kept]), graph.spec)

    def _tensor(self, name: str) -> Tensor:
        return tensor_named(self, name)

    def verify(self, trials: int = 4, seed: int = 0) -> int:
        """Proves the contract by trying: candidate inputs change, every request unit of every node keeps its bits.

        Candidate inputs are drawn from the rows of ``example_inputs`` column by column. Returns how many nodes with
        request units were compared; SharingError names the first one that moved.
        """
        args, kwargs = self._example
        leaves = pytree.tree_flatten((args, dict(kwargs)))[0]
        tensors = [leaf for i, leaf in enumerate(leaves) if i not in self.signature.fixed]
        generator = torch.Generator().manual_seed(seed)
        graph: Any = self._graphs["in_eval"]
        checked = 0
        with torch.no_grad():
            for _ in range(trials):
                first = self._drawn(tensors, None, generator)
                for _again in range(16):  # a few rows may be drawn alike
                    second = self._drawn(tensors, first, generator)
                    moved = any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
                    if moved:
                        break
                else:
                    raise SharingError("all rows of example_inputs are equal on the candidate side; "
                                       "give rows that differ")
                a, b = (_Recorder(graph.module).values(self._given(graph, x)) for x in (first, second))
                checked = 0
                for node, value in a.items():
                    sides = node.meta.get("sides")
                    if not isinstance(value, Tensor) or sides is None or not bool((sides == REQUEST).any()):
                        continue
                    if node.op == "call_function" and sides.shape == value.shape:
                        checked += 1
                        mine = sides == REQUEST
                        same = (value == b[node]) | (value != value) & (b[node] != b[node])
                        if not bool(same[mine].all()):
                            raise SharingError(f"request units of {node.name} change with the candidate "
                                               f"({node.meta['place'] or node.target})")
        return checked

    def _drawn(self, tensors: list[Tensor], like: list[Tensor] | None, generator: torch.Generator) -> list[Tensor]:
        """Two rows of each input, drawn from the example's; the request side as in ``like``."""
        from semel.sharing.emission import Stage
        from semel.sharing.isolation.sided import ROWS

        out = []
        for i, (item, tensor) in enumerate(zip(self.signature.inputs, tensors, strict=True)):
            rows = len(tensor)
            flat = tensor.reshape(rows, -1)
            index = torch.randint(0, rows, (ROWS, flat.shape[1]), generator=generator).to(tensor.device)
            drawn = flat.gather(0, index).reshape(ROWS, *tensor.shape[1:])
            if like is not None and item.stage == Stage.REQUEST:
                drawn = like[i]
            elif like is not None and item.columns is not None:
                columns = torch.from_numpy(item.columns).to(tensor.device)
                drawn = drawn.index_copy(1, columns, like[i].index_select(1, columns))
            out.append(drawn)
        return out

    def _given(self, graph: Any, inputs: list[Tensor]) -> list[Tensor]:
        rest = iter(inputs)
        return [next(rest) if name is None else self._tensor(name) for name in graph.reads]

    def explain(self) -> IsolationReport:
        """Of each node and in total: floating-point operations on request units (once a request) and on the rest."""
        return self._report


def _device(args: Any, kwargs: Any) -> Any:
    return next(leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


class _Recorder(fx.Interpreter):
    def values(self, inputs: list[Tensor]) -> dict[fx.Node, Any]:
        self.found: dict[fx.Node, Any] = {}
        self.run(*inputs)
        return self.found

    def run_node(self, n: fx.Node) -> Any:
        self.found[n] = value = super().run_node(n)
        return value


def isolate(model: nn.Module, example_inputs: Any, request_inputs: Iterable[str] | Mapping[str, Any],
            split: Mapping[str, int | Iterable[int]] | None = None, keep: str = "compact",
            example_kwargs: Mapping[str, Any] | None = None) -> IsolatedModel:
    """``model`` under the contract "request units never see the candidate": another model, which must be trained.

    Weights become block lower triangular, norms are taken by side, attention is masked, pairs of fields that hold a
    candidate field are the candidate's; then ``share`` computes the request side once, through all its depth (ROCS,
    arXiv 2607.27744, section 3.1; docs/isolate.md). The result starts from the model's weights and is called like it.

    ``example_inputs``, ``request_inputs``: as ``share`` takes them; give rows that differ, ``verify`` draws from them.
    ``split``: module name -> how many of its units (the first) are the request's, or their positions; by default those
    that line up with a residual, else the request's share of the inputs. ``keep``: ``compact`` drops weights that would
    be zero, ``masked`` keeps shapes and names of the model's parameters and multiplies by zero.

    Raises SharingError for an operator without a rule, for units whose side is ambiguous, and should ``verify`` find a
    request unit that moves with the candidate; it names place and remedy.
    """
    if keep not in ("compact", "masked"):
        raise SharingError(f"keep is {keep!r}; it must be 'compact' or 'masked'")
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(example_inputs)
    else:
        args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        kwargs = dict(example_kwargs or {})
    signature = signature_of(model, args, kwargs, request_inputs)
    made = IsolatedModel(model, args, kwargs, signature, dict(split or {}), keep == "compact")
    made.verify(trials=1)
    return made
