"""A shared form in a folder, to run without the model's source.

``tensors.safetensors`` holds the weights and what was computed from them alone, once; the programs of the other two
stages take them as inputs, for one request and for many: graphs (``export``), or compiled code (``aoti``, a C++
compiler needed where it is saved). ``manifest.json`` says how they are called and what they were made for. Compiled
code runs in the process: load folders that you trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import platform
import shutil
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from semel.sharing.emission import Stage
from semel.sharing.errors import SharingError
from semel.sharing.inputs import Input, Signature
from semel.sharing.lowering import OWNER, SLOT, TABLE, Program
from semel.sharing.runtime import PARAMETER, Form, Output, Scoring, layout

if TYPE_CHECKING:
    from semel.sharing.shared import SharedModel

FORMAT, VERSION = "semel.sharing", 1
BACKENDS = ("aoti", "export")
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
_STAGES = (Stage.REQUEST, Stage.CANDIDATE)
_EXAMPLE = torch.tensor([0, 2, 6, 7])
"""Offsets that programs are traced with: no size of a request axis is 0 or 1, or that of another."""


class LoadedModel(Scoring):
    """A saved shared form: ``loaded(request_inputs, candidate_inputs, candidate_offsets)``, ``request`` and ``score``
    as ``SharedModel`` has them, with the same errors; without gradients."""

    def __init__(self, form: Form, signature: Signature, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]):
        self.signature = signature
        self.manifest = manifest
        self._loaded = form
        self._tensors = tensors

    __call__ = Scoring.forward

    def _form(self) -> Form:
        return self._loaded

    def _tensor(self, name: str) -> Tensor:
        return self._tensors[PARAMETER + name]


class _LoadedForm(Form):
    runs_empty = False

    def __init__(self, programs: Mapping[bool, Mapping[Stage, Program]], outputs: list[Any], out_spec: Any,
                 constants: Mapping[str, Tensor]) -> None:
        self.programs, self.outputs, self.out_spec, self._constants = programs, outputs, out_spec, constants

    def constants(self, tensors: Any) -> Mapping[str, Tensor]:
        return self._constants

    def run(self, stage: Stage, single: bool, given: Mapping[str, Tensor], tensors: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            return super().run(stage, single, given, tensors)


class _Compiled(nn.Module):
    """Compiled code reads its inputs as if they were contiguous."""

    def __init__(self, code: Any) -> None:
        super().__init__()
        self.code = code

    def forward(self, *inputs: Tensor) -> Any:
        return self.code(*[tensor.contiguous() for tensor in inputs])


class _TensorsOf(nn.Module):
    """A program without what it returns that is no tensor."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(out for out in self.module(*inputs) if isinstance(out, Tensor))


