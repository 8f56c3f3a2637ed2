"""Attention over a request's tokens and a candidate's: what masks hide, what slices leave out, what softmax merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from semel.sharing import SharedModel, share
from semel.sharing.demand import push_slices

WIDTH, HEADS, STEPS = 16, 2, 12


class Tokens(nn.Module):
    """``history`` [B, STEPS], ``length`` [B], ``candidate`` [B] -> [B]: a first token, these, the candidate."""

    def __init__(self, mask: str, pick: int | None, layers: int = 2) -> None:
        super().__init__()
        self.mask, self.pick = mask, pick
        self.items = nn.Embedding(50, WIDTH)
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.feed_forward = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
                                          for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * layers))
        self.head = nn.Linear(WIDTH, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        if self.mask == "causal":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.mask == "padded":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])
        tokens = q.shape[2]
        both = torch.ones(tokens, tokens, dtype=torch.bool).tril() & seen[:, None, :]
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.mask == "silu":
            return F.silu(scores).masked_fill(~both[:, None], 0.0) @ v
        return scores.masked_fill(~both[:, None], float("-inf")).softmax(-1) @ v

    def forward(self, history: Tensor, length: Tensor, candidate: Tensor) -> Tensor:
        batch, steps = history.shape
        x = torch.cat([self.first.expand(batch, 1, WIDTH), self.items(history), self.items(candidate)[:, None]], 1)
        one = torch.ones(batch, 1, dtype=torch.bool)
        seen = torch.cat([one, torch.arange(steps) < length[:, None], one], 1)
        for i, (qkv, out, feed_forward) in enumerate(zip(self.qkv, self.out, self.feed_forward, strict=True)):
            projected = qkv(self.norms[2 * i](x)).chunk(3, -1)
            q, k, v = (t.view(batch, steps + 2, HEADS, -1).transpose(1, 2) for t in projected)
            x = x + out(self.attend(q, k, v, seen).transpose(1, 2).reshape(batch, steps + 2, WIDTH))
            x = x + feed_forward(self.norms[2 * i + 1](x))
        return self.head(x.mean(1) if self.pick is None else x[:, self.pick]).squeeze(1)


def inputs(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    length = torch.randint(0, STEPS + 1, (rows,), generator=draw)
    length[:1] = 0      # an empty history: all of it is hidden
    return torch.randint(0, 50, (rows, STEPS), generator=draw), length


def shared(mask: str, pick: int | None) -> tuple[Tokens, SharedModel]:
    torch.manual_seed(1)
    model = Tokens(mask, pick).double().eval()
    form = share(model, (*inputs(4), torch.arange(4)), request_inputs=("history", "length"))
    form.choices = {}  # the shared form, however fast the original is at this size
    return model, form


@pytest.mark.parametrize("pick", [0, -1, 5, None])
@pytest.mark.parametrize("mask", ["causal", "padded", "written out", "silu"])
def test_outputs_and_gradients_equal(mask: str, pick: int | None) -> None:
    model, form = shared(mask, pick)
    for offsets in ([0, 5], [0, 2, 2, 6]):
        history, length = inputs(len(offsets) - 1, seed=2)
        request, candidate = {"history": history, "length": length}, {"candidate": torch.arange(7, 7 + offsets[-1])}

        def gradients(scores: Tensor) -> list[Tensor]:
            model.zero_grad()
            (scores * torch.arange(1.0, len(scores) + 1)).sum().backward()
            return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

        expected, got = form.broadcast(request, candidate, offsets), form(request, candidate, offsets)
        assert float((got - expected).detach().abs().max()) < 1e-12
        for theirs, ours in zip(gradients(expected), gradients(got), strict=True):
            assert float((theirs - ours).abs().max()) < 1e-11


def work(call: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("mask", ["causal", "written out", "silu"])
def test_a_hidden_candidate_leaves_the_history_to_the_request(mask: str) -> None:
    """A candidate costs its own token at each layer, however long the history: projections of one token, not of all."""
    _, form = shared(mask, -1)
    history, length = inputs(1)
    candidate = {"candidate": torch.arange(40)}
    state = form.request({"history": history, "length": length})
    everything = work(lambda: form.broadcast({"history": history, "length": length}, candidate))
    assert work(lambda: form.score(state, candidate)) < everything / 8      # 14 tokens, of which it computes one
    assert not form._form().rewriter.unshared


def test_nobody_asks_a_token_that_nobody_reads() -> None:
    """The last layer of a model that reads one token of those that see the candidate is computed for that token."""
    _, one = shared("padded", 5)
    _, every = shared("padded", None)
    history, length = inputs(1)
    request, candidate = {"history": history, "length": length}, {"candidate": torch.arange(40)}
    states = [form.request(request) for form in (one, every)]
    a, b = (work(lambda form=form, state=state: form.score(state, candidate))
            for form, state in zip((one, every), states, strict=True))
    assert a < 0.7 * b


@pytest.mark.parametrize("pick", [0, 5, -1])
@pytest.mark.parametrize("mask", ["causal", "padded", "written out", "silu"])
def test_the_graph_computes_the_same_with_slices_moved(mask: str, pick: int) -> None:
    torch.manual_seed(1)
    model = Tokens(mask, pick).double().eval()
    example = (*inputs(4), torch.arange(4))
    rows = torch.export.Dim.DYNAMIC
    program = torch.export.export(model, example, dynamic_shapes=({0: rows},) * 3, strict=False).run_decompositions({})
    graph = program.graph
    push_slices(graph)
    graph.lint()
    module = torch.fx.GraphModule(program.graph_module, graph)
    held = {**program.state_dict, **program.constants}
    fixed = [held[spec.target] for spec in program.graph_signature.input_specs if spec.target is not None]
    given = (*inputs(6, seed=3), torch.arange(6))
    (got,) = module(*fixed, *given)
    assert float((got - model(*given)).detach().abs().max()) < 1e-12
    wide = [n for n in graph.nodes if n.target is torch.ops.aten.linear.default and n.meta["val"].shape[-1] == 64]
    assert [n.meta["val"].shape[1] for n in wide] == [STEPS + 2, 1]       # the second layer's, for one token
    assert all(n.meta.get("stack_trace") for n in wide)
