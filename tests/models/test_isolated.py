"""Isolated parts against masked modules that run per candidate, and the contract: request rows never see candidates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import FEATURES, config, encoders, make_batch
from torch import nn

from semel.models import Sides, make_model, reference
from semel.models.dcn import RDCNCrossNet, RDCNLayer
from semel.models.deep_cross_attention import CrossAttention
from semel.models.dhen import IsolatedCrossMember, IsolatedDHENLayer, IsolatedFieldAttention
from semel.models.final_mlp import BilinearFusion, IsolatedFusion
from semel.models.isolated import (
    IsolatedCompression,
    IsolatedHead,
    IsolatedLinear,
    IsolatedMLP,
    IsolatedNorm,
    IsolatedStack,
    owners,
)
from semel.models.wukong import IsolatedFactorizationBlock, IsolatedWukongLayer

TOLERANCE = 1e-10  # float64
DIM = 4
ISOLATED = ["rdcn", "isolated_wukong", "isolated_final_mlp", "isolated_dhen", "deep_cross_attention", "sequence_ranker"]

sizes = st.builds(Sides, st.integers(1, 4), st.integers(1, 4))
counts = st.lists(st.integers(0, 4), min_size=1, max_size=5)


def randomize(module, seed):
    """Every parameter drawn: no reference may pass because something is zero or one."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.7)
    return module.double()


def draw(seed, *shape):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=g).requires_grad_()


def owner_of(counts):
    offsets = torch.tensor([0, *counts]).cumsum(0)
    return owners(offsets, int(offsets[-1]))


