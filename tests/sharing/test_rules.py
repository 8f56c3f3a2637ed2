"""Rules against the model where they are easily got wrong: layouts, masks, folded axes, positions in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import check, close, costs, normal, shared_form, spread
from torch import Tensor, nn

USER, ITEM = normal(3, 6, 4, seed=1), normal(7, 2, 4, seed=2)      # fields


def joined(user: Tensor, item: Tensor) -> Tensor:
    return torch.cat([user, item], 1)


# ---------------------------------------------------------------------------------------------- norms
@pytest.mark.parametrize(("user_mean", "item_mean"), [(0, 0), (1000, 1000), (0, 1000), (1000, 0), (-300, 300)])
@pytest.mark.parametrize("widths", [(20, 10), (1, 50), (50, 1)])
def test_layer_norm_far_from_zero_in_float32(user_mean: float, item_mean: float, widths: tuple[int, int]) -> None:
    """As exact as the model's own float32, against float64."""
    def model(w: Any, user: Tensor, item: Tensor) -> Tensor:
        return w.last(w.norm(torch.cat([user, item], 1)))

    torch.manual_seed(0)
    width = sum(widths)
    parts = {"norm": nn.LayerNorm(width), "last": nn.Linear(width, 4)}
    user = (normal(1, widths[0], seed=1) + user_mean).float()
    item = (normal(6, widths[1], seed=2) + item_mean).float()
    shared = shared_form(model, user, item, **parts)
    with torch.no_grad():
        got, own = shared({"user": user}, {"item": item}), shared.original(user.expand(6, -1), item)
        exact = shared.original.double()(user.expand(6, -1).double(), item.double())
        scale = float(exact.abs().max())
        assert float((got - exact).abs().max()) <= 3 * float((own - exact).abs().max()) + 1e-6 * scale


NORMS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "each field": (lambda w, u, i: w.norm(joined(u, i)), {"norm": nn.LayerNorm(4)}),
    "fields and widths": (lambda w, u, i: w.norm(joined(u, i)), {"norm": nn.LayerNorm([8, 4])}),
    "without weights": (lambda w, u, i: F.layer_norm(joined(u, i).flatten(1), [32]), {}),
    "root mean square": (lambda w, u, i: F.rms_norm(joined(u, i).flatten(1), [32]), {}),
    "batch norm of fields": (lambda w, u, i: w.norm(joined(u, i)), {"norm": nn.BatchNorm1d(8)}),
    "batch norm of columns": (lambda w, u, i: w.norm(joined(u, i).flatten(1)), {"norm": nn.BatchNorm1d(32)}),
    "unit length": (lambda w, u, i: F.normalize(joined(u, i), dim=2), {}),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    model, parts = NORMS[name]
    check(model, USER, ITEM, **parts)


