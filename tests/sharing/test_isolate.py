"""Isolated models against the formulas of generalized layer masking, and the contract on whatever is drawn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import semel
from benchmarks.zoo import zoo
from semel.sharing import IsolatedModel, SharingError, share
from semel.sharing.emission import Stage

R, C, D = 5, 3, 4       # request and candidate units (or fields), and the width of a field
ROWS = 7


class On(nn.Module):
    """``function(module, cat([request, candidate], 1))`` over layers given by name."""

    def __init__(self, function: Any, **layers: Any) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.5)
            for m in self.modules():
                if isinstance(m, nn.BatchNorm1d):
                    m.running_mean.normal_()
                    m.running_var.uniform_(0.5, 2)
        self.double().eval()

    def forward(self, request: Tensor, candidate: Tensor) -> Any:
        return self.function(self, torch.cat([request, candidate], dim=1))


def draw(*shape: int, rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, R, *shape, generator=generator, dtype=torch.float64),
            torch.randn(rows, C, *shape, generator=generator, dtype=torch.float64))


def isolated(model: nn.Module, inputs: tuple[Tensor, Tensor], **options: Any) -> IsolatedModel:
    return semel.isolate(model, inputs, ("request",), **options)


def check(model: nn.Module, inputs: tuple[Tensor, Tensor], expected: Any, **options: Any) -> IsolatedModel:
    """Both forms give ``expected`` (tensor or tuple), keep the contract, and have equal gradients of live weights."""
    forms = {keep: isolated(model, inputs, keep=keep, **options) for keep in ("compact", "masked")}
    expected = expected if isinstance(expected, tuple) else (expected,)
    gradients: dict[str, dict[str, Tensor]] = {}
    for keep, form in forms.items():
        got = form(*inputs)
        got = got if isinstance(got, tuple) else (got,)
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-10)
        assert form.verify() > 0
        weights = [torch.randn(g.shape, generator=torch.Generator().manual_seed(5), dtype=g.dtype) for g in got]
        sum((g * w).sum() for g, w in zip(got, weights, strict=True)).backward()
        gradients[keep] = {n: p.grad for n, p in form.named_parameters() if p.grad is not None}
    assert {n for n, _ in forms["masked"].named_parameters()} == {n for n, _ in model.named_parameters()}
    for name, gradient in gradients["compact"].items():
        piece = forms["compact"].pieces[name]
        torch.testing.assert_close(gradient, piece.of(gradients["masked"][piece.source]), rtol=1e-10, atol=1e-10)
    return forms["compact"]


def triangular(weight: Tensor, units: int, inputs: int = R) -> Tensor:
    mask = torch.ones_like(weight)
    mask[:units, inputs:] = 0
    return weight * mask


# ------------------------------------------------------------------------------------------ the layers, one by one
def test_cross_layers_become_rdcn() -> None:
    """x_r' = r0 * (Wrr x_r + b_r) + x_r; x_c' = c0 * (Wcr x_r + Wcc x_c + b_c) + x_c: the formula, not the code."""
    def forward(self: Any, x0: Tensor) -> Tensor:
        x = x0
        for layer in (self.first, self.second, self.third):
            x = x0 * layer(x) + x
        return self.out(x)

    model = On(forward, first=nn.Linear(R + C, R + C), second=nn.Linear(R + C, R + C), third=nn.Linear(R + C, R + C),
               out=nn.Linear(R + C, 1))
    inputs = draw()
    r0, c0 = r, c = inputs
    for layer in (model.first, model.second, model.third):
        w, b = layer.weight, layer.bias
        r, c = (r0 * (r @ w[:R, :R].T + b[:R]) + r,
                c0 * (r @ w[R:, :R].T + c @ w[R:, R:].T + b[R:]) + c)
    form = check(model, inputs, model.out(torch.cat([r, c], 1)))
    assert {name: len(units) for name, units in form.splits.items()} == {"first": R, "second": R, "third": R}
    live = 3 * (R * R + C * (R + C)) + 3 * (R + C) + (R + C) + 1
    assert sum(p.numel() for p in form.parameters()) == live
    report = form.explain()
    crosses = [node for node in report.nodes if node.operator == "linear"][:3]
    assert [node.candidate for node in crosses] == [2 * C * C] * 3      # rDCN: 2 L di^2 a candidate
    assert [node.request for node in crosses] == [2 * (R * R + R * C)] * 3


def test_a_tower_is_block_triangular_and_its_last_layer_whole() -> None:
    model = On(lambda self, x: self.c(torch.relu(self.b(torch.relu(self.a(x))))), a=nn.Linear(R + C, 8),
               b=nn.Linear(8, 4), c=nn.Linear(4, 2))
    inputs = draw()
    x = torch.cat(inputs, 1)
    h = torch.relu(F.linear(x, triangular(model.a.weight, 5), model.a.bias))        # 5/8 of 8
    h = torch.relu(F.linear(h, triangular(model.b.weight, 2, 5), model.b.bias))     # round(5/8 of 4)
    form = check(model, inputs, model.c(h))
    assert form.splits == {"a": tuple(range(5)), "b": (0, 1)}
    shapes = {name: tuple(p.shape) for name, p in form.named_parameters()}
    assert shapes["a.weight_request"] == (5, R) and shapes["a.weight_candidate"] == (3, R + C)
    assert shapes["c.weight"] == (2, 4)


def test_norms_by_side() -> None:
    model = On(lambda self, x: self.out(self.rms(self.norm(x))), norm=nn.LayerNorm(R + C),
               rms=nn.RMSNorm(R + C, eps=1e-6), out=nn.Linear(R + C, 1))
    inputs = draw()
    sides = []
    for x, s in zip(inputs, (slice(0, R), slice(R, None)), strict=True):
        x = F.layer_norm(x, x.shape[1:], model.norm.weight[s], model.norm.bias[s])
        sides.append(x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * model.rms.weight[s])
    check(model, inputs, model.out(torch.cat(sides, 1)))


def test_batch_norm_per_channel() -> None:
    model = On(lambda self, x: self.b(self.norm(self.a(x))), a=nn.Linear(R + C, 8), norm=nn.BatchNorm1d(8),
               b=nn.Linear(8, 1))
    inputs = draw()
    h = F.linear(torch.cat(inputs, 1), triangular(model.a.weight, 5), model.a.bias)
    check(model, inputs, model.b(model.norm(h)))


def test_compression_and_factorization_machine() -> None:
    """Wukong: columns of P that are the request's compress request fields only; rows of X meet them."""
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        compressed = self.compress(x.transpose(1, 2)).transpose(1, 2)
        pairs = x @ (x.transpose(1, 2) @ self.project)
        return self.out(compressed.flatten(1)), self.pairs(pairs.flatten(1))

    model = On(forward, compress=nn.Linear(R + C, 4, bias=False), project=nn.Parameter(torch.empty(R + C, 4)),
               out=nn.Linear(4 * D, 2), pairs=nn.Linear((R + C) * 4, 2))
    inputs = draw(D)
    x = torch.cat(inputs, 1)
    w, p = triangular(model.compress.weight, 2), triangular(model.project.T, 2).T
    check(model, inputs, (model.out((w @ x).flatten(1)), model.pairs((x @ (x.transpose(1, 2) @ p)).flatten(1))),
          split={"compress": 2, "project": 2})


