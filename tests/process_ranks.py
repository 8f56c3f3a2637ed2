"""Ranks as processes: gloo on this machine, met through a file."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def on_processes(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 100.0) -> list[Any]:
    """``function(transport, *arguments)`` on each rank; what they return, by rank. ``function`` must be importable."""
    context = multiprocessing.get_context("spawn")
    until = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="semel-ranks-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_rank, daemon=True,
                                          args=(theirs, str(Path(folder) / "meet"), rank, world_size, function, arguments))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            results = []
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(max(until - time.monotonic(), 0)):
                    raise TimeoutError(f"rank {rank} of {world_size} has not finished in {timeout_s} s")
                kind, value = pipe.recv()
                if kind == "error":
                    raise RuntimeError(f"rank {rank}: {value}")
                results.append(value)
            for pipe in pipes:
                pipe.send("done")
            for process in processes:
                process.join(10)
            return results
        finally:
            for process in processes:
                process.kill()


def _rank(pipe: Connection, meet: str, rank: int, world_size: int, function: Callable[..., Any], arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    from semel.comm import Collective

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=world_size,
                                timeout=timedelta(seconds=60))
        pipe.send(("result", function(Collective(), *arguments)))
        pipe.recv()  # no process leaves while another still talks to it
        dist.destroy_process_group()
    except BaseException:
        import traceback

        pipe.send(("error", traceback.format_exc()))
        raise
