"""What each operator of a model costs, shared and before, and why one could not be shared.

A row is an operator of the exported graph. What the shared form computes is charged to the operator that first needs
its value: a linear layer whose result stays an open sum costs nothing itself, the ReLU behind it pays. Only what the
outputs need counts. FLOPs and bytes are those of ``semel.sharing.cost``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx

from semel.sharing.choice import Choice
from semel.sharing.cost import VIEWS, flops_of, packet, row_bytes, row_flops
from semel.sharing.emission import Emitter, Stage, apply, rows, spread
from semel.sharing.export import place
from semel.sharing.lowering import reachable
from semel.sharing.values import Value

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from semel.sharing.shared import SharedModel

MOST_ROWS = 40
"""Rows of a printed table; the others, which cost less, are one line."""
_REQUESTS, _CANDIDATES = 3, 5  # rows with which shapes are worked out


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes: once per request, per candidate, and per candidate before (all of it for every candidate)."""

    flops_request: float = 0.0
    flops_candidate: float = 0.0
    flops_before: float = 0.0
    bytes_request: float = 0.0
    bytes_candidate: float = 0.0
    bytes_before: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def ratio(self, candidates: int) -> float:
        """FLOPs before over FLOPs shared, of a request with ``candidates``."""
        now = self.flops_request + candidates * self.flops_candidate
        return candidates * self.flops_before / now if now else math.inf if self.flops_before else 1.0


@dataclass(frozen=True)
class Row:
    """``side``: constant, request, candidate, or mixed (blocks of both). ``reason``: why it runs for every candidate on
    request-side values; ``place``: the line of the model's source."""

    name: str
    operator: str
    side: str
    place: str
    reason: str
    cost: Cost