def test_pairs_of_fields() -> None:
    """Pairs of two request fields are the request's; those that hold a candidate field serve candidate units only."""
    pairs = torch.triu_indices(R + C, R + C, offset=1)

    def forward(self: Any, x: Tensor) -> Tensor:
        dots = torch.bmm(x, x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.b(torch.relu(self.a(dots)))

    model = On(forward, a=nn.Linear(pairs.shape[1], 8), b=nn.Linear(8, 1))
    model.register_buffer("pairs", pairs, persistent=False)
    inputs = draw(D)
    x = torch.cat(inputs, 1)
    weight = model.a.weight.clone()
    permitted = (pairs < R).all(0)
    units = round(8 * int(permitted.sum()) / pairs.shape[1])
    weight[:units, ~permitted] = 0
    dots = (x @ x.transpose(1, 2))[:, pairs[0], pairs[1]]
    check(model, inputs, model.b(torch.relu(F.linear(dots, weight, model.a.bias))))


@pytest.mark.parametrize("written", [True, False])
def test_attention_is_masked(written: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if written:
            y = torch.softmax(q @ k.transpose(1, 2) / D**0.5, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.out((y + x).flatten(1))

    model = On(forward, q=nn.Linear(D, D), k=nn.Linear(D, D), v=nn.Linear(D, D), out=nn.Linear((R + C) * D, 1))
    inputs = draw(D)
    x = torch.cat(inputs, 1)
    seen = torch.ones(R + C, R + C, dtype=torch.bool)
    seen[:R, R:] = False
    weights = torch.softmax((model.q(x) @ model.k(x).transpose(1, 2) / D**0.5).masked_fill(~seen, float("-inf")), -1)
    form = check(model, inputs, model.out((weights @ model.v(x) + x).flatten(1)))
    assert form.splits == {}        # every token has a side; nothing was chosen


def test_heads_and_causal_mask() -> None:
    """With a causal mask and the candidate last, the isolated transformer is the transformer."""
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(-1, R + C, 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, R + C, D)
        return self.out((x + y)[:, -1])

    model = On(forward, norm=nn.LayerNorm(D), qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, 1))
    inputs = draw(D)
    form = check(model, inputs, model(*inputs))
    assert form.explain().shared > 0.5


def test_a_gate_serves_each_side_with_what_it_may_see() -> None:
    """Request units are gated by request values, candidate units by all of them."""
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.a(x * torch.sigmoid(self.gate(x)))))

    model = On(forward, gate=nn.Linear(R + C, 1), a=nn.Linear(R + C, 8), out=nn.Linear(8, 1))
    inputs = draw()
    r, c = inputs
    own = torch.sigmoid(F.linear(r, model.gate.weight[:, :R], model.gate.bias))
    both = torch.sigmoid(model.gate(torch.cat(inputs, 1)))
    h = F.linear(torch.cat([r * own, c * both], 1), triangular(model.a.weight, 5), model.a.bias)
    check(model, inputs, model.out(torch.relu(h)))


