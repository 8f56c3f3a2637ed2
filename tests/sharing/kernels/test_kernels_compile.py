"""Kernels as operators: schemas, fake tensors, compile and export."""

import pytest
import torch
from kernel_checks import draw, offsets_of

from semel.sharing import kernels

CANDIDATES, HISTORY = [2, 0, 3], [4, 1, 0]


def attention(q, k, v, own, o, h):
    return kernels.broadcast_attention(q, k, v, o, h, own_k=own, own_v=own)


def pairs(request, candidate, o):
    return torch.cat([x.flatten() for x in kernels.pair_interaction(request, candidate, o)])


def cases(candidates, history):
    c, r, s = sum(candidates), len(candidates), sum(history)
    o, h = offsets_of(candidates), offsets_of(history)
    return {
        "gather_add": (kernels.gather_add, [*draw(0, (c, 3), (r, 3)), o]),
        "segment_sum": (kernels.segment_sum, [*draw(0, (c, 3)), o]),
        "linear_compression": (kernels.linear_compression, [*draw(0, (4, 2), (4, 3), (c, 2, 5), (r, 3, 5)), o]),
        "pair_interaction": (pairs, [*draw(0, (r, 3, 4), (c, 2, 4)), o]),
        "broadcast_attention": (attention, [*draw(0, (c, 2, 1, 4), (s, 1, 4), (s, 1, 4), (c, 1, 1, 4)), o, h]),
    }


NAMES = list(cases(CANDIDATES, HISTORY))


@pytest.mark.parametrize("name", NAMES)
def test_compiles_as_one_graph_and_trains(name):
    function, inputs = cases(CANDIDATES, HISTORY)[name]
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    tensors = [x for x in leaves if x.requires_grad]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, function):
        out = call(*leaves)
        results.append([out, *torch.autograd.grad(out, tensors, torch.cos(out.detach()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_exports_for_any_number_of_requests_and_candidates(name):
    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return cases(CANDIDATES, HISTORY)[name][0](*inputs)

    _, inputs = cases(CANDIDATES, HISTORY)[name]
    _, others = cases([1, 4, 0, 6], [2, 0, 3, 3])[name]
    dynamic = tuple({axis: torch.export.Dim.DYNAMIC for axis in range(x.dim()) if x.shape[axis] != y.shape[axis]}
                    for x, y in zip(inputs, others, strict=True))
    program = torch.export.export(Module(), tuple(inputs), dynamic_shapes=(dynamic,))
    assert any("semel." in str(node.target) for node in program.graph.nodes)
    for given in (inputs, others):
        torch.testing.assert_close(program.module()(*given), Module()(*given), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_operators_keep_the_rules_of_operators(name):
    """Schema, autograd registration, fake tensors' shapes and strides, dynamic shapes through AOT autograd."""
    _, inputs = cases(CANDIDATES, HISTORY)[name]
    if name == "pair_interaction":
        operator, arguments = torch.ops.semel.cross_pairs, inputs
    elif name == "broadcast_attention":
        q, k, v, own, o, h = inputs
        operator, arguments = torch.ops.semel.broadcast_attention, [q, k, v, own, own, o, h, "softmax", 0.5]
    else:
        operator, arguments = getattr(torch.ops.semel, name), inputs
    arguments = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                 for x in arguments]
    torch.library.opcheck(operator.default, tuple(arguments))
