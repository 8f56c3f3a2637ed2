"""Is a schedule one, and what does it hold?"""

from __future__ import annotations

import numpy as np

from semel.planning.schedules.operations import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Op, Schedule


def check(schedule: Schedule) -> None:
    """Every forward once, every backward once (whole, or both halves), each on the device that holds its chunk, and an
    order in which all can run: no device waits for one that waits for it. Raises ValueError that names the operation.
    """
    count, chunks = schedule.count, len(schedule.placement)
    device = np.repeat(np.arange(schedule.devices), np.diff(schedule.offsets))
    place = np.asarray(schedule.placement)
    if len(schedule.kinds) == 0:
        raise ValueError(f"{schedule.name} holds no operations")
    for wrong, why in ((schedule.chunks >= chunks, f"there are {chunks} virtual stages"),
                       (schedule.chunks < 0, "virtual stages begin at 0"),
                       (schedule.microbatches < 0, "micro-batches begin at 0")):
        if wrong.any():
            raise ValueError(f"{schedule.name}: {_op(schedule, int(wrong.argmax()))} cannot be: {why}")
    away = place[schedule.chunks] != device
    if away.any():
        at = int(away.argmax())
        raise ValueError(f"{schedule.name}: {_op(schedule, at)} is listed on device {device[at]}, its chunk is held by "
                         f"device {place[schedule.chunks[at]]}")
    times = np.zeros((4, chunks, count), np.int64)
    np.add.at(times, (schedule.kinds, schedule.chunks, schedule.microbatches), 1)
    for wrong, kind, what in ((times[FORWARD] != 1, "F", "forward"),
                              (times[BACKWARD] + times[INPUT] != 1, "I", "backward for the input"),
                              (times[BACKWARD] + times[WEIGHT] != 1, "W", "backward for the weights")):
        if wrong.any():
            chunk, microbatch = (int(x) for x in np.argwhere(wrong)[0])
            found = times[KINDS.index(kind), chunk, microbatch] + (kind != "F") * times[BACKWARD, chunk, microbatch]
            raise ValueError(f"{schedule.name}: {Op(kind, microbatch, chunk)}, the {what} of micro-batch {microbatch} "
                             f"through chunk {chunk}, is listed {found} times, not once")
    _runs(schedule, count, chunks)


def _runs(schedule: Schedule, count: int, chunks: int) -> None:
    """Lists are followed as far as they go; raises ValueError where all stand still."""
    forward, backward = np.zeros((chunks, count), bool), np.zeros((chunks, count), bool)
    lists = [list(zip(schedule.kinds[a:b].tolist(), schedule.microbatches[a:b].tolist(), schedule.chunks[a:b].tolist(),
                      strict=True)) for a, b in zip(schedule.offsets[:-1], schedule.offsets[1:], strict=True)]
    at = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for device, listed in enumerate(lists):
            k = at[device]
            while k < len(listed):
                kind, microbatch, chunk = listed[k]
                if kind == FORWARD:
                    if chunk and not forward[chunk - 1, microbatch]:
                        break
                    forward[chunk, microbatch] = True
                elif kind == WEIGHT:
                    if not backward[chunk, microbatch]:
                        break
                else:
                    ready = forward[chunk, microbatch] and (chunk == chunks - 1 or backward[chunk + 1, microbatch])
                    if not ready:
                        break
                    backward[chunk, microbatch] = True
                k += 1
            moved |= k > at[device]
            at[device] = k
    stuck = [device for device, listed in enumerate(lists) if at[device] < len(listed)]
    if stuck:
        where = int(schedule.offsets[stuck[0]]) + at[stuck[0]]
        raise ValueError(f"{schedule.name}: {_op(schedule, where)} on device {stuck[0]} waits for an operation that "
                         f"never comes before it")


def activations(schedule: Schedule) -> np.ndarray:
    """[devices] int64: most micro-batches whose activations a device holds at once, counted by chunk: from the forward
    on, until the weights' half of the backward (or the whole one) is done."""
    step = np.zeros(len(schedule.kinds), np.int64)
    step[schedule.kinds == FORWARD] = 1
    held = np.cumsum(step)
    # An operation that releases still holds while it runs.
    released = np.cumsum(np.isin(schedule.kinds, (BACKWARD, WEIGHT)))
    during = held - np.concatenate([[0], released[:-1]]) if len(step) else held
    most = np.zeros(schedule.devices, np.int64)
    for device, (a, b) in enumerate(zip(schedule.offsets[:-1], schedule.offsets[1:], strict=True)):
        # Each device ends with nothing held, so sums over all devices before it cancel.
        most[device] = during[a:b].max(initial=0)
    return most


def _op(schedule: Schedule, index: int) -> Op:
    return Op(KINDS[schedule.kinds[index]], int(schedule.microbatches[index]), int(schedule.chunks[index]))