# ------------------------------------------------------------------------------------------------------------- save
def save(shared: SharedModel, folder: str | Path, backend: str = "aoti") -> None:
    """Writes the eval form of ``shared`` to ``folder``, which appears whole or not at all.

    Raises SharingError: an unknown backend, a folder that holds something, a program that cannot be exported or
    compiled (its name and torch's reason), a disk that does not take it.
    """
    if backend not in BACKENDS:
        raise SharingError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    folder = Path(folder)
    try:
        if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise SharingError(f"{folder} exists and is not an empty folder; save to a new one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
        partial.mkdir()
    except OSError as error:
        raise SharingError(f"cannot write {folder}: {error.strerror or error}") from error
    training = shared.training
    try:
        shared.eval()
        with torch.no_grad():
            _write(shared, partial, backend)
        partial.rename(folder)
    except OSError as error:
        raise SharingError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shared.train(training)
        shutil.rmtree(partial, ignore_errors=True)


def _write(shared: SharedModel, folder: Path, backend: str) -> None:
    form = shared._form()
    constants = form.constants(shared._tensor)
    programs: dict[str, Any] = {}
    used: set[str] = set()
    for single in (True, False):
        given = _example(shared, single)
        device = next(iter(given.values())).device
        for stage in _STAGES:
            program = form.programs[single][stage]
            name = f"{stage}_{'single' if single else 'many'}"
            outputs = [n for n in program.outputs if stage == Stage.REQUEST or isinstance(
                form.outputs[int(n.removeprefix("output:"))], Output)]
            if not outputs:
                programs[name] = {"file": None, "inputs": [], "outputs": []}
                continue
            used.update(program.inputs)
            tensors = {n: shared._tensor(n.removeprefix(PARAMETER)) for n in program.inputs if n.startswith(PARAMETER)}
            exported = _exported(name, program, {**constants, **given, **tensors}, constants, single)
            _write_program(name, exported, folder / f"{name}.pt2", backend)
            programs[name] = {"file": f"{name}.pt2", "inputs": list(program.inputs), "outputs": outputs}
            if stage == Stage.REQUEST:
                given.update(form.run(stage, single, {**constants, **given}, shared._tensor))
    kept = {name: tensor for name, tensor in constants.items() if name in used}
    parameters = {n: shared._tensor(n.removeprefix(PARAMETER)) for n in sorted(used) if n.startswith(PARAMETER)}
    same_as = _write_tensors({**parameters, **kept}, folder / TENSORS)
    try:
        tree = pytree.treespec_dumps(form.out_spec)
        values = json.dumps([_described(item) for item in form.outputs])
    except (NotImplementedError, TypeError) as error:
        raise SharingError(f"the model returns something that JSON does not hold ({error}); return tensors in tuples, "
                           "lists or dicts") from error
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _checksum(path)} for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "version": VERSION, "backend": backend, "torch": torch.__version__,
                "machine": machine(device.type), "inputs": [_input(item) for item in shared.signature.inputs],
                "outputs": json.loads(values), "tree": tree, "constants": list(kept), "same_as": same_as,
                "programs": programs, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _example(shared: SharedModel, single: bool) -> dict[str, Tensor]:
    """Inputs of both stages by name, drawn from the example's rows."""
    offsets = torch.tensor([0, 7]) if single else _EXAMPLE
    leaves = [leaf for leaf in pytree.tree_leaves(shared._example) if isinstance(leaf, Tensor)]
    given: dict[str, Tensor] = {}
    for item, leaf in zip(shared.signature.inputs, leaves, strict=True):
        for stage, count in ((Stage.REQUEST, len(offsets) - 1), (Stage.CANDIDATE, int(offsets[-1]))):
            if item.columns is None and item.stage != stage:
                continue
            rows = leaf[torch.arange(count, device=leaf.device) % len(leaf)]
            if item.columns is not None:
                chosen = item.columns if stage == Stage.REQUEST else item.others
                rows = rows[:, torch.from_numpy(chosen).to(leaf.device)]
            given[f"{stage}:{item.name}"] = rows.contiguous()
    return given | layout(offsets, leaves[0].device)


def _exported(name: str, program: Program, given: Mapping[str, Tensor], constants: Mapping[str, Tensor],
              single: bool) -> torch.export.ExportedProgram:
    requests, candidates, slots = (torch.export.Dim(letter, min=1) for letter in ("R", "C", "S"))
    shapes: list[Any] = []
    for each in program.inputs:
        if each.startswith(PARAMETER) or each in constants:
            shapes.append(None)
        elif each in (OWNER, SLOT) or each.startswith(f"{Stage.CANDIDATE}:"):
            shapes.append({0: candidates})
        elif each == TABLE:
            shapes.append({1: slots} if single else {0: requests, 1: slots})
        else:
            shapes.append(None if single else {0: requests})
    inputs = tuple(given[each].detach().contiguous() for each in program.inputs)
    module = _TensorsOf(getattr(program.module, "plain", program.module)).eval()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(module, inputs, dynamic_shapes=(tuple(shapes),), strict=False)
    except Exception as error:  # torch raises many kinds
        raise SharingError(f"the program {name} cannot be exported: {_first_line(error)}") from error


def _write_program(name: str, exported: torch.export.ExportedProgram, path: Path, backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if backend == "export":
            exported._example_inputs = None  # they hold every weight
            torch.export.save(exported, path)
            return
        with contextlib.suppress(ImportError):  # imported after Inductor, it would replace distutils under its feet
            importlib.import_module("setuptools")
        from torch._inductor import aoti_compile_and_package

        try:
            aoti_compile_and_package(exported, package_path=str(path))
        except Exception as error:  # torch raises many kinds
            raise SharingError(f"the program {name} cannot be compiled: {_first_line(error)}; is a C++ compiler there? "
                               "backend='export' needs none") from error


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, str]:
    """Each storage once; gives name -> name of the same tensor, for those that are left out."""
    from safetensors.torch import save_file

    written: dict[Any, str] = {}
    same_as: dict[str, str] = {}
    kept: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in written:
            same_as[name] = written[key]
            continue
        written[key] = name
        flat = tensor.detach().contiguous()
        storage = flat.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != flat.nbytes:
            flat = flat.clone()
        storages.add(storage.data_ptr())
        kept[name] = flat
    save_file(kept, path)
    return same_as


def machine(device: str) -> dict[str, Any]:
    """What compiled code depends on, here."""
    features: Mapping[str, Any] = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    found: dict[str, Any] = {"device": device, "architecture": platform.machine(),
             "capability": torch.backends.cpu.get_cpu_capability(),
             "features": sorted(name for name, there in features.items() if there is True)}
    if device == "cuda" and torch.cuda.is_available():
        found["cuda"] = list(torch.cuda.get_device_capability())
    return found


