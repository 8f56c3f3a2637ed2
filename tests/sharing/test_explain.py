"""``explain``: costs of every operator, shared and before, against counts by hand and against torch's own counter."""

from __future__ import annotations

import json

import pytest
import torch
from models import check, costs, normal, shared_form, untimed
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from semel.sharing import SharingError, share


def first_layer(w: nn.Module, user: Tensor, item: Tensor) -> Tensor:
    return torch.relu(w.first(torch.cat([user, item], 1)))


def test_a_split_linear_layer_by_hand() -> None:
    shared = shared_form(first_layer, normal(2, 20), normal(7, 4), first=nn.Linear(24, 8))
    found = shared.explain()
    total = found.total
    assert total.flops_before == 2 * 24 * 8 + 8                     # the layer, ReLU
    assert total.flops_request == 2 * 20 * 8 + 8                    # its request columns, the bias
    assert total.flops_candidate == 2 * 4 * 8 + 8 + 8               # its candidate columns, the sum, ReLU
    assert found.ratio(100) == pytest.approx(100 * 392 / (328 + 100 * 80))
    by_name = {row.name: row for row in found.rows}
    assert [row.side for row in found.rows] == ["mixed", "candidate", "candidate"]
    assert by_name["relu"].cost.flops_candidate == 80 and by_name["linear"].cost.flops_before == 384
    assert not found.unshared
    assert by_name["cat"].place.endswith(": return self.function(self, user, item)")
    # bytes: the request's row is read, its part written, the bias added, and the sum read for the candidates
    assert total.bytes_request == 8 * ((20 + 8) + (8 + 8) + 8)
    assert total.bytes_before == 8 * ((20 + 4 + 24) + (24 + 8) + (8 + 8))


def test_the_sum_of_matrix_products_is_torchs() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.conv, self.last = nn.Linear(12, 6), nn.Conv1d(3, 5, 2, padding=1), nn.Linear(35, 4)

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            x = torch.cat([user, item], 1)                          # [B, 3, 6]
            y = torch.bmm(x, x.transpose(1, 2)).flatten(1)
            z = torch.einsum("bfd,gd->bfg", x, self.first.weight[:, :6]).flatten(1)
            a = torch.nn.functional.scaled_dot_product_attention(x, x, x).sum(1)
            return self.last(self.conv(x).flatten(1)) + self.first(torch.cat([a, a], 1))[:, :4] + y[:, :4] + z[:, :4]

    model, inputs = Model().eval(), (torch.randn(4, 2, 6), torch.randn(4, 1, 6))
    shared = untimed(model, inputs, request_inputs=("user",))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    products = {"linear", "conv1d", "bmm", "einsum"}
    counted = sum(row.cost.flops_before for row in shared.explain().rows if row.operator in products)
    attention = next(row for row in shared.explain().rows if row.operator == "scaled_dot_product_attention")
    assert attention.cost.flops_before == 3 * 3 * (2 * 6 + 2 * 6 + 3)
    assert counted + 3 * 3 * 4 * 6 == counter.get_total_flops() / 4


class Renorm(nn.Module):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return torch.relu(item) + torch.renorm(user, 2, 0, 1.0).sum(1, True)


class Listwise(nn.Module):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return torch.softmax(user + item, 0)


def test_an_operator_without_a_rule_is_named_with_its_line() -> None:
    shared = untimed(Renorm(), (normal(2, 5), normal(2, 3)), request_inputs=("user",))
    (row,) = shared.explain().unshared
    assert row.operator == "renorm" and row.reason == "no rule" and "torch.renorm(user, 2, 0, 1.0)" in row.place
    assert "test_explain.py:" in row.place
    assert "no rule" in str(shared.explain())


def test_what_the_output_does_not_need_does_not_count() -> None:
    def model(w: nn.Module, user: Tensor, item: Tensor) -> Tensor:
        both = torch.stack([w.big(user), w.big(user) * 0 + item], 1)
        return both[:, 1]

    shared = shared_form(model, normal(2, 4), normal(7, 4), big=nn.Linear(4, 4))
    request, candidate, before = costs(shared)
    assert before >= 2 * 2 * 4 * 4 and candidate <= 3 * 4
    assert request <= 2 * 4 * 4 + 4 * 4


def test_plain_data_and_text() -> None:
    shared = check(first_layer, normal(3, 20), normal(7, 4), first=nn.Linear(24, 8))
    found = shared.explain()
    data = json.loads(json.dumps(found.to_json()))
    assert data["model"] == "Function" and data["candidates_hint"] == 512 and len(data["rows"]) == 3
    assert data["total"]["flops_candidate"] == sum(row["flops_candidate"] for row in data["rows"]) == 80
    text = str(found)
    assert "392 FLOPs a candidate before, now 80 and 328 once a request: 4.86 x fewer" in text
    assert "relu" in text and max(map(len, text.splitlines())) <= 140


def test_long_tables_are_cut() -> None:
    def model(w: nn.Module, user: Tensor, item: Tensor) -> Tensor:
        x = torch.cat([user, item], 1)
        for _ in range(60):
            x = torch.relu(x)
        return x

    text = str(shared_form(model, normal(2, 2), normal(7, 2)).explain())
    assert "21 others" in text and len(text.splitlines()) < 60


def test_timings_are_shown_where_they_are_known() -> None:
    shared = shared_form(first_layer, normal(2, 20), normal(7, 4), first=nn.Linear(24, 8))
    assert shared.explain().timings() is None
    shared.choose([1, 8])
    found = shared.explain()
    text, data = str(found), found.to_json()["choices"]
    assert "The way taken" in text and "several requests" in text and "state cached" in text
    assert {(c["what"], c["several"], c["candidates"]) for c in data} == {
        (what, several, n) for what in ("call", "score") for several in (False, True) for n in (1, 8)} - {
        (what, True, 8) for what in ("call", "score")}
    assert all(c["way"] in c["seconds"] and c["way"] in text for c in data)


def test_constant_work_is_apart() -> None:
    def model(w: nn.Module, user: Tensor, item: Tensor) -> Tensor:
        return torch.cat([user, item], 1) @ (w.a @ w.b)

    shared = shared_form(model, normal(2, 6), normal(7, 2), a=normal(8, 5), b=normal(5, 3))
    found = shared.explain()
    assert found.constant_flops + found.total.flops_request > 0
    assert {row.side for row in found.rows if row.operator in ("mm", "matmul")} >= {"constant"} or found.constant_flops
    assert found.total.flops_candidate < found.total.flops_before + 3


def test_a_model_along_the_batch_is_refused() -> None:
    with pytest.raises(SharingError, match=r"softmax .*mixes the rows.*torch.softmax\(user \+ item, 0\)"):
        share(Listwise(), (normal(2, 4), normal(2, 4)), request_inputs=("user",))
