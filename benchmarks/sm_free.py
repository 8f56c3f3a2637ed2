"""How much a dense kernel slows down beside communication: by copy engines, and by a kernel that holds multiprocessors.

    python -m benchmarks.sm_free [--length 8192] [--rounds 15] [--json FILE]

One GPU cannot exchange with another, but it can do to itself what an exchange does to it. Beside the dense kernel runs
nothing; or copies between pinned host memory and the device in both directions, which copy engines do (what ``staged``
and ``copy_engine`` cost a kernel); or a kernel of 4 to 32 resident blocks of 512 threads that copies device memory, as
NCCL's channels do (what ``collective`` costs it). Published: about 10 % (FreeScale, arXiv 2604.24073, figure 10).

Dense: a bfloat16 matrix product, and causal attention of heads 128 wide. Medians of interleaved rounds by CUDA events,
with the middle half; a round counts only if the copies went on until the dense kernels were done. Without a CUDA device
nothing is measured, and the command says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

BLOCKS = (4, 8, 16, 32)
REPEATS = 10
MIB = 1 << 20


def dense_kernels(length: int) -> dict[str, Callable[[], Any]]:
    a, b = (torch.randn(length, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q, k, v = (torch.randn(2, 8, length, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return {f"matmul {length} x 4096 x {length}": lambda: a @ b.T,
            f"attention 2 x 8 x {length} x 128": lambda: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True)}


def traffic() -> dict[str, list[Callable[[], Any]]]:
    """Name -> copies of 64 MiB, one for each stream on which they go on side by side."""
    host = [torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    out: dict[str, list[Callable[[], Any]]] = {
        "nothing": [],
        "copy engines, both ways": [lambda: host[0].copy_(device[0], non_blocking=True),
                                    lambda: device[1].copy_(host[1], non_blocking=True)]}
    if find_spec("triton") is not None:
        for blocks in BLOCKS:
            out[f"copy kernel, {blocks} blocks"] = [resident_copy(device[0], device[1], blocks)]
    return out


def resident_copy(source: torch.Tensor, target: torch.Tensor, blocks: int) -> Callable[[], Any]:
    """A copy by ``blocks`` blocks of 512 threads, each of which stays on its multiprocessor until the end."""
    from benchmarks._resident_copy import resident_copy as kernel

    words = source.view(torch.int32), target.view(torch.int32)
    return lambda: kernel[(blocks,)](*words, len(words[0]), BLOCK=4096, num_warps=16)


def timed(dense: Callable[[], Any], beside: list[Callable[[], Any]], streams: list[Any], copies: int,
          ) -> tuple[float, bool]:
    """(milliseconds of one dense kernel, whether the copies lasted as long)."""
    torch.cuda.synchronize()
    ends = []
    for copy, stream in zip(beside, streams, strict=False):
        with torch.cuda.stream(stream):
            for _ in range(copies):
                copy()
            ends.append(torch.cuda.Event())
            ends[-1].record(stream)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPEATS):
        dense()
    end.record()
    end.synchronize()
    lasted = not any(event.query() for event in ends)
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPEATS, lasted


def measure(length: int, rounds: int) -> list[dict[str, Any]]:
    streams = [torch.cuda.Stream() for _ in range(2)]
    lines = []
    for name, dense in dense_kernels(length).items():
        kinds = traffic()
        copies = dict.fromkeys(kinds, 8)
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for kind, beside in kinds.items():  # as many copies as outlast the dense kernels; also warms up
            while not timed(dense, beside, streams, copies[kind])[1] and beside and copies[kind] < 4096:
                copies[kind] *= 2
        for _ in range(rounds):
            for kind, beside in kinds.items():
                taken, lasted = timed(dense, beside, streams, copies[kind])
                if lasted or not beside:
                    times[kind].append(taken)
        for kind, taken in times.items():
            if taken:
                low, middle, high = (float(x) for x in np.percentile(taken, (25, 50, 75)))
                lines.append({"dense": name, "beside": kind, "ms": middle, "ms_middle_half": [low, high],
                              "slowdown": middle / float(np.median(times["nothing"])), "rounds": len(taken)})
    return lines


def show(result: dict[str, Any]) -> None:
    print(f"{result['date']}  {result['device']}  PyTorch {result['torch']}")
    print("dense kernel".ljust(34) + "beside".ljust(28) + "ms (middle half)".rjust(24) + "slowdown".rjust(10))
    for line in result["lines"]:
        low, high = line["ms_middle_half"]
        print(f"{line['dense']:34}{line['beside']:28}" + f"{line['ms']:.3f} ({low:.3f}-{high:.3f})".rjust(24)
              + f"{line['slowdown']:9.3f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    if not torch.cuda.is_available():
        result: dict[str, Any] = {"measured": False, "date": today, "why": "no CUDA device"}
        print(f"{today}: not measured, this machine has no CUDA device that PyTorch {torch.__version__} can use")
    else:
        result = {"measured": True, "date": today, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                  "lines": measure(options.length, options.rounds)}
        show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