def _input(item: Input) -> dict[str, Any]:
    return {"name": item.name, "stage": str(item.stage), "dtype": _dtype_name(item.dtype), "shape": list(item.shape),
            "columns": None if item.columns is None else item.columns.tolist()}


def _described(item: Any) -> dict[str, Any]:
    if isinstance(item, Output):
        return {"dtype": _dtype_name(item.dtype), "shape": list(item.shape)}
    return {"value": item}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------------------- load
def load(folder: str | Path) -> LoadedModel:
    """What ``SharedModel.save`` wrote. Raises SharingError where a file is missing or damaged, and where it was saved
    with another version of torch, for another kind of machine, or by a later Semel."""
    folder = Path(folder)
    manifest = _manifest(folder)
    try:
        return _loaded(folder, manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SharingError):
            raise
        raise SharingError(f"{folder / MANIFEST} is damaged ({type(error).__name__}: {error}); save the model again"
                           ) from error


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise SharingError(f"{folder} holds no saved model: {MANIFEST} is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SharingError(f"{path} cannot be read ({error}); save the model again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise SharingError(f"{path} is not of a saved shared model")
    if manifest.get("version") != VERSION:
        raise SharingError(f"{path} has format version {manifest.get('version')}, this Semel reads {VERSION}; "
                           "save the model again with this one")
    return manifest


def _loaded(folder: Path, manifest: Mapping[str, Any]) -> LoadedModel:
    _check_machine(folder, manifest)
    for name, stated in manifest["files"].items():
        _check_file(folder / name, stated)
    tensors = _read_tensors(folder / TENSORS, manifest["machine"]["device"])
    tensors |= {name: tensors[other] for name, other in manifest["same_as"].items()}
    programs: dict[bool, dict[Stage, Program]] = {}
    for single, word in ((True, "single"), (False, "many")):
        programs[single] = {stage: _read_program(folder, manifest["programs"][f"{stage}_{word}"], manifest["backend"])
                            for stage in _STAGES}
    outputs = [item["value"] if "value" in item else Output(getattr(torch, item["dtype"]), tuple(item["shape"]))
               for item in manifest["outputs"]]
    form = _LoadedForm(programs, outputs, pytree.treespec_loads(manifest["tree"]),
                       {name: tensors[name] for name in manifest["constants"]})
    inputs = tuple(Input(item["name"], Stage[item["stage"].upper()], getattr(torch, item["dtype"]),
                         tuple(item["shape"]), None if item["columns"] is None else np.array(item["columns"], np.int64))
                   for item in manifest["inputs"])
    return LoadedModel(form, Signature(inputs, None, {}), tensors, manifest)


def _check_machine(folder: Path, manifest: Mapping[str, Any]) -> None:
    again = "save the model again here"
    if manifest["torch"] != torch.__version__:
        raise SharingError(f"{folder} was saved with torch {manifest['torch']}, this is {torch.__version__}; "
                           f"install that one, or {again}")
    there, here = manifest["machine"], machine(manifest["machine"]["device"])
    for key in ("architecture", "capability", "cuda"):
        if there.get(key) != here.get(key):
            raise SharingError(f"{folder} was saved for {key} {there.get(key)}, this machine has {here.get(key)}; "
                               f"{again}")
    missing = sorted(set(there["features"]) - set(here["features"]))
    if missing:
        raise SharingError(f"{folder} was saved for a processor with {', '.join(missing)}, which this one lacks; "
                           f"{again}")


def _check_file(path: Path, stated: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise SharingError(f"{path} is missing; save the model again")
    size = path.stat().st_size
    if size != stated["bytes"]:
        raise SharingError(f"{path} has {size} bytes, {stated['bytes']} were written; copy it or save the model again")
    if _checksum(path) != stated["sha256"]:
        raise SharingError(f"{path} is not what was written (its checksum differs); copy it or save the model again")


def _read_tensors(path: Path, device: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path, device=device)


def _read_program(folder: Path, stated: Mapping[str, Any], backend: str) -> Program:
    if stated["file"] is None:
        return Program(torch.fx.GraphModule({}, torch.fx.Graph()), (), ())
    path = folder / stated["file"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if backend == "export":
            module: Any = torch.export.load(path).module(check_guards=False)
        else:
            from torch._inductor import aoti_load_package

            module = _Compiled(aoti_load_package(str(path)))
    return Program(module, tuple(stated["inputs"]), tuple(stated["outputs"]))