def test_pooling_has_two_versions() -> None:
    """Sums and softmax pooling over fields: hidden units of the request read what request fields give."""
    def forward(self: Any, x: Tensor) -> Tensor:
        pairs = x.sum(1).square() - x.square().sum(1)
        pooled = (torch.softmax(self.score(x), 1) * x).sum(1) + x.mean(1)
        return self.out(torch.relu(self.a(torch.cat([pairs, pooled], 1))))

    model = On(forward, score=nn.Linear(D, 1), a=nn.Linear(2 * D, 8), out=nn.Linear(8, 1))
    inputs = draw(D)

    def pooled(x: Tensor) -> Tensor:
        pairs = x.sum(1).square() - x.square().sum(1)
        return torch.cat([pairs, (torch.softmax(model.score(x), 1) * x).sum(1) + x.mean(1)], 1)

    w, b, units = model.a.weight, model.a.bias, [0, 1, 2]
    h = F.linear(pooled(torch.cat(inputs, 1)), w, b)
    h = torch.cat([F.linear(pooled(inputs[0]), w[:3], b[:3]), h[:, 3:]], 1)
    check(model, inputs, model.out(torch.relu(h)), split={"a": units})


def test_chunks_and_views_are_cut_alike() -> None:
    """A gated unit and its gate are on one side; so are all units of a field."""
    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = self.glu(x).chunk(2, -1)
        fields = self.fields(a * torch.sigmoid(b)).view(-1, 4, D)
        return self.out(self.norm(fields).flatten(1))

    model = On(forward, glu=nn.Linear(R + C, 16), fields=nn.Linear(8, 4 * D), norm=nn.LayerNorm(D),
               out=nn.Linear(4 * D, 1))
    form = isolated(model, draw())
    assert form.splits["glu"] == (0, 1, 2, 3, 4, 8, 9, 10, 11, 12)
    assert form.splits["fields"] == tuple(range(2 * D))
    assert form.verify() > 0


