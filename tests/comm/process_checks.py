"""What the processes of ``test_processes`` run: few imports, so that they start soon."""

import os
import signal
import threading
import time

import torch

from semel.comm import join
from semel.comm.transport import transport


def fail(how, *ranks):
    """Waits for the others; these ranks do not come."""
    t = transport()
    t.all_gather(torch.ones(1)).wait()
    if t.rank in ranks:
        if how == "raise":
            raise ValueError(f"no data for rank {t.rank}")
        if how == "leave":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    t.all_gather(torch.ones(1)).wait()
    time.sleep(0.05)
    t.all_gather(torch.ones(1)).wait()


def wait_for_sigterm(folder):
    """Each rank writes a file when it is told to stop, as a trainer saves."""
    world, told = join(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    (folder / f"ready-{world.rank}").touch()
    assert told.wait(60)
    (folder / f"saved-{world.rank}").touch()
    return world.rank
