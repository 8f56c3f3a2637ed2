"""What public serving code shares today: the request's embeddings, looked up once and tiled to the candidates.

Everything behind the lookups runs for every candidate, as in the model. Made from the exported graph, so that it can
be run eagerly and compiled like the model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from benchmarks.zoo import export
from benchmarks.zoo_model import ZooModel, broadcast, split_inputs

EMBEDDING = torch.ops.aten.embedding.default


class InputTile(nn.Module):
    """``tile(inputs, offsets)`` -> scores of the model; ``inputs`` are the naive ones, one row a candidate.

    ``lookups``: how many lookups are done once a request. Parameters are the model's own.
    """

    def __init__(self, model: ZooModel) -> None:
        super().__init__()
        unlifted = export(model).module(check_guards=False)
        unlifted.graph.set_codegen(fx.graph.CodeGen())      # flat arguments
        self.graph = fx.GraphModule(unlifted, unlifted.graph)
        self.paths = [path for path, _ in pytree.tree_flatten_with_path(model.example_inputs(1))[0]]
        request_side = self._request_lookups(model)
        self.lookups = len(request_side)
        if request_side:
            self._tile(request_side)

    def _tile(self, nodes: list[fx.Node]) -> None:
        graph = self.graph.graph
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(last):
            rows = graph.placeholder("request_of_row")
        with graph.inserting_after(last):
            first = graph.placeholder("first_row")
        for node in nodes:
            with graph.inserting_before(node):
                index = graph.call_function(torch.index_select, (node.args[1], 0, first))
            node.args = (node.args[0], index, *node.args[2:])
            with graph.inserting_after(node):
                tiled = graph.call_function(torch.index_select, (node, 0, rows))
            node.replace_all_uses_with(tiled, delete_user_cb=lambda user, tiled=tiled: user is not tiled)
        self.graph.recompile()

    def flat(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        """Tensors in the order of the graph, whatever the order of keys in ``inputs``."""
        by_path = dict(pytree.tree_flatten_with_path(inputs)[0])
        return [by_path[path] for path in self.paths]

    def _request_lookups(self, model: ZooModel) -> list[fx.Node]:
        """Embedding lookups whose indices stay as they are when only the candidates change."""
        rows = 7
        request, _ = split_inputs(model, model.example_inputs(1, seed=1))
        seen: list[dict[str, Tensor]] = []
        for seed in (2, 3):
            _, candidate = split_inputs(model, model.example_inputs(rows, seed=seed))
            seen.append(lookups(self.graph, self.flat(broadcast(model, request, candidate, torch.tensor([0, rows])))))
        return [node for node in self.graph.graph.nodes if node.target is EMBEDDING
                and len(seen[0][node.name]) == rows and torch.equal(seen[0][node.name], seen[1][node.name])]

    def plan(self, inputs: tuple[Any, ...], offsets: Tensor) -> tuple[Any, ...]:
        """The graph's flat arguments; requests without candidates have no row."""
        sizes = offsets[1:] - offsets[:-1]
        present = sizes > 0
        flat = self.flat(inputs)
        if not self.lookups:
            return tuple(flat)
        return *flat, offsets[:-1][present], torch.repeat_interleave(sizes[present])

    def forward(self, *arguments: Tensor) -> Any:
        out = self.graph(*arguments)
        return out[0] if isinstance(out, (list, tuple)) and len(out) == 1 else out


@torch.no_grad()
def lookups(graph: fx.GraphModule, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Indices of every lookup of one run, by the name of its node."""
    found: dict[str, Tensor] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if n.target is EMBEDDING:
                found[n.name] = self.env[n.args[1]]
            return super().run_node(n)

    Watch(graph).run(*inputs)
    return found