# ------------------------------------------------------------------------------------------ what users meet
def test_columns_in_any_order_and_names() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = nn.Embedding(9, 4)
            self.user = nn.Embedding(9, 4)
            self.a, self.b = nn.Linear(10, 6), nn.Linear(6, 1)

        def forward(self, X: Tensor) -> Tensor:
            fields = [self.item(X[:, 1].long()), X[:, :1], self.user(X[:, 2].long()), X[:, 3:4]]
            return self.b(torch.relu(self.a(torch.cat(fields, 1))))

    model = Wide().double().eval()
    X = torch.rand(6, 4, dtype=torch.float64) * 8
    form = semel.isolate(model, (X,), {"X": [0, 2]})
    assert form.pieces["a.weight_request"].columns == (4, 5, 6, 7, 8) and form.verify() > 0
    assert torch.equal(form(X=X[:3]), form(X[:3]))


def test_shared_through_all_its_depth() -> None:
    """DCNv2, isolated and shared, costs a candidate what rDCN costs; DCNv2 itself costs more."""
    from benchmarks.zoo_own import RDCN, DCNv2

    torch.manual_seed(0)
    request, candidate = 24, 4
    inputs = (torch.randn(6, request, dtype=torch.float64), torch.randn(6, candidate, dtype=torch.float64))
    model = DCNv2(request, candidate, (8,)).double().eval()
    form = isolated(model, inputs)
    shared = share(form, inputs, ("request",))
    shared.choices = {}                 # the shared form, however fast the original is at this size
    offsets = torch.tensor([0, 2, 2, 6])
    r, c = inputs[0][:3], inputs[1]
    owner = torch.tensor([0, 0, 2, 2, 2, 2])
    with torch.no_grad():
        torch.testing.assert_close(shared({"request": r}, {"candidate": c}, offsets), form(r[owner], c), rtol=1e-10,
                                   atol=1e-10)

    def per_candidate(model: Any) -> float:
        return sum(n.meta.get("flops", 0) for n in model._form().rewriter.emit.graph.nodes
                   if n.meta.get("stage") == Stage.CANDIDATE)

    rdcn = share(RDCN(request, candidate, (8,)).double().eval(), inputs, ("request",))
    exact = share(model, inputs, ("request",))
    assert per_candidate(shared) <= per_candidate(rdcn) < per_candidate(exact) / 2


