"""A saved shared form: runs without the model's source, gives the same numbers, and refuses what it does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from shared_models import MODELS, leaves, shared_of, sides

from semel.batch import RequestBatch
from semel.sharing import LoadedModel, SharingError, load

OFFSETS = [[0, 6], [0, 1], [0, 3, 3, 7], [0, 0, 1], [0, 0], [0, 0, 0], [0]]

ALONE = """
import json, sys, torch
from safetensors.torch import load_file, save_file
import semel.sharing

folder, inputs = sys.argv[1:3]
loaded = semel.sharing.load(folder)
flat = load_file(inputs)
out = {}
for case in sorted({name.split("|")[0] for name in flat}):
    side = {s: {n.split("|")[2]: t for n, t in flat.items() if n.split("|")[:2] == [case, s]} for s in "rc"}
    scores = loaded(side["r"], side["c"], flat[f"{case}|offsets"])
    for i, leaf in enumerate(torch.utils._pytree.tree_leaves(scores)):
        out[f"{case}|{i}"] = leaf.contiguous()
assert "shared_models" not in sys.modules, "the model's source was there"
save_file(out, inputs)
"""


def equal_in_another_process(shared: Any, draw: Any, folder: Path, tmp_path: Path) -> None:
    flat, expected = {}, {}
    for case, offsets in enumerate(OFFSETS):
        request, candidate, at = sides(shared, draw, offsets)
        flat |= {f"{case}|r|{name}": tensor.contiguous() for name, tensor in request.items()}
        flat |= {f"{case}|c|{name}": tensor.contiguous() for name, tensor in candidate.items()}
        flat[f"{case}|offsets"] = at
        with torch.no_grad():
            expected |= {f"{case}|{i}": t for i, t in enumerate(leaves(shared(request, candidate, at)))}
    save_file(flat, tmp_path / "inputs")
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    done = subprocess.run([sys.executable, "-W", "ignore", str(script), str(folder), str(tmp_path / "inputs")],
                          capture_output=True, text=True, timeout=110, cwd=tmp_path,
                          env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file

    got = load_file(tmp_path / "inputs")
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert got[name].shape == tensor.shape and got[name].dtype == tensor.dtype
        assert tensor.numel() == 0 or float((got[name] - tensor).abs().max()) <= 1e-12, name
    assert max(float(t.std()) for t in expected.values() if t.numel() > 1) > 1e-3


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in ("towers", "cross") else pytest.mark.slow)
                                  for name in MODELS])
def test_a_saved_model_runs_alone(name: str, tmp_path: Path) -> None:
    shared, draw = shared_of(name)
    shared.save(tmp_path / "saved", backend="export")
    equal_in_another_process(shared, draw, tmp_path / "saved", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["layer norm", "pooled"])
def test_compiled_code_runs_alone(name: str, tmp_path: Path) -> None:
    shared, draw = shared_of(name)
    shared.save(tmp_path / "saved", backend="aoti")
    equal_in_another_process(shared, draw, tmp_path / "saved", tmp_path)
    loaded = load(tmp_path / "saved")
    request, candidate, at = sides(shared, draw, [0, 3, 3, 7])
    turned = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in candidate.items()}  # other strides
    with torch.no_grad():
        assert float((loaded(request, turned, at) - shared(request, candidate, at)).abs().max()) <= 1e-12


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    shared, draw = shared_of("towers", train=True)
    folder = tmp_path_factory.mktemp("saved") / "model"
    shared.save(folder, backend="export")
    assert shared.training, "saving left it in another mode"
    return folder, shared, draw


@pytest.fixture
def copy(saved: tuple[Path, Any, Any], tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


def test_the_calls_are_those_of_the_shared_model(saved: tuple[Path, Any, Any]) -> None:
    folder, shared, draw = saved
    loaded = load(folder)
    assert isinstance(loaded, LoadedModel)
    request, candidate, at = sides(shared, draw, [0, 2, 5])
    expected = loaded(request, candidate, at)
    assert torch.equal(loaded.score(loaded.request(request), candidate, at), expected)
    batch = RequestBatch(torch.arange(2), request | {"not wanted": torch.zeros(2)}, candidate, at)
    assert torch.equal(loaded(batch), expected)
    assert not expected.requires_grad
    assert loaded.request(request).nbytes < 1000


@pytest.mark.parametrize("change, message", [
    (lambda r, c, o: ({"user": r["user"]}, c, o), "lack dense"),
    (lambda r, c, o: (r | {"item": c["item"]}, c, o), "have item"),
    (lambda r, c, o: (r, {"item": c["item"].int()}, o), "dtype torch.int32"),
    (lambda r, c, o: (r, {"item": c["item"][:, None]}, o), r"shape \[5, 1\]"),
    (lambda r, c, o: (r, c, o + 1), "from 1 to 6"),
    (lambda r, c, o: (r, c, None), "need candidate_offsets"),
    (lambda r, c, o: (r, {"item": c["item"].tolist()}, o), "must be a tensor, got list"),
])
def test_the_errors_are_those_of_the_shared_model(saved: tuple[Path, Any, Any], change: Any, message: str) -> None:
    folder, shared, draw = saved
    arguments = change(*sides(shared, draw, [0, 2, 5]))
    for form in (shared, load(folder)):
        with pytest.raises(SharingError, match=message):
            form(*arguments)


def test_a_state_of_another_model_is_refused(saved: tuple[Path, Any, Any]) -> None:
    folder, shared, draw = saved
    request, candidate, at = sides(shared, draw, [0, 2, 5])
    with pytest.raises(SharingError, match="call request"):
        load(folder).score(shared.request(request), candidate, at)


def test_weights_are_stored_once(tmp_path: Path) -> None:
    shared, _ = shared_of("towers")
    shared.original.user.weight.data = torch.randn(50_000, 6, dtype=torch.float64)
    shared.save(tmp_path / "saved", backend="export")
    total = sum(path.stat().st_size for path in (tmp_path / "saved").iterdir())
    assert 2_400_000 < total < 2_600_000


def test_a_folder_that_holds_something_is_left_alone(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    _, shared, _ = saved
    kept = tmp_path / "kept"
    kept.write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for folder in (kept, tmp_path / "full", kept / "below"):
        with pytest.raises(SharingError, match=str(folder)):
            shared.save(folder, backend="export")
    assert kept.read_text() == "mine" and sorted(p.name for p in tmp_path.iterdir()) == ["full", "kept"]
    with pytest.raises(SharingError, match="none of aoti, export"):
        shared.save(tmp_path / "new", backend="onnx")


def test_an_interrupted_save_leaves_nothing(saved: tuple[Path, Any, Any], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    _, shared, _ = saved

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.export, "save", full)
    with pytest.raises(SharingError, match="No space left"):
        shared.save(tmp_path / "new", backend="export")
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_filled(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    shared, draw = shared_of("pooled")
    (tmp_path / "empty").mkdir()
    shared.save(tmp_path / "empty", backend="export")
    request, candidate, at = sides(shared, draw, [0, 4])
    with torch.no_grad():
        assert torch.allclose(load(tmp_path / "empty")(request, candidate), shared(request, candidate, at), rtol=1e-12)


@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors", "request_many.pt2"])
def test_missing_truncated_and_changed_files(copy: Path, name: str) -> None:
    path = copy / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SharingError, match=name):
        load(copy)
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(SharingError, match=name):
        load(copy)
    path.unlink()
    with pytest.raises(SharingError, match="missing"):
        load(copy)
    with pytest.raises(SharingError, match="no saved model"):
        load(copy / "nowhere")


@pytest.mark.parametrize("change, message", [
    (lambda m: m.update(torch="2.0.0"), "torch 2.0.0.*save the model again"),
    (lambda m: m.update(version=9), "format version 9"),
    (lambda m: m.update(format="other"), "not of a saved shared model"),
    (lambda m: m["machine"].update(capability="AVX9"), "capability AVX9.*save the model again"),
    (lambda m: m["machine"].update(architecture="z80"), "architecture z80"),
    (lambda m: m["machine"]["features"].append("avx9"), "a processor with avx9"),
    (lambda m: m.pop("outputs"), "damaged"),
    (lambda m: m.update(files=None), "damaged"),
])
def test_other_versions_and_machines_are_refused(copy: Path, change: Any, message: str) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    change(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SharingError, match=message):
        load(copy)
