"""The request side of a library's model, by the names of its features."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from semel.sharing import adapters, share

ROOT = Path(__file__).resolve().parents[2]
deepctr = pytest.mark.skipif(importlib.util.find_spec("deepctr_torch") is None, reason="deepctr-torch is not installed")
rechub = pytest.mark.skipif(importlib.util.find_spec("torch_rechub") is None, reason="torch-rechub is not installed")


def deepctr_model() -> torch.nn.Module:
    library = adapters.import_deepctr()
    f = library.inputs
    columns = [f.SparseFeat("user_id", 9, 4), f.SparseFeat("item_id", 9, 4), f.DenseFeat("user_stats", 3),
               f.VarLenSparseFeat(f.SparseFeat("history", 9, 4, embedding_name="item_id"), 5, length_name="length"),
               f.SparseFeat("city", 9, 4)]
    return library.models.WDL(columns, columns, dnn_hidden_units=(8,), init_std=0.3).eval()


def rechub_model() -> torch.nn.Module:
    from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
    from torch_rechub.models.ranking import DIN

    item = SparseFeature("item_id", 9, 4)
    history = SequenceFeature("history", 9, 4, pooling="concat", shared_with="item_id")
    context = [SparseFeature("user_id", 9, 4), SparseFeature("shelf", 9, 4)]
    assert DenseFeature("x").embed_dim == 1
    return DIN(context, [history], [item], {"dims": [8]}, {"dims": [4]}).eval()


@deepctr
def test_columns_of_named_features() -> None:
    model = deepctr_model()
    assert adapters.deepctr_columns(model)["user_stats"] == (8, 11)     # dense columns come last
    columns = adapters.deepctr_request_columns(model, ["length", "history", "user_id", "user_stats"])
    (inputs,), request = adapters.deepctr_inputs(model, ["length", "history", "user_id", "user_stats"], batch=3)
    assert request == {"X": columns} and columns == sorted(columns) and len(columns) == 1 + 5 + 1 + 3
    assert inputs.shape == (3, 12)
    index = adapters.deepctr_columns(model)
    others = set(range(12)) - set(columns)
    assert others == {index["item_id"][0], index["city"][0]}
    assert torch.isfinite(model(inputs)).all()


@deepctr
@pytest.mark.parametrize(("names", "error", "says"), [
    (["user_id", "no_such"], KeyError, "no_such.*it has user_id"),
    ([], ValueError, "nothing to share"),
    (["user_id", "item_id", "history", "length", "city", "user_stats"], ValueError, "every feature"),
    ("user_id", TypeError, "one string"),
])
def test_wrong_names(names: list[str], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        adapters.deepctr_request_columns(deepctr_model(), names)


def test_a_model_of_neither_library() -> None:
    with pytest.raises(TypeError, match="Linear has no feature_index"):
        adapters.deepctr_request_columns(torch.nn.Linear(2, 1), ["a"])


@rechub
def test_a_model_without_features() -> None:
    with pytest.raises(TypeError, match="Linear holds no features"):
        adapters.rechub_request_paths(torch.nn.Linear(2, 1), ["a"])


@rechub
def test_paths_of_named_features() -> None:
    model = rechub_model()
    assert adapters.rechub_request_paths(model, ["history", "user_id"]) == ("x.user_id", "x.history")
    (inputs,), paths = adapters.rechub_inputs(model, ["user_id", "history"], history=6, batch=3)
    assert paths == ("x.user_id", "x.history")
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {
        "user_id": (3,), "shelf": (3,), "history": (3, 6), "item_id": (3,)}
    assert torch.isfinite(model(inputs)).all()
    assert adapters.rechub_inputs(model, ["user_id"], history={"history": 7})[0][0]["history"].shape == (4, 7)
    with pytest.raises(KeyError, match="'item'"):
        adapters.rechub_request_paths(model, ["item"])


@deepctr
def test_importing_asks_nobody() -> None:
    program = """
import requests, threading
asked = []
requests.get = lambda *a, **k: asked.append(a)
from semel.sharing.adapters import import_deepctr
before = threading.active_count()
assert import_deepctr().models.WDL.__name__ == "WDL" and import_deepctr().inputs.SparseFeat
assert not asked and threading.active_count() == before, asked
print("quiet")
"""
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert out.returncode == 0, out.stderr
    assert out.stdout == "quiet\n"


@deepctr
def test_a_deepctr_model_is_shared() -> None:
    model = deepctr_model()
    inputs, request_inputs = adapters.deepctr_inputs(model, ["user_id", "history", "length", "user_stats"])
    shared = share(model, inputs, request_inputs=request_inputs)
    wide = torch.randint(1, 5, (6, 12)).float()
    columns = request_inputs["X"]
    wide[:, columns] = wide[:1, columns]
    others = [c for c in range(12) if c not in columns]
    scores = shared({"X": wide[:1, columns]}, {"X": wide[:, others]}, torch.tensor([0, 6]))
    torch.testing.assert_close(scores, model(wide), rtol=1e-5, atol=1e-6)


@rechub
def test_a_rechub_model_is_shared() -> None:
    model = rechub_model()
    inputs, request_inputs = adapters.rechub_inputs(model, ["user_id", "history"], history=6)
    shared = share(model, inputs, request_inputs=request_inputs)
    request = {"user_id": torch.randint(9, (2,)), "history": torch.randint(9, (2, 6))}
    candidate = {"shelf": torch.randint(9, (5,)), "item_id": torch.randint(9, (5,))}
    rows = torch.tensor([0, 0, 1, 1, 1])
    scores = shared({"x": request}, {"x": candidate}, torch.tensor([0, 2, 5]))
    expected = model({name: value[rows] for name, value in request.items()} | candidate)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