def test_trains_with_dropout_and_batch_norm() -> None:
    model = On(lambda self, x: self.b(self.drop(torch.relu(self.norm(self.a(x))))), a=nn.Linear(R + C, 16),
               norm=nn.BatchNorm1d(16), drop=nn.Dropout(0.1), b=nn.Linear(16, 1))
    before = copy.deepcopy(model.state_dict())
    form = isolated(model, draw())
    inputs = draw(rows=64, seed=3)
    target = inputs[0].sum(1, keepdim=True) * inputs[1][:, :1]
    form.train()
    mean = form._tensor("norm.running_mean").clone()
    optimizer = torch.optim.Adam(form.parameters(), 0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.mse_loss(form(*inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(mean, form._tensor("norm.running_mean"))
    form.eval()
    assert torch.equal(form(*inputs), form(*inputs)) and form.verify() > 0
    for name, value in model.state_dict().items():     # the model itself is left alone
        assert torch.equal(value, before[name]), name
    again = isolated(model, draw())
    again.load_state_dict(form.state_dict())
    assert torch.equal(again.eval()(*inputs), form(*inputs))
    assert torch.equal(copy.deepcopy(form)(*inputs), form(*inputs))


def test_verify_sees_a_broken_contract() -> None:
    model = On(lambda self, x: self.b(torch.relu(self.a(x))), a=nn.Linear(R + C, 8), b=nn.Linear(8, 1))
    form = isolated(model, draw(), keep="masked")
    for name, buffer in form._graphs["in_eval"].module.named_buffers():
        assert name.startswith("constant")
        buffer.fill_(1)             # the mask is gone
    with pytest.raises(SharingError, match=r"request units of .* change with the candidate"):
        form.verify()
    request, candidate = draw()
    with pytest.raises(SharingError, match="give rows that differ"):
        isolated(model, (request, candidate[:1].expand(ROWS, -1)))


def test_explain_is_not_fooled() -> None:
    """With all units on the candidate's side the contract holds as well; the report says that nothing is shared."""
    model = On(lambda self, x: self.c(torch.relu(self.b(torch.relu(self.a(x))))), a=nn.Linear(R + C, 8),
               b=nn.Linear(8, 8), c=nn.Linear(8, 1))
    default, none = isolated(model, draw()), isolated(model, draw(), split={"a": 0})
    assert none.verify() >= 0
    deep = [node for node in none.explain().nodes if node.operator == "linear"][1]
    assert deep.request == 0 < none.explain().shared < default.explain().shared < 1
    assert default.explain().per_candidate(100) < none.explain().per_candidate(100)
    assert "linear" in str(default.explain()) and f"{default.explain().shared:.1%}" in str(default.explain())


def test_errors_name_the_choice() -> None:
    def ambiguous(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y * x + y * x.flip(1))

    model = On(ambiguous, a=nn.Linear(R + C, R + C), b=nn.Linear(R + C, R + C), c=nn.Linear(R + C, 1))
    model.function = lambda self, x: self.c(torch.relu(ambiguous(self, x)))
    with pytest.raises(SharingError, match=r"split=\{'a': n\}"):
        isolated(model, draw())
    assert isolated(model, draw(), split={"a": [0, 1, 3, 4]}).splits["a"] == (0, 1, 3, 4)
    plain = On(lambda self, x: self.b(torch.relu(self.a(x))), a=nn.Linear(R + C, 8), b=nn.Linear(8, 1))
    with pytest.raises(SharingError, match="split names 'nowhere'; modules with units of both sides are 'a'"):
        isolated(plain, draw(), split={"nowhere": 3})
    for bad in (9, -1, [0, 8], "all", True):
        with pytest.raises(SharingError, match="split"):
            isolated(plain, draw(), split={"a": bad})
    with pytest.raises(SharingError, match="keep is 'dense'"):
        isolated(plain, draw(), keep="dense")
    with pytest.raises(SharingError, match="nested like example_inputs"):
        isolated(plain, draw())([draw()[0]], draw()[1])


def test_an_operator_without_a_rule_is_refused() -> None:
    model = On(lambda self, x: self.a(torch.cumsum(x, 1)), a=nn.Linear(R + C, 1))
    with pytest.raises(SharingError, match=r"cumsum.*test_isolate.py.*no rule.*concatenate"):
        isolated(model, draw())
    # of one side alone, any operator will do
    model = On(lambda self, x: self.a(torch.cat([torch.cumsum(x[:, :R], 1), torch.cumsum(x[:, R:], 1)], 1)),
               a=nn.Linear(R + C, 1))
    assert isolated(model, draw()).verify() > 0


# ------------------------------------------------------------------------------------------ whatever is drawn
class Drawn(nn.Module):
    """Fields [B, F, D] through steps in any order, then a tower."""

    def __init__(self, steps: list[str], hidden: int) -> None:
        super().__init__()
        self.steps, fields = steps, R + C
        self.layers = nn.ModuleList()
        for step in steps:
            layer: nn.Module = nn.Identity()
            if step == "fields":
                layer = nn.Linear(fields, fields)
            elif step in ("width", "gate", "score"):
                layer = nn.Linear(D, D if step == "width" else 1)
            elif step in ("norm", "attention"):
                layer = nn.LayerNorm(D)
            elif step == "flat":
                layer = nn.Sequential(nn.Linear(fields * D, hidden), nn.ReLU(), nn.Linear(hidden, fields * D))
            elif step == "wide norm":
                layer = nn.LayerNorm(fields * D)
            elif step == "cross":
                layer = nn.Linear(fields * D, fields * D)
            elif step == "pairs":
                layer = nn.Linear(fields * fields, fields * D)
            elif step == "channels":
                layer = nn.BatchNorm1d(fields)
            self.layers.append(layer)
        self.tower = nn.Sequential(nn.Linear(fields * D + D, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, request: Tensor, candidate: Tensor) -> Tensor:
        x0 = x = torch.cat([request, candidate], 1)
        for step, layer in zip(self.steps, self.layers, strict=True):
            if step == "fields":
                x = layer(x.transpose(1, 2)).transpose(1, 2) + x
            elif step == "gate":
                x = x * torch.sigmoid(layer(x))
            elif step == "score":
                x = x + (torch.softmax(layer(x), 1) * x).sum(1, keepdim=True)
            elif step == "attention":
                y = layer(x)
                x = x + torch.softmax(y @ y.transpose(1, 2), -1) @ y
            elif step == "flat":
                x = x + layer(x.flatten(1)).view(x.shape)
            elif step == "wide norm":
                x = layer(x.flatten(1)).view(x.shape)
            elif step == "cross":
                x = (x0.flatten(1) * layer(x.flatten(1))).view(x.shape) + x
            elif step == "pairs":
                x = x + layer(torch.bmm(x, x.transpose(1, 2)).flatten(1)).view(x.shape)
            else:
                x = layer(x)
        return self.tower(torch.cat([x.flatten(1), x.sum(1)], 1))


STEPS = ("fields", "width", "gate", "score", "norm", "attention", "flat", "wide norm", "cross", "pairs", "channels")


def contract(steps: list[str], hidden: int) -> None:
    torch.manual_seed(len(steps) + hidden)
    model = Drawn(steps, hidden).double().eval()
    inputs = draw(D)
    compact, masked = (isolated(model, inputs, keep=keep) for keep in ("compact", "masked"))
    with torch.no_grad():
        torch.testing.assert_close(compact(*inputs), masked(*inputs), rtol=1e-10, atol=1e-10)
    assert compact.verify() > 0 and masked.verify() > 0
    assert 0 < compact.explain().shared < 1
    assert compact.explain().request == pytest.approx(masked.explain().request)
    shared = share(compact, inputs, ("request",), candidates_hint=1)
    shared.choices = {}                 # the shared form, however fast the original is at this size
    with torch.no_grad():
        got = shared({"request": inputs[0][:1]}, {"candidate": inputs[1]})
        torch.testing.assert_close(got, compact(inputs[0][:1].expand(ROWS, -1, -1), inputs[1]), rtol=1e-9, atol=1e-9)


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=4), hidden=st.integers(2, 12))
def test_contract(steps: list[str], hidden: int) -> None:
    contract(steps, hidden)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=5), hidden=st.integers(2, 12))
