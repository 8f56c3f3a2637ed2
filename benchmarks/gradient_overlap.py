"""Gradients summed under backward against one sum after it, over a link of stated speed.

    python -m benchmarks.gradient_overlap [--layers 12] [--width 256] [--megabytes 100] [--steps 20] [--json FILE]

One process. Its model is a stack of linear layers; the other rank is played by ``over_ranks``, which sleeps as long as
a message of so many bytes takes at ``--megabytes`` a second, plus 0.2 ms, and gives the gradient back as it was. A
sleep is what a link is to a step: the bytes need time and no core. (Real sums over gloo and their equality:
``tests/training/test_gradients.py``.) Both ways take turns in each step, on the same batch, and must give the same
gradients. Exposed: milliseconds from the end of backward until all sums are there, medians over the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from semel.training.gradients import BUCKET_BYTES, GradientSums
from semel.training.timeline import Timeline

LATENCY_S = 2e-4


def measure(layers: int, width: int, megabytes: float, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))
    parameters = list(model.parameters())

    def over_ranks(flat: Tensor) -> None:
        time.sleep(LATENCY_S + flat.numel() * flat.element_size() / (megabytes * 1e6))

    one = [GradientSums(parameters, over_ranks, Timeline(), size) for size in (BUCKET_BYTES, 1 << 62)]
    names = ("under", "after")
    backward: dict[str, list[float]] = {name: [] for name in names}
    exposed: dict[str, list[float]] = {name: [] for name in names}
    for step in range(steps + 2):
        batch = torch.randn(256, width)
        results = []
        for name, sums in zip(names, one, strict=True):
            loss = model(batch).square().mean()
            sums.begin(1)
            began = time.perf_counter()
            with sums.piece(0):
                torch.autograd.grad(loss, parameters)
            sums.end()
            done = time.perf_counter()
            results.append(sums.wait())
            if step >= 2:
                backward[name].append(done - began)
                exposed[name].append(time.perf_counter() - done)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for sums in one:
        sums.close()
    size = sum(p.numel() * p.element_size() for p in parameters)
    found = {"gradient_mb": size / 1e6, "link_ms": 1e3 * size / (megabytes * 1e6), "buckets": len(one[0].buckets)}
    for name in names:
        found[f"backward_{name}_ms"] = 1e3 * statistics.median(backward[name])
        found[f"exposed_{name}_ms"] = 1e3 * statistics.median(exposed[name])
    return {**found, "times_less": found["exposed_after_ms"] / found["exposed_under_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.layers, options.width, options.megabytes, options.steps)
    print(f"{found['gradient_mb']:.1f} MB of gradients in {found['buckets']} buckets, link {found['link_ms']:.0f} ms")
    for name in ("after", "under"):
        print(f"  summed {name} backward: backward {found[f'backward_{name}_ms']:7.1f} ms, exposed "
              f"{found[f'exposed_{name}_ms']:7.1f} ms")
    print(f"  {found['times_less']:.1f} times less exposed")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
