"""One recipe trained plainly and with everything of "wait never" on: the loss curves, one over the other.

    python -m benchmarks.loss_curves --store STORE [--recipe ml1m_rank] [--epochs 1] [--ranks 2] [--html FILE] [--json]

plain     one process, the plain loop, requests in their order
full      ``--ranks`` processes, the overlapped loop, requests balanced by cost

Without dropout and other draws, which belong to a piece of a batch and so to the way it is cut. Losses agree up to the
order in which floats are summed: the largest relative difference is printed, of the mean loss over every 20 steps, and
the validation figures of both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from semel import recipes
from semel.comm import join, spawn
from semel.training import Recipe, Run, Trainer, override, with_paths

DRAWS = ("dropout", "embedding_dropout", "unknown_rate", "encoder.dropout")


def train(recipe: Recipe) -> str:
    return str(Trainer(recipe).fit().path)


def train_together(recipe: Recipe) -> str:
    join()
    return train(recipe)


def run(arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    recipe = override(recipes.get(arguments.recipe), {f"model.{name}": 0.0 for name in DRAWS} | {
        "epochs": arguments.epochs, "pieces": max(2, arguments.ranks)})
    recipe = with_paths(recipe, arguments.store, out)
    plain = Run.open(train(dataclasses.replace(recipe, overlap=False)))
    full = Run.open(spawn(train_together, arguments.ranks, dataclasses.replace(recipe, balance="equal_cost"))[0])
    curves = {name: [(line["step"], line["loss"]) for line in one.metrics if line["kind"] == "train"]
              for name, one in (("plain", plain), ("full", full))}
    if [step for step, _ in curves["plain"]] != [step for step, _ in curves["full"]]:
        raise RuntimeError("the two runs did not take the same steps")
    difference = max(abs(a - b) / abs(a) for (_, a), (_, b) in zip(*curves.values(), strict=True))
    validation = {name: [{key: value for key, value in line.items() if key not in ("kind", "step", "epoch")}
                         for line in one.metrics if line["kind"] == "validation"]
                  for name, one in (("plain", plain), ("full", full))}
    return {"recipe": arguments.recipe, "ranks": arguments.ranks, "steps": curves["plain"][-1][0], "curves": curves,
            "largest_relative_difference": difference, "validation": validation,
            "seconds": {"plain": plain.summary["seconds"], "full": full.summary["seconds"]},
            "balance": [line for line in full.metrics if line["kind"] == "balance"]}


def draw(result: dict[str, Any], path: Path) -> None:
    import plotly.graph_objects as go

    figure = go.Figure()
    for (name, points), width in zip(result["curves"].items(), (7, 2), strict=True):
        figure.add_scatter(x=[step for step, _ in points], y=[loss for _, loss in points], name=name,
                           line={"width": width})
    figure.update_layout(xaxis_title="step", yaxis_title="loss", title=f"{result['recipe']}: plain, and with all on")
    figure.write_html(path, include_plotlyjs=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--recipe", default="ml1m_rank")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--html", type=Path, help="draw both curves there")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if min(arguments.epochs, arguments.ranks) < 1:
        parser.error("--epochs and --ranks must be at least 1")
    with tempfile.TemporaryDirectory(prefix="semel-benchmark-") as folder:
        result = run(arguments, Path(folder))
    if arguments.html is not None:
        draw(result, arguments.html)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{result['recipe']}, {result['steps']} steps: one process and plain, against {result['ranks']} processes, "
          "overlapped and balanced")
    print(f"largest relative difference of a loss: {result['largest_relative_difference']:.1e}")
    for name, lines in result["validation"].items():
        for line in lines:
            print(f"{name:6} " + ", ".join(f"{key} {value:.6f}" for key, value in line.items())
                  + f"; {result['seconds'][name]:.0f} s of training")
    for line in result["balance"]:
        print(f"idle by tokens {line['idle_tokens']:.2%}, by cost {line['idle_cost']:.2%}, by time "
              f"{line['idle_time']:.2%}; {line['cost']}")


if __name__ == "__main__":
    main()