def test_contract_of_many(steps: list[str], hidden: int) -> None:
    contract(steps, hidden)


def test_a_sum_and_its_terms_under_one_layer() -> None:
    """Fields that hold a linear map of all fields, and their sum, read by one layer: axes of both kinds meet."""
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.both = nn.Linear(R * D, R * D), nn.Linear((R + C) * D, C * D)
            self.out = nn.Linear((R + C) * D + D, 2)

        def forward(self, request: Tensor, candidate: Tensor) -> Tensor:
            x = torch.cat([request, candidate], 1)
            y = x + torch.cat([self.own(request.flatten(1)), self.both(x.flatten(1))], 1).view(-1, R + C, D)
            return self.out(torch.cat([y.flatten(1), y.sum(1)], 1))

    model, inputs = Model().double().eval(), draw(D)
    shared = share(model, inputs, ("request",), candidates_hint=1)
    shared.choices = {}
    with torch.no_grad():
        got = shared({"request": inputs[0][:1]}, {"candidate": inputs[1]})
        torch.testing.assert_close(got, model(inputs[0][:1].expand(ROWS, -1, -1), inputs[1]), rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------------ models that others wrote
REFUSED = {"deepctr.DIEN": "data-dependent", "deepctr.DIEN-AUGRU": "data-dependent", "rechub.DIEN": "data-dependent",
           "deepctr.CCPM": "conv2d.*no rule"}       # convolves over neighbouring fields, whatever their side
ZOO = zoo(small=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str) -> None:
    model = ZOO[name]()
    if model.float64:
        model = model.double()
    inputs = model.example_inputs(6)
    if name in REFUSED:
        with pytest.raises(SharingError, match=REFUSED[name]):
            semel.isolate(model.module, inputs, model.request_inputs)
        return
    form = semel.isolate(model.module, inputs, model.request_inputs)
    assert form.verify() > 0
    assert 0.25 < form.explain().shared < 1
    scores = form(*inputs)
    assert scores.shape == model.module(*inputs).shape and bool(torch.isfinite(scores).all())
    assert float(scores.detach().std()) > 1e-4