@dataclass(frozen=True)
class Explanation:
    """``constant_flops``: once, whenever parameters change. ``choices``: the ways that were timed, by what is called
    (``call`` or ``score``) and whether for several requests."""

    model: str
    rows: tuple[Row, ...]
    candidates_hint: int
    constant_flops: float
    choices: Mapping[tuple[str, bool], tuple[Choice, ...]]

    @property
    def total(self) -> Cost:
        return sum((row.cost for row in self.rows), Cost())

    @property
    def unshared(self) -> tuple[Row, ...]:
        """Operators that had request-side values and no proof."""
        return tuple(row for row in self.rows if row.reason)

    def ratio(self, candidates: int | None = None) -> float:
        """FLOPs before over FLOPs shared, at ``candidates`` (``candidates_hint``) a request."""
        return self.total.ratio(self.candidates_hint if candidates is None else candidates)

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "candidates_hint": self.candidates_hint, "ratio": self.ratio(),
                "total": asdict(self.total), "constant_flops": self.constant_flops,
                "choices": [{"what": what, "several": several, **asdict(choice)}
                            for (what, several), choices in self.choices.items() for choice in choices],
                "rows": [{key: value for key, value in asdict(row).items() if key != "cost"} | asdict(row.cost)
                         for row in self.rows]}

    def table(self, most: int = MOST_ROWS) -> Table:
        """The operators that cost most (in the order of the model) and those that could not be shared."""
        from rich import box
        from rich.table import Table

        n = self.candidates_hint
        weight = {id(row): (bool(row.reason), max(row.cost.flops_before, row.cost.flops_candidate
                                                  + row.cost.flops_request / n)) for row in self.rows}
        costly = [row for row in self.rows if any(weight[id(row)])]
        kept = {id(row) for row in sorted(costly, key=lambda row: weight[id(row)], reverse=True)[:most]}
        shown = [row for row in self.rows if id(row) in kept]
        table = Table(title=self._title(), caption=self._caption(), box=box.SIMPLE_HEAD, title_justify="left",
                      caption_justify="left", show_footer=True, pad_edge=False)
        total, rest = self.total, sum((row.cost for row in self.rows if id(row) not in kept), Cost())
        table.add_column("operator", "all", overflow="fold")
        table.add_column("side")
        for name, key in (("FLOPs", "flops"), ("bytes", "bytes")):
            for when, words in (("request", "once a request"), ("candidate", "a candidate"), ("before", "before")):
                table.add_column(f"{name}\n{words}", short(getattr(total, f"{key}_{when}")), justify="right",
                                 no_wrap=True)
        table.add_column("not shared, because", overflow="fold")
        for row in shown:
            why = f"{row.reason}\n{row.place}" if row.reason else ""
            table.add_row(row.name, row.side, *map(short, asdict(row.cost).values()), why)
        others = len(self.rows) - len(shown)
        if others:
            table.add_row(f"{others} others", "", *map(short, asdict(rest).values()), "")
        return table

    def timings(self) -> Table | None:
        """The way taken at each number of candidates a request, and each way's milliseconds; None if none was timed."""
        from rich import box
        from rich.table import Table

        if not self.choices:
            return None
        sizes = sorted({choice.candidates for choices in self.choices.values() for choice in choices})
        table = Table(title="The way taken, and milliseconds of each, by candidates a request", box=box.SIMPLE_HEAD,
                      title_justify="left", pad_edge=False)
        table.add_column("")
        for size in sizes:
            table.add_column(f"{size:,}")
        for (what, several), choices in self.choices.items():
            cells = {c.candidates: "\n".join([c.way, *(f"{way} {1e3 * s:.3g}" for way, s in c.seconds.items())])
                     for c in choices}
            requests = "several requests" if several else "one request"
            table.add_row(f"{requests}\n{'state cached' if what == 'score' else 'state computed'}",
                          *(cells.get(size, "") for size in sizes))
        return table

    def _title(self) -> str:
        return (f"{self.model}: {short(self.total.flops_before)} FLOPs a candidate before, now "
                f"{short(self.total.flops_candidate)} and {short(self.total.flops_request)} once a request: "
                f"{self.ratio():.3g} x fewer at {self.candidates_hint} candidates")

    def _caption(self) -> str:
        return f"{short(self.constant_flops)} FLOPs once, when parameters change" if self.constant_flops else ""

    def __rich__(self) -> Group:
        from rich.console import Group

        return Group(*(table for table in (self.table(), self.timings()) if table is not None))

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        page = StringIO()
        Console(file=page, width=140, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def short(count: float) -> str:
    """A count with three digits: 1.23 M."""
    if count <= 0:
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


def explain(shared: SharedModel) -> Explanation:
    """The costs of ``shared`` in its present mode (train or eval)."""
    form = shared._form()
    rewriter, model = form.rewriter, form.model
    now, constant = emitted_costs(rewriter.emit, form.results, shared)
    found = []
    for node in model.graph.nodes:
        if node.op != "call_function" or not _tensor(node):
            continue
        before = Cost(flops_before=row_flops(node, model), bytes_before=row_bytes(node, model))
        found.append(Row(node.name, _operator(node), side(rewriter.values.get(node)), place(node),
                         rewriter.unshared.get(node, ""), now.pop(node, Cost()) + before))
    rest = sum(now.values(), Cost())
    if rest != Cost():
        found.append(Row("inputs", "", "mixed", "", "", rest))
    return Explanation(type(shared.original).__name__, tuple(found), shared.candidates, constant, dict(shared.choices))


def _tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value))


