"""Rankers that nobody here wrote, unmodified, and what ``torch.export`` makes of them.

    python -m benchmarks.zoo [--full] [--models deepctr.DCN own] [--operators] [--json]

Every ranker of deepctr-torch and torch-rechub, and a few plain ones (``zoo_own``). For each: does it export with a
dynamic batch, how many nodes has the graph after decomposition, and why not, where not. ``--operators`` counts the
operators of the graphs, with one example call of each. Widths are small unless ``--full``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.zoo_deepctr import deepctr_zoo
from benchmarks.zoo_model import SMALL, Size, ZooModel, map_tensors, settle
from benchmarks.zoo_own import own_zoo
from benchmarks.zoo_rechub import rechub_zoo


def zoo(small: bool = False) -> dict[str, Callable[[], ZooModel]]:
    """Name -> a function that builds the model, in eval mode with random weights. Libraries that are missing are left
    out: their models are then not in the zoo."""
    size = SMALL if small else Size()
    found: dict[str, Callable[[], ZooModel]] = {}
    for library in (deepctr_zoo, rechub_zoo, own_zoo):
        with contextlib.suppress(ModuleNotFoundError):
            found |= library(size)
    return {name: lambda build=build: seeded(build) for name, build in found.items()}


def seeded(build: Callable[[], ZooModel]) -> ZooModel:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return settle(build())


def chosen(models: dict[str, Callable[[], ZooModel]], names: Iterable[str] | None) -> dict[str, Callable[[], ZooModel]]:
    """Those whose name is, or begins with, one of ``names``; all without names.

    Raises:
        SystemExit: a name that fits none.
    """
    if names is None:
        return models
    out: dict[str, Callable[[], ZooModel]] = {}
    for wanted in names:
        fits = {n: m for n, m in models.items() if n == wanted} or \
            {n: m for n, m in models.items() if n.startswith(wanted)}
        if not fits:
            raise SystemExit(f"no model of the zoo is called {wanted!r}; there are: {', '.join(models)}")
        out |= fits
    return out


def export(model: ZooModel, batch: int = 4) -> torch.export.ExportedProgram:
    """The functional graph with a dynamic batch axis."""
    inputs = model.example_inputs(batch)
    shapes = map_tensors(lambda x: {0: torch.export.Dim.DYNAMIC}, inputs)
    logging.getLogger("torch.export").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model.module, inputs, dynamic_shapes=shapes, strict=False)
        return program.run_decompositions({})


def shown(value: Any) -> str:
    """An argument of a call: a tensor as its dtype and shape, anything else as it is."""
    if isinstance(value, torch.fx.Node):
        return shown(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        inside = [shown(v) for v in value]
        return "[" + ", ".join(inside[:3] + ([f"... {len(inside)}"] if len(inside) > 3 else [])) + "]"
    return str(value)


def call(node: torch.fx.Node) -> str:
    arguments = [shown(a) for a in node.args] + [f"{k}={shown(v)}" for k, v in node.kwargs.items()]
    return f"({', '.join(arguments)}) -> {shown(node.meta.get('val'))}"


def examine(build: Callable[[], ZooModel]) -> dict[str, Any]:
    """What one model's export gives: nodes, operators with counts and example calls, or the reason for its failure."""
    model = build()
    row: dict[str, Any] = {"float64": model.float64, "batch_of_one": model.batch_of_one}
    started = time.perf_counter()
    try:
        program = export(model)
    except Exception as error:  # every failure of export is a result here
        text = " ".join(str(error).split())
        return row | {"error": f"{type(error).__name__}: {text[:600]}"}
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    examples: dict[str, list[str]] = {}
    for node in calls:
        seen = examples.setdefault(str(node.target), [])
        if call(node) not in seen:
            seen.append(call(node))
    return row | {"seconds": time.perf_counter() - started, "nodes": len(calls),
                  "operators": dict(Counter(str(node.target) for node in calls)), "examples": examples}


def census(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Operator -> calls over the zoo, calls in each model, distinct example calls; what most models use comes first."""
    out: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        for operator, count in row.get("operators", {}).items():
            entry = out.setdefault(operator, {"calls": 0, "models": {}, "examples": []})
            entry["calls"] += count
            entry["models"][name] = count
            entry["examples"] += [text for text in row["examples"][operator] if text not in entry["examples"]]
    return dict(sorted(out.items(), key=lambda item: -len(item[1]["models"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="80 + 20 fields, 32 wide, instead of small widths")
    parser.add_argument("--models", nargs="+", help="names, or how they begin")
    parser.add_argument("--operators", action="store_true", help="count operators over the zoo, with example calls")
    parser.add_argument("--examples", type=int, default=3, help="distinct example calls shown of an operator")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = {name: examine(build) for name, build in chosen(zoo(not arguments.full), arguments.models).items()}
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "models": rows}))
        return
    failed = 0
    for name, row in rows.items():
        failed += "error" in row
        print(f"{name:28} " + (f"no: {row['error']}" if "error" in row else
                               f"{row['nodes']:6} nodes {row['seconds']:6.1f} s"))
    print(f"{len(rows) - failed} of {len(rows)} export with a dynamic batch (torch {torch.__version__})")
    if arguments.operators:
        for operator, entry in census(rows).items():
            print(f"\n{operator}   {entry['calls']} calls in {len(entry['models'])} models")
            print("   " + ", ".join(f"{name} {count}" for name, count in entry["models"].items()))
            print("\n".join("   " + text for text in entry["examples"][:arguments.examples]))


if __name__ == "__main__":
    main()
