"""What an isolated model costs on each side."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from semel.sharing.export import place
from semel.sharing.isolation.walk import Walk


@dataclass(frozen=True)
class NodeCost:
    """FLOPs of one row: ``request`` once a request (on request units, and on their products with weights of candidate
    units), ``candidate`` for every candidate."""

    operator: str
    place: str
    request: float
    candidate: float


@dataclass(frozen=True)
class IsolationReport:
    """Of a model in which every unit is the candidate's, the contract holds too, and ``shared`` is 0."""

    nodes: tuple[NodeCost, ...]
    splits: dict[str, tuple[int, ...]]

    @property
    def request(self) -> float:
        return sum(node.request for node in self.nodes)

    @property
    def candidate(self) -> float:
        return sum(node.candidate for node in self.nodes)

    @property
    def shared(self) -> float:
        """The fraction of FLOPs that is paid once a request."""
        total = self.request + self.candidate
        return self.request / total if total else 0.0

    def per_candidate(self, candidates: int) -> float:
        """FLOPs a candidate, when a request has so many."""
        return self.candidate + self.request / candidates

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.shared:.1%} of the FLOPs are the request's")
        for column in ("operator", "request", "candidate", "shared"):
            table.add_column(column, justify="left" if column == "operator" else "right")
        table.add_column("place", overflow="fold")
        for node in self.nodes:
            total = node.request + node.candidate
            table.add_row(node.operator, f"{node.request:,.0f}", f"{node.candidate:,.0f}",
                          f"{node.request / total:.0%}" if total else "", node.place)
        table.add_row("total", f"{self.request:,.0f}", f"{self.candidate:,.0f}", f"{self.shared:.1%}", "")
        console = Console(width=140)
        with console.capture() as capture:
            console.print(table)
        return capture.get()


def report(walk: Walk) -> IsolationReport:
    costs: dict[fx.Node, list[float]] = {}
    for node in walk.writer.graph.nodes:
        origin, flops = node.meta.get("origin"), node.meta.get("flops", 0.0)
        if node.op == "call_function" and origin is not None and flops:
            cost = costs.setdefault(origin, [0.0, 0.0])
            once = node.meta.get("products", node.meta["share"])
            cost[0] += flops * once
            cost[1] += flops * (1 - once)
    nodes = tuple(NodeCost(str(n.target).removeprefix("aten.").rpartition(".")[0], place(n), *cost)
                  for n, cost in costs.items())
    return IsolationReport(nodes, dict(walk.splits))