def hold_together(module, masked, request, candidate, owner):
    """Outputs of both sides and all gradients; ``masked`` maps the whole units of each candidate to whole units."""
    own, mixed = module(request, candidate, owner)
    whole = masked(torch.cat([request[owner], candidate], 1))
    expected_own, expected = whole[:, : own.shape[1]], whole[:, own.shape[1] :]
    torch.testing.assert_close(mixed, expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(own[owner], expected_own, atol=TOLERANCE, rtol=TOLERANCE)
    if not len(owner):
        return
    up = draw(7, *mixed.shape).detach(), draw(8, *own.shape).detach()
    inputs = [request, candidate, *module.parameters()]
    got = torch.autograd.grad((mixed * up[0]).sum() + (own[owner] * up[1][owner]).sum(), inputs, allow_unused=True,
                              materialize_grads=True)
    wanted = torch.autograd.grad((expected * up[0]).sum() + (expected_own * up[1][owner]).sum(), inputs,
                                 allow_unused=True, materialize_grads=True)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def flat(inputs, outputs):
    module = IsolatedLinear(inputs, outputs)
    return module, lambda x: reference.masked_linear(module, x)


def deep(inputs, outputs):
    module = IsolatedMLP([inputs, Sides(3, 5), outputs])
    return module, lambda x: reference.masked_mlp(module, x)


def cross(inputs, outputs):
    module = RDCNCrossNet(inputs, 3)
    return module, lambda x: reference.masked_cross_net(module, x)


def stack(inputs, outputs):
    module = IsolatedStack([IsolatedMLP([inputs, outputs]), IsolatedLinear(outputs, inputs)])
    first, second = module.blocks
    return module, lambda x: reference.masked_linear(second, reference.masked_mlp(first, x))


@pytest.mark.parametrize("made", [flat, deep, cross, stack])
@settings(max_examples=25, deadline=None)
@given(inputs=sizes, outputs=sizes, counts=counts, seed=st.integers(0, 99))
def test_blocks_of_units_equal_masked_modules(made, inputs, outputs, counts, seed):
    module, masked = made(inputs, outputs)
    randomize(module, seed)
    request, candidate = draw(seed, len(counts), inputs.request), draw(seed + 1, sum(counts), inputs.candidate)
    hold_together(module, masked, request, candidate, owner_of(counts))


def compression(inputs, outputs):
    module = IsolatedCompression(inputs, outputs)
    return module, lambda x: reference.masked_compression(module, x)


def factorization(inputs, outputs):
    module = IsolatedFactorizationBlock(inputs, outputs, DIM, Sides(3, 2), [Sides(4, 3)], 0.0)
    return module, lambda x: reference.masked_factorization(module, x)


def wukong(inputs, outputs):
    module = IsolatedWukongLayer(inputs, outputs, DIM, Sides(2, 3), [Sides(4, 3)], 0.0)
    return module, lambda x: reference.masked_wukong_layer(module, x)


def cross_member(inputs, outputs):
    module = IsolatedCrossMember(inputs, DIM)
    return module, lambda x: reference.masked_cross_member(module, x)


def attention(inputs, outputs):
    module = IsolatedFieldAttention(DIM)
    return module, lambda x: reference.masked_field_attention(module, x, inputs)


def dhen(inputs, outputs):
    made = config("isolated_dhen", dim=DIM, members=("cross", "factorization", "attention", "linear"))
    module = IsolatedDHENLayer(inputs, made, [Sides(4, 3)])
    return module, lambda x: reference.masked_dhen_layer(module, x, inputs)


@pytest.mark.parametrize("made", [compression, factorization, wukong, cross_member, attention, dhen])
@settings(max_examples=25, deadline=None)
@given(inputs=sizes, outputs=sizes, counts=counts, seed=st.integers(0, 99))
def test_blocks_of_fields_equal_masked_modules(made, inputs, outputs, counts, seed):
    module, masked = made(inputs, outputs)
    randomize(module, seed)
    request = draw(seed, len(counts), inputs.request, DIM)
    candidate = draw(seed + 1, sum(counts), inputs.candidate, DIM)
    hold_together(module, masked, request, candidate, owner_of(counts))


@settings(max_examples=25, deadline=None)
@given(width=sizes, heads=st.integers(1, 3), counts=counts, seed=st.integers(0, 99))
def test_bilinear_fusion_is_the_whole_one(width, heads, counts, seed):
    width = width.times(heads)
    isolated = randomize(IsolatedFusion(width, heads, 2), seed)
    whole = BilinearFusion(width.total, heads, 2).double()
    order = reference.units_by_head(width, heads)
    linear = isolated.linear.layers[0]
    with torch.no_grad():
        whole.weight.copy_(isolated.weight)
        # Units of the isolated form lie by side, first stream then second; of the whole one by head, stream by stream.
        weight = torch.cat([linear.from_request.weight, linear.from_candidate.weight], 1)
        r, c = width.request, width.candidate
        first = torch.cat([weight[:, :r], weight[:, 2 * r : 2 * r + c]], 1)
        second = torch.cat([weight[:, r : 2 * r], weight[:, 2 * r + c :]], 1)
        whole.linear.weight.copy_(torch.cat([first[:, order], second[:, order]], 1))
        whole.linear.bias.copy_(linear.from_request.bias)
    owner = owner_of(counts)
    request = [draw(seed + i, len(counts), width.request) for i in (1, 2)]
    candidate = [draw(seed + i, sum(counts), width.candidate) for i in (3, 4)]
    got = isolated.candidate(*candidate, isolated.request(*request), owner)
    streams = [torch.cat([a[owner], b], 1)[:, order] for a, b in zip(request, candidate, strict=True)]
    wanted = whole(*streams)
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    if sum(counts):
        up = draw(9, *got.shape).detach()
        inputs = [*request, *candidate]
        for a, b in zip(torch.autograd.grad(got, inputs, up), torch.autograd.grad(wanted, inputs, up), strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_a_cross_layer_alone():
    layer = randomize(RDCNLayer(Sides(5, 3)), 0)
    request0, request, candidate0, candidate = draw(0, 2, 5), draw(1, 2, 5), draw(2, 4, 3), draw(3, 4, 3)
    owner = torch.tensor([0, 0, 1, 1])
    own, mixed = layer(request0, candidate0, request, candidate, owner)
    whole = reference.masked_cross_layer(layer, torch.cat([request0[owner], candidate0], 1),
                                         torch.cat([request[owner], candidate], 1))
    torch.testing.assert_close(torch.cat([own[owner], mixed], 1), whole, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", [k for k in ISOLATED if k != "sequence_ranker"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_models_equal_masked_models_in_outputs_and_gradients(kind, data):
    counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    lengths = [data.draw(st.integers(0, 6)) for _ in counts]
    batch = make_batch(lengths, counts, seed=data.draw(st.integers(0, 50)))
    made = config(kind, request_width=data.draw(st.sampled_from([0.5, 1.0, 2.5])),
                  candidate_width=data.draw(st.sampled_from([0.6, 1.0, 1.4])))
    torch.manual_seed(0)
    model = make_model(made, FEATURES, encoders()).double()
    model.tables.unknown_rate = 0.0
    batch.request["hour"], batch.candidate["year"] = batch.request["hour"].double(), batch.candidate["year"].double()
    got, wanted = model(batch), reference.masked_ranker(model, batch)
    assert got.shape == (sum(counts), 2)
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    if sum(counts):
        up = draw(3, *got.shape).detach()
        names, parameters = zip(*model.named_parameters(), strict=True)
        both = (torch.autograd.grad(x, parameters, up, allow_unused=True, materialize_grads=True)
                for x in (got, wanted))
        for name, a, b in zip(names, *both, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def leaves(state):
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, (list, tuple)):
        return [leaf for part in state for leaf in leaves(part)]
    return [leaf for part in vars(state).values() for leaf in leaves(part)]


@pytest.mark.parametrize(("kind", "encoder", "window"),
                         [(kind, "hstu", 0) for kind in ISOLATED]
                         + [("sequence_ranker", "transformer", 0), ("sequence_ranker", "hstu", 3),
                            ("deep_cross_attention", "transformer", 0)])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_perturbing_a_candidate_moves_nothing_else_by_a_bit(kind, encoder, window, data):
    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(sum))
    lengths = [data.draw(st.integers(0, 20)) for _ in counts]
    seed = data.draw(st.integers(0, 50))
    before, after = (make_batch(lengths, counts, seed=seed) for _ in range(2))
    chosen = data.draw(st.integers(0, sum(counts) - 1))
    after.candidate["item_id"][chosen] = before.candidate["item_id"][chosen] % 39 + 1
    after.candidate["year"][chosen] = 2011.0
    torch.manual_seed(1)
    # Wide, and far from zero: with few hidden units all of a candidate's may be dead, whatever it is.
    model = make_model(config(kind, encoder, window=window, hidden=(64, 64)), FEATURES, encoders()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    with torch.inference_mode():
        states, scores = zip(*((model.request(b.request), model(b)) for b in (before, after)), strict=True)
        assert all(torch.equal(a, b) for a, b in zip(*map(leaves, states), strict=True))
        assert leaves(states[0]), "nothing is computed once per request"
        kept = torch.arange(sum(counts)) != chosen
        assert torch.equal(scores[0][kept], scores[1][kept])
        assert not torch.equal(scores[0][chosen], scores[1][chosen])


@pytest.mark.parametrize("kind", ISOLATED)
def test_a_kept_state_scores_any_candidates(kind):
    model = make_model(config(kind), FEATURES, encoders()).eval()
    whole, part = make_batch([5, 0, 9], [3, 2, 4]), make_batch([5, 0, 9], [3, 2, 4])
    rows = torch.tensor([0, 2, 4, 8])
    genres = whole.candidate["genres"]
    part.candidate["item_id"], part.candidate["year"] = (whole.candidate[n][rows] for n in ("item_id", "year"))
    part.candidate["genres"] = type(genres).from_rows([genres[int(i)].numpy() for i in rows], dtype="int64").torch()
    with torch.inference_mode():
        state = model.request(whole.request)
        scores = model.score(state, part.candidate, torch.tensor([0, 2, 3, 4]))
        torch.testing.assert_close(scores, model(whole)[rows], atol=2e-6, rtol=0)
        nobody = {"item_id": rows[:0], "year": torch.empty(0), "genres": genres.slice(0, 0)}
        assert model.score(state, nobody, torch.zeros(4, dtype=torch.int64)).shape == (0, 2)
        with pytest.raises(ValueError, match="cover"):
            model.score(state, part.candidate, torch.tensor([0, 2, 3, 3]))


@pytest.mark.parametrize("kind", ISOLATED)
def test_the_request_side_is_computed_once_per_request(kind):
    model = make_model(config(kind), FEATURES, encoders()).eval()
    batch = make_batch([4, 3], [50, 70])
    rows = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, x, y: rows.append(x[0].shape[0]))
    with torch.inference_mode():
        state = model.request(batch.request)
        assert rows and max(rows) <= 7  # requests or events, never candidates
        rows.clear()
        model.score(state, batch.candidate, batch.candidate_offsets)
    assert rows and min(rows) >= 120  # candidates, never requests


def test_shapes_of_the_parts():
    norm = IsolatedNorm(Sides(3, 2))
    own, mixed = norm(torch.randn(2, 3), torch.randn(5, 2))
    assert own.shape == (2, 3) and mixed.shape == (5, 2)
    head = IsolatedHead(Sides(3, 2), [Sides(4, 4)], 6, 0.1).eval()
    empty, logits = head(torch.randn(2, 3), torch.randn(5, 2), torch.tensor([0, 0, 1, 1, 1]))
    assert empty.shape == (2, 0) and logits.shape == (5, 6)
    assert Sides(5, 3).share(8) == Sides(5, 3)
    assert Sides(5, 3).share(16, 2.0, 0.1) == Sides(20, 1)
    assert Sides(5, 3).share(16, multiple=4) == Sides(8, 8)
    with pytest.raises(ValueError, match="heads"):
        IsolatedFusion(Sides(3, 2), 2, 1)
    attention = CrossAttention(DIM, config("deep_cross_attention").encoder)
    assert attention.keys_values(torch.randn(6, 8), torch.tensor([0, 6])).keys.shape == (6, 2, 4)
