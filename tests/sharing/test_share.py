"""What ``share`` takes: names, paths, columns, outputs, empty calls; and one clear SharingError for what it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import close, normal, spread, untimed
from torch import Tensor, nn

import semel
from semel.batch import RequestBatch
from semel.sharing import SharedModel, SharingError, share

OFFSETS = (0, 3, 3, 7)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 2)

    def forward(self, user: Tensor, item: Tensor, *, scale: Tensor | None = None) -> Tensor:
        out = self.last(torch.relu(self.first(torch.cat([user, item], 1))))
        return out if scale is None else out * scale[:, None]


class Nested(nn.Module):
    """Dicts in lists, and a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3)

    def forward(self, features: dict[str, Any], weight: float) -> dict[str, Any]:
        a, b = features["fields"]
        e = self.table(features["ids"]["user"]) * self.table(features["ids"]["item"])
        return {"score": (e.sum(1) + (a * b).sum(1)) * weight, "parts": (e, a + b), "name": "nested"}


@pytest.fixture(scope="module")
def two() -> SharedModel:
    torch.manual_seed(0)
    return untimed(Two().double().eval(), (normal(2, 4), normal(2, 3)), request_inputs=["user"])


def sides(rows: int = 3, candidates: int = 7) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return {"user": normal(rows, 4, seed=1)}, {"item": normal(candidates, 3, seed=2)}


def test_public_names() -> None:
    assert semel.share is share
    with pytest.raises(SharingError, match="mode 'fast' is none of exact"):
        share(Two(), (torch.ones(2, 4), torch.ones(2, 3)), ["user"], mode="fast")
    with pytest.raises(SharingError, match="candidates_hint must be at least 1, got 0"):
        share(Two(), (torch.ones(2, 4), torch.ones(2, 3)), ["user"], candidates_hint=0)


def test_the_three_ways_to_call(two: SharedModel) -> None:
    request, candidate = sides()
    offsets = torch.tensor(OFFSETS)
    expected = two.original(spread(request["user"], OFFSETS), candidate["item"])
    close(two(request, candidate, offsets), expected)
    close(two(request, candidate, list(OFFSETS)), expected)
    close(two.score(two.request(request), candidate, offsets), expected)
    close(two.broadcast(request, candidate, offsets), expected)
    batch = RequestBatch(np.array(["a", "b", "c"], dtype=object), request, candidate, offsets)
    close(two(batch), expected)
    one = {"user": request["user"][:1]}
    close(two(one, candidate), two.original(spread(one["user"], (0, 7)), candidate["item"]))


def test_pages_of_candidates_are_scored_from_one_state(two: SharedModel) -> None:
    request, candidate = sides(1, 20)
    state = two.request(request)
    pages = [two.score(state, {"item": candidate["item"][at : at + 6]}) for at in range(0, 20, 6)]
    close(torch.cat(pages), two(request, candidate))
    assert state.nbytes > 0 and state.requests == 1


@pytest.mark.parametrize(("rows", "offsets"), [(0, [0]), (1, [0, 0]), (3, [0, 0, 0, 0]), (3, [0, 0, 2, 2]),
                                               (2, [0, 1, 1])])
def test_empty_requests_and_no_candidates(two: SharedModel, rows: int, offsets: list[int]) -> None:
    request, candidate = sides(rows, offsets[-1])
    got = two(request, candidate, torch.tensor(offsets))
    assert got.shape == (offsets[-1], 2) and got.dtype == torch.float64
    if offsets[-1]:
        close(got, two.original(spread(request["user"], offsets), candidate["item"]))
    close(two.score(two.request(request), candidate, torch.tensor(offsets)), got)


def test_the_models_parameters_are_shared_ones(two: SharedModel) -> None:
    model = two.original
    assert set(two.state_dict()) == set(model.state_dict())
    assert all(a is b for a, b in zip(two.parameters(), model.parameters(), strict=True))
    request, candidate = sides()
    before = two(request, candidate, torch.tensor(OFFSETS))
    with torch.no_grad():
        model.last.bias.add_(1.0)
    close(two(request, candidate, torch.tensor(OFFSETS)), before + 1.0)


def test_keywords_and_their_names() -> None:
    torch.manual_seed(0)
    model = Two().double().eval()
    example = {"user": normal(2, 4), "item": normal(2, 3), "scale": normal(2)}
    shared = untimed(model, example, request_inputs="user")
    request, candidate = sides()
    candidate["scale"] = normal(7, seed=3)
    expected = model(spread(request["user"], OFFSETS), candidate["item"], scale=candidate["scale"])
    close(shared(request, candidate, torch.tensor(OFFSETS)), expected)
    mixed = untimed(model, (example["user"], example["item"]), ["scale", "user"], example_kwargs={"scale": normal(2)})
    request["scale"] = normal(3, seed=3)
    expected = model(spread(request["user"], OFFSETS), candidate["item"], scale=spread(request["scale"], OFFSETS))
    close(mixed(request, {"item": candidate["item"]}, torch.tensor(OFFSETS)), expected)