def _operator(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")


def side(value: Any) -> str:
    """Which side a value of the exported graph belongs to."""
    if isinstance(value, list):
        sides = {side(item) for item in value if item is not None}
        return sides.pop() if len(sides) == 1 else "mixed"
    if not isinstance(value, Value):
        return str(Stage.CANDIDATE)
    stages = {part.stage for part in value.parts.values()}
    return "mixed" if len(stages - {Stage.CONSTANT}) > 1 else str(max(stages))


def emitted_costs(emit: Emitter, outputs: Any, shared: SharedModel) -> tuple[dict[fx.Node | None, Cost], float]:
    """What the shared form computes, by the operator it is charged to, and the FLOPs that depend on parameters only."""
    live = reachable([node for node in outputs if isinstance(node, fx.Node)])
    shapes = emitted_shapes(emit, live, shared)
    costs: dict[fx.Node | None, Cost] = defaultdict(Cost)
    constant = 0.0
    for node in emit.graph.nodes:
        if node not in live or node.op != "call_function":
            continue
        stage, flops = node.meta["stage"], float(node.meta["flops"])
        count = {Stage.CONSTANT: 1, Stage.REQUEST: _REQUESTS, Stage.CANDIDATE: _CANDIDATES}[stage]
        if not flops and isinstance(shapes.get(node), Tensor):
            flops = flops_of(node, shapes) / count
        if stage == Stage.CONSTANT:
            constant += flops
            continue
        once, each = _bytes(node, shapes)
        if stage == Stage.REQUEST:
            costs[node.meta["origin"]] += Cost(flops_request=flops, bytes_request=once + each)
        else:
            costs[node.meta["origin"]] += Cost(flops_candidate=flops, bytes_request=once, bytes_candidate=each)
    return dict(costs), constant


def _bytes(node: fx.Node, shapes: Mapping[fx.Node, Any]) -> tuple[float, float]:
    """Read and written: of a request's tensors where the node is a candidate's, and of the node's own side."""
    if packet(node.target) in VIEWS or node.target is rows:
        return 0.0, 0.0
    count = {Stage.REQUEST: _REQUESTS, Stage.CANDIDATE: _CANDIDATES}
    once = each = 0.0
    for other in (node, *node.all_input_nodes):
        tensor, stage = shapes.get(other), other.meta["stage"]
        if not isinstance(tensor, Tensor) or stage == Stage.CONSTANT:
            continue
        amount = tensor.numel() * tensor.element_size() / count[stage]
        if stage == node.meta["stage"]:
            each += amount
        else:
            once += amount
    return once, each


def emitted_shapes(emit: Emitter, live: set[fx.Node], shared: SharedModel) -> dict[fx.Node, Any]:
    """Of every node a tensor of its shape without content; nodes whose shape cannot be worked out are left out."""
    known: dict[fx.Node, Any] = {}
    inputs = {item.name: item for item in shared.signature.inputs}
    with torch.no_grad():
        for node in emit.graph.nodes:
            if node not in live:
                continue
            if node.op == "get_attr":
                known[node] = emit.constants[str(node.target)].to("meta")
            elif node.op == "placeholder":
                kind, _, name = str(node.target).partition(":")
                known[node] = shared._tensor(name).to("meta") if kind == "parameter" else _input(inputs[name], kind)
            elif all(argument in known for argument in node.all_input_nodes):
                try:
                    known[node] = _result(node, known)
                except (RuntimeError, NotImplementedError, TypeError, ValueError):
                    continue  # no shape: its bytes are not counted
    return known


def _input(item: Any, kind: str) -> Tensor:
    request = kind == str(Stage.REQUEST)
    shape = [_REQUESTS if request else _CANDIDATES, *item.shape[1:]]
    if item.columns is not None:
        shape[1] = len(item.columns) if request else shape[1] - len(item.columns)
    return torch.empty(shape, dtype=item.dtype, device="meta")


def _result(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    args = cast("tuple[Any, ...]", fx.map_arg(node.args, known.__getitem__))
    kwargs = cast("dict[str, Any]", fx.map_arg(node.kwargs, known.__getitem__))
    target: Any = node.target
    if target is rows:
        return _CANDIDATES if args[0] == Stage.CANDIDATE else _REQUESTS
    if target is spread:
        return args[0].new_empty([_CANDIDATES, *args[0].shape[1:]])
    if target is apply:
        operator, state, equation, _ = args
        left, _, right = equation.partition("->")
        if left == "oi,...i":
            return state.new_empty([*state.shape[:-1], operator.shape[1]])
        first, _, second = left.partition(",")
        sizes = dict(zip(first + second, [*operator.shape[1:], *state.shape[1:]], strict=True))
        return state.new_empty([len(state), *(sizes[letter] for letter in right)])
    return target(*args, **kwargs)
