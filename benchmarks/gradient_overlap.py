"""Gradients summed under backward against one sum after it, over a link of stated speed.

    python -m benchmarks.gradient_overlap [--layers 24] [--width 256] [--rows 1024] [--megabytes 100] [--steps 15]
                                          [--json FILE]

One process. Its model is a stack of linear layers; the other rank is played by ``over_ranks``, which sleeps as long as
a message of so many bytes takes at ``--megabytes`` a second, plus 0.2 ms, and gives the gradient back as it was. A
sleep is what a link is to a step: the bytes need time and no core. (Real sums over gloo and their equality:
``tests/training/test_gradients.py``.) Three ways take turns in each step, in turned order, on the same batch, and must
give the same gradients: summed ``under`` backward in buckets, ``after`` it in one message, and ``alone``, where there
is nobody to sum with. Exposed: milliseconds of wall clock from the end of backward until all sums are there; of these,
what is in ``alone`` too (laying gradients side by side and back) is this machine's and not the link's. Medians over the
steps, [quartiles]. At best what is exposed under backward is the last bucket's message, if backward is longer than the
link. ``whole`` counts backward and sums: what a step gains. Less than a minute on a machine that is not busy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semel.training.gradients import BUCKET_BYTES, GradientSums
from semel.training.timeline import Timeline

LATENCY_S = 2e-4
WARM = 2
"""Steps at the start that are left out."""


def measure(layers: int, width: int, rows: int, megabytes: float, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))
    parameters = list(model.parameters())

    def over_ranks(flat: Tensor) -> None:
        time.sleep(message_s(flat.numel() * flat.element_size(), megabytes))

    sums = GradientSums(parameters, over_ranks, Timeline(), BUCKET_BYTES)
    ways = ("under", "after", "alone")
    seconds: dict[str, dict[str, list[float]]] = {name: {"backward": [], "exposed": [], "whole": []} for name in ways}
    for step in range(steps + WARM):
        batch = torch.randn(rows, width)
        results = []
        for turn in range(len(ways)):
            name = ways[(step + turn) % len(ways)]
            loss = model(batch).square().mean()
            sums.begin(1)
            began = time.perf_counter()
            with sums.piece(0) if name == "under" else nullcontext():
                gradients = torch.autograd.grad(loss, parameters)
            done = time.perf_counter()
            if name == "under":
                sums.end()
                results.append(sums.wait())
            else:  # as ``Ranks.sum_in_place`` does
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                if name == "after":
                    over_ranks(flat)
                for gradient, part in zip(gradients, flat.split([p.numel() for p in parameters]), strict=True):
                    gradient.copy_(part.view_as(gradient))
                results.append(list(gradients))
            ended = time.perf_counter()
            if step >= WARM:
                for what, taken in (("backward", done - began), ("exposed", ended - done), ("whole", ended - began)):
                    seconds[name][what].append(1e3 * taken)
        assert all(torch.equal(results[0][i], other[i]) for other in results[1:] for i in range(len(parameters)))
    last = sum(parameters[index].numel() * parameters[index].element_size() for index in sums.buckets[-1])
    sums.close()
    size = sum(p.numel() * p.element_size() for p in parameters)
    found: dict[str, Any] = {"gradient_mb": size / 1e6, "buckets": len(sums.buckets),
                             "link_ms": 1e3 * message_s(size, megabytes),
                             "last_bucket_ms": 1e3 * message_s(last, megabytes), "steps": steps}
    for name, every in seconds.items():
        found[name] = {what: {"median_ms": statistics.median(values), "quartiles_ms": quartiles(values)}
                       for what, values in every.items()}
    pairs = list(zip(seconds["after"]["exposed"], seconds["under"]["exposed"], strict=True))
    found["times_less"] = statistics.median(after / under for after, under in pairs)
    found["times_less_quartiles"] = quartiles([after / under for after, under in pairs])
    return found


def message_s(size: int, megabytes: float) -> float:
    return LATENCY_S + size / (megabytes * 1e6)


def quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def show(found: dict[str, Any]) -> None:
    print(f"{found['gradient_mb']:.1f} MB of gradients in {found['buckets']} buckets; the link needs "
          f"{found['link_ms']:.0f} ms for all, {found['last_bucket_ms']:.1f} ms for the last; {found['steps']} steps")
    for name in ("after", "under", "alone"):
        cells = [f"{what} {one['median_ms']:7.1f} [{one['quartiles_ms'][0]:.1f}, {one['quartiles_ms'][1]:.1f}] ms"
                 for what, one in found[name].items()]
        print(f"  {name:6}  {'   '.join(cells)}")
    low, high = found["times_less_quartiles"]
    print(f"  exposed, after over under: {found['times_less']:.1f} [{low:.1f}, {high:.1f}] times less")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1024, help="of a batch")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of the link, a second")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    sizes = (options.layers, options.width, options.rows, options.megabytes, options.steps)
    if min(sizes) <= 0:
        parser.error("--layers, --width, --rows, --megabytes and --steps must be above 0")
    torch.set_num_threads(1)
    found = measure(*sizes)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