def nested_features(rows: int, seed: int) -> dict[str, Any]:
    ids = torch.randint(9, (2, rows), generator=torch.Generator().manual_seed(seed))
    return {"ids": {"user": ids[0], "item": ids[1]},
            "fields": [normal(rows, 5, seed=seed), normal(rows, 5, seed=seed + 1)]}


@pytest.mark.parametrize("names", [("features.ids.user", "features.fields.0"),
                                   (("features", "ids", "user"), ("features", "fields", 0))])
def test_paths_into_dicts_and_lists(names: Any) -> None:
    torch.manual_seed(0)
    model = Nested().double().eval()
    shared = untimed(model, (nested_features(2, 0), 2.0), names)
    request, candidate = nested_features(3, 4), nested_features(7, 6)
    got = shared({"features": {"ids": {"user": request["ids"]["user"]}, "fields": {"0": request["fields"][0]}}},
                 {"features.ids.item": candidate["ids"]["item"], "features.fields.1": candidate["fields"][1]},
                 torch.tensor(OFFSETS))
    whole = {"ids": {"user": spread(request["ids"]["user"], OFFSETS), "item": candidate["ids"]["item"]},
             "fields": [spread(request["fields"][0], OFFSETS), candidate["fields"][1]]}
    expected = model(whole, 2.0)
    assert got["name"] == "nested" and isinstance(got["parts"], tuple)
    for a, b in ((got["score"], expected["score"]), *zip(got["parts"], expected["parts"], strict=True)):
        close(a, b)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, X: Tensor) -> Tensor:
        return torch.relu(self.layer(X)).sum(1) + X[:, ::2].prod(1)


@pytest.mark.parametrize("columns", [slice(0, 4), [0, 2, 5], [-1, 0], slice(None, None, 2), np.array([3])])
def test_columns_of_one_wide_tensor(columns: Any) -> None:
    torch.manual_seed(0)
    model = Wide().double().eval()
    shared = untimed(model, (normal(2, 6),), {"X": columns})
    chosen = np.arange(6)[columns].tolist()     # in the order given
    others = [c for c in range(6) if c not in chosen]
    whole, user = normal(7, 6, seed=2), normal(3, 6, seed=3)
    whole[:, chosen] = spread(user, OFFSETS)[:, chosen]
    close(shared({"X": user[:, chosen]}, {"X": whole[:, others]}, torch.tensor(OFFSETS)), model(whole))