# ---------------------------------------------------------------------------------------------- attention and masks
def causal(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = joined(user, item)
    return F.scaled_dot_product_attention(x @ w.q, x @ w.k, x, is_causal=True)


def masked(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = joined(user, item)
    scores = (x @ w.q) @ (x @ w.k).transpose(1, 2)
    return torch.softmax(scores.masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf")), 2) @ x


def padded(w: Any, user: Tensor, item: Tensor) -> Tensor:
    """Tokens whose first number is negative are padding; a row may have none left but its own."""
    x = joined(user, item)
    allowed = (x[:, None, :, 0] > 0) | torch.eye(8, dtype=torch.bool)
    return F.scaled_dot_product_attention(x @ w.q, x @ w.k, x, attn_mask=allowed)


def all_masked(w: Any, user: Tensor, item: Tensor) -> Tensor:
    """Softmax of nothing but -inf is NaN in the model, and stays so."""
    scores = torch.where(user[:, :, 0] > 100, user[:, :, 1], float("-inf"))
    return torch.softmax(scores, 1)[:, :, None] * item.sum(1, keepdim=True)


def heads(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = joined(user, item)
    q, k, v = ((x @ m).view(-1, 8, 2, 2).transpose(1, 2) for m in (w.q, w.k, w.q))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 8, 4)


def heads_in_the_batch(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = joined(user, item)
    q, k = ((x @ m).view(-1, 8, 2, 2).transpose(1, 2).reshape(-1, 8, 2) for m in (w.q, w.k))
    out = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1) @ k
    return out.view(-1, 2, 8, 2).transpose(1, 2).flatten(2)


def tokens_first(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = joined(user, item).transpose(0, 1)
    q, k = (x @ w.q).transpose(0, 1), (x @ w.k).transpose(0, 1)
    return (torch.softmax(q @ k.transpose(1, 2), 2) @ x.transpose(0, 1)).transpose(0, 1)[-1]


def target_attention(w: Any, user: Tensor, item: Tensor) -> Tensor:
    q = item[:, :1].expand(-1, 6, -1)
    hidden = torch.sigmoid(w.first(torch.cat([q, user, q - user, q * user], 2)))
    return (hidden.sum(2, keepdim=True) * user).sum(1)


ATTENTION = {"q": normal(4, 4, seed=3), "k": normal(4, 4, seed=4)}


@pytest.mark.parametrize("model", [causal, masked, padded, heads, heads_in_the_batch, tokens_first],
                         ids=lambda m: m.__name__)
def test_attention(model: Any) -> None:
    check(model, USER, ITEM, **ATTENTION)


def test_a_row_that_sees_nothing_is_nan_in_both() -> None:
    shared = shared_form(all_masked, USER, ITEM)
    assert bool(shared.original(spread(USER, (0, 3, 3, 7)), ITEM).isnan().all())
    assert bool(shared({"user": USER[:1]}, {"item": ITEM}).isnan().all())


def test_target_attention_splits_its_first_layer() -> None:
    _, candidate, before = costs(check(target_attention, USER, ITEM, first=nn.Linear(16, 8)))
    assert candidate < 0.7 * before


# ---------------------------------------------------------------------------------------------- views and positions
def interleaved(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = torch.stack([user[:, 0], item[:, 0], user[:, 1], item[:, 1], user[:, 2]], 1)
    return torch.relu(w.layer(x.flatten(1)))


def interleaved_columns(w: Any, user: Tensor, item: Tensor) -> Tensor:
    u, i = user.flatten(1), item.flatten(1)
    x = torch.cat([u[:, :3], i[:, :1], u[:, 3:4], i[:, 1:], u[:, 4:]], 1)
    return torch.relu(w.layer(x[:, torch.arange(19, -1, -1)]))


def triangle(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = joined(user, item)
    i, j = torch.tril_indices(8, 8, -1)
    return w.layer(torch.bmm(x, x.transpose(1, 2))[:, i, j])


def pairs_by_field(w: Any, user: Tensor, item: Tensor) -> Tensor:
    """Two lists of fields, gathered and multiplied, as PNN and FiBiNET do."""
    x = joined(user, item)
    rows, columns = zip(*((a, b) for a in range(7) for b in range(a + 1, 8)), strict=True)
    return w.layer((x[:, list(rows)] * x[:, list(columns)]).sum(2))


def field_aware(w: Any, user: Tensor, item: Tensor) -> Tensor:
    """ONN: field a's vector for field b times field b's for a."""
    x = joined(user, item)[:, :, None] * w.aware
    a, b = torch.triu_indices(8, 8, 1)
    return (x[:, a, b] * x[:, b, a]).sum(2)


def axes_apart(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = joined(user, item)
    y = x[:, :, None] * x[:, None]                                      # [B, 8, 8, 4]
    return y[:, torch.arange(8), torch.arange(8)].sum(1) + y.transpose(1, 3)[:, :, 2:5, 7].sum(2)


def reshaped(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = joined(user, item)
    return torch.relu(x.view(-1, 2, 4, 4).transpose(1, 2).reshape(-1, 8, 4)).unflatten(2, (2, 2)).flatten(1, 2)


def cut_across(w: Any, user: Tensor, item: Tensor) -> Tensor:
    """A view whose new axis runs across the two sides."""
    return torch.relu(joined(user, item).flatten(1).view(-1, 2, 16)).sum(2)


def split_and_chunk(w: Any, user: Tensor, item: Tensor) -> Tensor:
    a, b, c = joined(user, item).split([3, 4, 1], 1)
    d, e = joined(user, item).chunk(2, 2)
    return torch.cat([a.sum(1), b.mean(1), c.flatten(1), d.amax(1), e.sum(1)], 1)


def repeated(w: Any, user: Tensor, item: Tensor) -> Tensor:
    u = user[:, :1].repeat(1, 2, 1) + item
    return torch.relu(u).unsqueeze(2).expand(-1, -1, 3, -1).mean(2).repeat_interleave(2, 1)


def flipped(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return joined(user, item).flip(1)[:, 1:] * user[:, :1]


VIEWS = {interleaved: {"layer": nn.Linear(20, 3)}, interleaved_columns: {"layer": nn.Linear(20, 3)},
         triangle: {"layer": nn.Linear(28, 3)}, pairs_by_field: {"layer": nn.Linear(28, 3)},
         field_aware: {"aware": normal(8, 8, 4, seed=7)}, axes_apart: {}, reshaped: {}, cut_across: {},
         split_and_chunk: {}, repeated: {}, flipped: {}}


@pytest.mark.parametrize("model", VIEWS, ids=lambda m: m.__name__)
def test_views_and_positions(model: Any) -> None:
    user = USER[:, :3] if model in (interleaved, interleaved_columns) else USER
    check(model, user, ITEM, **VIEWS[model])


# ---------------------------------------------------------------------------------------------- others
def convolution(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return (w.conv(user.transpose(1, 2)).amax(2) * item[:, 0]).sum(1)


def convolution_over_both(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return w.conv(joined(user, item).transpose(1, 2)).amax(2)


def recurrent(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return (w.rnn(user)[0][:, -1] * item[:, 0]).sum(1)


def recurrent_with_time_first(w: Any, user: Tensor, item: Tensor) -> Tensor:
    out, (hidden, _) = w.rnn(user.transpose(0, 1))
    return ((out[-1] + hidden[-1]) * item[:, 0]).sum(1)


def recurrent_over_both(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return w.rnn(joined(user, item))[0][:, -1]


def pooled(w: Any, user: Tensor, item: Tensor) -> Tensor:
    mask = (user[:, :, :1] > 0).to(user.dtype)
    mean = (user * mask).sum(1) / (mask.sum(1) + 1e-8)
    best = user.masked_fill(mask == 0, -1e9).amax(1)
    return torch.cat([mean, best, joined(user, item).mean(1), joined(user, item).amax(1)], 1)


def softmax_over_both(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = joined(user, item)
    return (torch.softmax(x @ w.score, 1)[:, :, None] * x).sum(1)


def statistics(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = joined(user, item)
    return torch.stack([x.var(1).sum(1), x.std(2).sum(1), torch.logsumexp(x, 1).sum(1), x.norm(dim=2).sum(1),
                        x.abs().prod(1).sum(1), x.argmax(1).sum(1).to(x.dtype), x.cumsum(1)[:, -1].sum(1)], 1)


def arithmetic(w: Any, user: Tensor, item: Tensor) -> Tensor:
    u, i = user.sum(1), item.sum(1)
    return torch.where(u > i, u / (1 + i.exp()), (2 - u) * i - u.pow(2) / 3) + torch.minimum(u, i).clamp(-1, 1) - i.sub(
        u, alpha=2) + torch.sqrt(u.square() + 1) * torch.ones_like(i) + i.new_zeros(i.shape[0], 4)


def scaled_fields(w: Any, user: Tensor, item: Tensor) -> Tensor:
    """Squeeze and excitation: a weight a field from all fields, then a layer over the weighted."""
    x = joined(user, item)
    return w.layer((x * torch.sigmoid(w.squeeze(x.mean(2)))[:, :, None]).flatten(1))


def outer_products(w: Any, user: Tensor, item: Tensor) -> Tensor:
    """One layer of CIN."""
    x = joined(user, item)
    return w.conv(torch.einsum("bhd,bmd->bhmd", x, x).flatten(1, 2)).sum(2)


OTHERS: dict[Any, dict[str, Any]] = {
    convolution: {"conv": nn.Conv1d(4, 4, 3)}, convolution_over_both: {"conv": nn.Conv1d(4, 4, 3, padding=1)},
    recurrent: {"rnn": nn.GRU(4, 4, batch_first=True)}, recurrent_with_time_first: {"rnn": nn.LSTM(4, 4, 2)},
    recurrent_over_both: {"rnn": nn.GRU(4, 4, batch_first=True)}, pooled: {},
    softmax_over_both: {"score": normal(4, seed=5)},
    statistics: {}, arithmetic: {}, scaled_fields: {"layer": nn.Linear(32, 3), "squeeze": nn.Linear(8, 8)},
    outer_products: {"conv": nn.Conv1d(64, 5, 1)}}


@pytest.mark.parametrize("model", OTHERS, ids=lambda m: m.__name__)
def test_other_operators(model: Any) -> None:
    check(model, USER, ITEM, **OTHERS[model])


@pytest.mark.parametrize("model", [convolution, recurrent, recurrent_with_time_first], ids=lambda m: m.__name__)
def test_what_is_the_requests_runs_once_a_request(model: Any) -> None:
    request, candidate, before = costs(shared_form(model, USER, ITEM, **OTHERS[model]))
    assert candidate <= 20 and before > 20 * candidate and request > 0.8 * before


def test_lookups_are_the_requests_or_the_candidates() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(9, 4, padding_idx=0), nn.Embedding(9, 1)

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            x = torch.cat([self.a(user), self.a(item)], 1)
            return (x[:, :5] * self.b(torch.cat([user, item], 1))[:, :5]).sum(1) + self.a(item[:, 0])

    from models import untimed

    torch.manual_seed(0)
    model = Lookup().double().eval()
    shared = untimed(model, (torch.ones(2, 3).long(), torch.ones(2, 2).long()), ["user"])
    user, item = torch.randint(9, (3, 3)), torch.randint(9, (7, 2))
    at = (0, 3, 3, 7)
    close(shared({"user": user}, {"item": item}, torch.tensor(at)), model(spread(user, at), item))
