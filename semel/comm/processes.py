"""The processes of one job: joining them, and starting them on one machine."""

from __future__ import annotations

import atexit
import datetime
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from typing import Any

from semel.comm.interface import PeerLost

TIMEOUT_S = 50.0
"""A process that does not answer for as long counts as gone."""
GRACE_S = 20.0
"""When one process has failed or was told to stop, the others have as long to end by themselves: to save, say."""
TERMINATE_S = 5.0
"""And then as long between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class World:
    """``rank`` of ``world_size`` processes, of which ``local_world_size`` run on this host, this one as
    ``local_rank``."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


class ProcessDied(RuntimeError):
    """A process of the job ended without a word. ``exit_code``: of a shell, 128 + the signal that ended it."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


def join(timeout_s: float = TIMEOUT_S) -> World:
    """Join the processes that ``torchrun`` or ``spawn`` started; a process that neither started is a world of one,
    without torch.distributed. Sets up gloo, and NCCL where CUDA is; an exchange with a process that is gone, or silent
    for ``timeout_s``, raises PeerLost. Safe to call again. Raises ValueError for half of torchrun's variables."""
    global _world
    import torch.distributed as dist

    if _world is not None and (_world.world_size == 1 or dist.is_initialized()):
        return _world
    if "RANK" not in os.environ and not dist.is_initialized():
        return World()
    if dist.is_initialized():  # by the caller
        _world = World(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", dist.get_rank())),
                       int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())))
        return _world
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"RANK is set but {', '.join(missing)} is not; start the processes with torchrun, or unset it")
    world = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", 0)),
                  int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    _set_up("env://", world, timeout_s)
    return world


_world: World | None = None


def _set_up(address: str, world: World, timeout_s: float) -> None:
    global _world
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if cuda:
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=address, rank=world.rank,
                            world_size=world.world_size, timeout=datetime.timedelta(seconds=timeout_s))
    atexit.register(_part)
    _world = world


def _part() -> None:
    """Threads of groups that are still there when Python ends would abort the process, one time in two."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def spawn(function: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """``function(*args)`` in ``nproc`` new processes on this machine that have joined one another -> their results by
    rank. One process: called here, without torch.distributed.

    ``function``, ``args`` and the results are pickled; the function finds its rank with ``join()``. When a process
    fails, the others are ended, and what it raised is raised here, with a note of its rank (what the others then raise,
    PeerLost, is only raised if nothing else was); ProcessDied if it was killed. SIGTERM is handed on to all of them.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if nproc == 1:
        return [function(*args)]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="semel-job-") as folder:
        address = f"file://{folder}/rendezvous"
        children: list[_Child] = []
        with _HandedOn(children):
            try:
                for rank in range(nproc):
                    here, there = context.Pipe(duplex=False)
                    process = context.Process(target=_child, name=f"semel-rank-{rank}", daemon=False, args=(
                        address, World(rank, nproc, rank, nproc), timeout_s, there, function, args))
                    process.start()
                    there.close()  # so that it reads as ended when the child is gone
                    children.append(_Child(rank, process, here))
                failures = _watch(children)
            finally:
                _end(children)
    if failures:
        raise next((error for error in failures if not isinstance(error, PeerLost)), failures[0])
    return [child.result for child in children]


@dataclass
class _Child:
    rank: int
    process: Any
    pipe: Any
    result: Any = None
    reported: bool = False


def _watch(children: list[_Child]) -> list[BaseException]:
    """Until all have ended well, or one has not and the others had their time: failures in the order in which they
    came."""
    failures: list[BaseException] = []
    running = list(children)
    deadline: float | None = None
    while running and (deadline is None or time.monotonic() < deadline):
        wait_for([child.pipe for child in running], None if deadline is None else deadline - time.monotonic())
        for child in list(running):
            if not child.pipe.poll():
                continue
            try:
                error, child.result = child.pipe.recv()
                child.reported = True
            except EOFError:
                running.remove(child)
                child.process.join(GRACE_S)
                error = None if child.reported else _died(child, len(children))
            if error is not None:
                failures.append(error)
                deadline = deadline or time.monotonic() + GRACE_S
    return failures


def _died(child: _Child, nproc: int) -> ProcessDied:
    code = child.process.exitcode
    if code is not None and code < 0:
        how, code = f"was ended by {signal.Signals(-code).name}", 128 - code
        if how.endswith("SIGKILL"):
            how += " (the kernel does this when memory runs out)"
    else:
        how = f"ended with exit code {code}"
    return ProcessDied(f"the process of rank {child.rank} of {nproc} {how}; the others were stopped", code or 1)


def _end(children: list[_Child]) -> None:
    if not all(child.reported for child in children):  # else each ends by itself
        for child in children:
            child.process.terminate()
    for last in (False, True):
        until = time.monotonic() + TERMINATE_S
        for child in children:
            child.process.join(max(0.0, until - time.monotonic()))
            if not last and child.process.exitcode is None:
                child.process.kill()
    for child in children:
        child.pipe.close()


class _HandedOn:
    """Within the block SIGTERM to this process is one to each child (in the main thread; elsewhere signals cannot be
    set)."""

    def __init__(self, children: list[_Child]) -> None:
        self.children = children

    def __enter__(self) -> None:
        self.main = threading.current_thread() is threading.main_thread()
        if self.main:
            self.old = signal.signal(signal.SIGTERM, lambda *_: [child.process.terminate() for child in self.children])

    def __exit__(self, *_: Any) -> None:
        if self.main:
            signal.signal(signal.SIGTERM, self.old)


def _child(address: str, world: World, timeout_s: float, pipe: Any, function: Callable[..., Any], args: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.world_size) if hasattr(os, "sched_getaffinity")
                          else 1)
    try:
        _set_up(address, world, timeout_s)
        pipe.send((None, function(*args)))
        dist.destroy_process_group()
    except BaseException as error:
        trace = "".join(traceback.format_tb(error.__traceback__))
        error.add_note(f"in rank {world.rank} of {world.world_size}:\n{trace}")
        pipe.send((_portable(error), None))
        leave(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _portable(error: BaseException) -> BaseException:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def leave(exit_code: int) -> None:
    """End this process now, whatever its threads wait for: after a failure an exchange that is still under way would
    keep it, and with it the others, until their timeout."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