class Strided(nn.Module):
    """A constant that does not lie in one piece."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        weights = torch.arange(8, dtype=torch.float64)[::2]
        if plain:
            self.weights = weights
        else:
            self.register_buffer("weights", weights)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (torch.cat([user, item], 1) * self.weights).sum(1)


@pytest.mark.parametrize("plain", [True, False])
def test_constants_of_any_layout(plain: bool) -> None:
    model = Strided(plain).eval()
    shared = untimed(model, (normal(2, 3), normal(2, 1)), request_inputs=["user"])
    user, item = normal(2, 3, seed=1), normal(5, 1, seed=2)
    close(shared({"user": user}, {"item": item}, [0, 2, 5]), model(spread(user, [0, 2, 5]), item))



@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shared = untimed(Two().to(dtype).eval(), (normal(2, 4, dtype=dtype), normal(2, 3, dtype=dtype)), ["user"])
    request, candidate = ({k: v.to(dtype) for k, v in side.items()} for side in sides())
    got = shared(request, candidate, torch.tensor(OFFSETS))
    expected = shared.original(spread(request["user"], OFFSETS), candidate["item"])
    assert got.dtype == dtype
    close(got, expected, {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype])


# ------------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(("names", "says"), [
    (["usr"], "request_inputs name 'usr'; the model's inputs are user, item"),
    ([], "no input belongs to the request.*the inputs are user, item"),
    (["user", "item"], "no input belongs to the candidate: all of user, item"),
    ({"user": [0, 9]}, "the columns of 'user' run from 0 to 9; it has 4"),
    ({"user": "ab"}, "the columns of 'user' must be a slice or a list of numbers"),
    ({"user": [0.5]}, "the columns of 'user' must be a slice or a list of numbers"),
])
def test_wrong_request_inputs(names: Any, says: str) -> None:
    with pytest.raises(SharingError, match=says):
        share(Two(), (torch.ones(2, 4), torch.ones(2, 3)), names)


@pytest.mark.parametrize(("example", "says"), [
    ((torch.ones(2, 4),), "example_inputs do not fit Two.forward.*'item'"),
    ((torch.ones(2, 4), torch.ones(3, 3)), "different batch sizes .user 2, item 3."),
    ((torch.ones(2, 4), torch.tensor(1.0)), "input 'item' is a scalar tensor"),
])
def test_wrong_examples(example: Any, says: str) -> None:
    with pytest.raises(SharingError, match=says):
        share(Two(), example, ["user"])


@pytest.mark.parametrize(("change", "says"), [
    (lambda r, c, o: (r, {"itm": c["item"]}, o), "the candidate inputs lack item and have itm"),
    (lambda r, c, o: ({**r, "item": c["item"]}, c, o), "the request inputs have item, which the request side does not"),
    (lambda r, c, o: (r, {"item": c["item"][:, :2]}, o), r"candidate input 'item' has shape \[7, 2\].*\[rows, 3\]"),
    (lambda r, c, o: (r, {"item": 3}, o), "candidate input 'item' must be a tensor, got int"),
    (lambda r, c, o: (list(r), c, o), "inputs come as a dict by name, got list"),
    (lambda r, c, o: (r, c, [0, 3, 7]), "candidate_offsets has 3 numbers; 3 requests need 4"),
    (lambda r, c, o: (r, c, [0, 3, 3, 6]), "run from 0 to 6; they must cover the 7 candidates"),
    (lambda r, c, o: (r, c, [1, 3, 3, 7]), "run from 1 to 7"),
    (lambda r, c, o: (r, c, [0, 5, 3, 7]), r"must not fall: \[0, 5, 3, 7\]"),
    (lambda r, c, o: (r, c, [0.0, 3.0, 3.0, 7.0]), "must be a vector of integers"),
    (lambda r, c, o: (r, c, None), r"3 requests need candidate_offsets \[4\]"),
    (lambda r, c, o: (r, None, o), "candidate_inputs are missing"),
])
def test_wrong_calls(two: SharedModel, change: Callable[..., Any], says: str) -> None:
    request, candidate = sides()
    with pytest.raises(SharingError, match=says):
        two(*change(request, candidate, torch.tensor(OFFSETS)))


class DataDependent(nn.Module):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        if user.sum() > 0:
            return (user * item).sum(1)
        return item.sum(1)


class Centred(nn.Module):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (user * (item - item.mean(0))).sum(1)


class FixedBatch(nn.Module):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (user.view(2, 3) * item).sum(1)


class InPlace(nn.Module):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return user.mul_(item).sum(1)


@pytest.mark.parametrize(("model", "says"), [
    (DataDependent(), "a decision of the model depends on values of its input: replace the branch by torch.where"),
    (Centred(), r"mean .aten.mean.dim. mixes the rows of a batch.*item.mean\(0\)"),
    (FixedBatch(), "FixedBatch"),
    (InPlace(), "InPlace changes its inputs in place; return a new tensor"),
], ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "")
def test_models_that_cannot_be_shared(model: nn.Module, says: str) -> None:
    with pytest.raises(SharingError, match=says) as error:
        share(model, (torch.ones(2, 3), torch.ones(2, 3)), ["user"])
    assert "\n" not in str(error.value)


class Fields(nn.Module):
    """A dict of fields, as rankers take them, and one tensor beside it."""

    def forward(self, fields: dict[str, Tensor], bias: Tensor) -> Tensor:
        return fields["user"].sum(1) + (fields["item"] * fields["user"]).sum(1) + bias


@pytest.mark.parametrize("way", ["original", "shared"])
@pytest.mark.parametrize("count", [1, 3])
def test_inputs_may_come_nested_by_path_or_in_another_order(way: str, count: int) -> None:
    from semel.sharing.choice import Choice

    model = Fields().eval()
    example = ({"item": normal(2, 4), "user": normal(2, 4)}, normal(2))
    shared = share(model, example, request_inputs=["fields.user"])
    shared.choices = {(what, False): (Choice(4, way, {}),) for what in ("call", "score")}
    user, item, bias = normal(1, 4), normal(count, 4), normal(count)
    expected = model({"item": item, "user": user.expand(count, 4)}, bias)
    for request in ({"fields": {"user": user}}, {"fields.user": user}):
        for candidate in ({"fields": {"item": item}, "bias": bias}, {"bias": bias, "fields": {"item": item}},
                          {"fields.item": item, "bias": bias}, {"bias": bias, "fields.item": item}):
            assert torch.allclose(shared(request, candidate), expected, atol=1e-6)
            assert torch.allclose(shared.score(shared.request(request), candidate), expected, atol=1e-6)
    for wrong, word in ((user.half(), "dtype"), (user[:, :3], "shape"), (user.numpy(), "tensor"), (user[0], "shape")):
        with pytest.raises(SharingError, match=word):
            shared({"fields": {"user": wrong}}, {"fields": {"item": item}, "bias": bias})
    with pytest.raises(SharingError, match="rows"):
        shared({"fields": {"user": user}}, {"fields": {"item": item}, "bias": normal(count + 1)})
    with pytest.raises(SharingError, match="lack fields"):
        shared({"fields": {}}, {"fields": {"item": item}, "bias": bias})
