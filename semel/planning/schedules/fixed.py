"""Schedules whose order is a formula: no durations enter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from semel.planning.schedules.operations import BACKWARD, FORWARD, Op, Schedule, folded, looped

Phases = list[tuple[int, str]]
"""How often a pattern is run, and the pattern: kinds with the place of the chunk on its device ("F0 I1"; "F0+B1" as a
pair). Micro-batches are taken in order, counted for each word by itself; a word whose micro-batches are all done is
left out."""


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards in reverse order (Huang et al., arXiv 1811.06965). Holds m activations."""
    forward, backward = range(microbatches), reversed(range(microbatches))
    order = [("F", microbatch) for microbatch in forward] + [("B", microbatch) for microbatch in backward]
    ops = [[Op(kind, microbatch, device) for kind, microbatch in order] for device in range(stages)]
    return Schedule.of("gpipe", ops, looped(stages, 1))


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward (Narayanan et al., arXiv 1806.03377; with flush 2006.09503). Device d holds at most
    p - d activations."""
    return _played("1f1b", looped(stages, 1), microbatches, lambda d: [
        (stages - 1 - d, "F0"), (microbatches, "F0 B0")])


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2): p micro-batches go through a chunk, then
    through the device's next. Device d runs 2 (p - 1 - d) + (v - 1) p forwards ahead. Raises ValueError unless m is a
    multiple of p."""
    if microbatches % stages:
        below, above = microbatches // stages * stages, -(-microbatches // stages) * stages
        raise ValueError(f"interleaved takes a multiple of its {stages} stages in micro-batches, not {microbatches}: "
                         f"use {f'{below} or ' if below else ''}{above}")
    total = microbatches * chunks
    step = np.arange(total)
    lap, place = step // (stages * chunks), step % (stages * chunks)
    microbatch, local = lap * stages + place % stages, place // stages
    parts = []
    for device in range(stages):
        ahead = min(2 * (stages - 1 - device) + (chunks - 1) * stages, total)
        # Forward k comes at ahead + 2 (k - ahead) from then on, backward k right after forward k + ahead.
        forward = np.where(step < ahead, step, 2 * step - ahead)
        backward = np.where(step < total - ahead, ahead + 2 * step + 1, total + step)
        kinds, of, on = (np.empty(2 * total, np.int64) for _ in range(3))
        kinds[forward], kinds[backward] = FORWARD, BACKWARD
        of[forward] = of[backward] = microbatch
        on[forward], on[backward] = local * stages + device, (chunks - 1 - local) * stages + device
        parts.append((kinds, of, on))
    kinds, of, on = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Schedule("interleaved", kinds, of, on, np.arange(stages + 1) * 2 * total, looped(stages, chunks))


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Zero bubble H1 (Qi et al., arXiv 2401.10241, section 2.1): 1F1B with the weights' half of the backward put off by
    d micro-batches on device d, where it fills the drain. Holds p activations, as 1F1B."""
    return _played("zb_h1", looped(stages, 1), microbatches, lambda d: [
        (stages - 1 - d, "F0"), (d, "F0 I0"), (microbatches, "F0 I0 W0")])


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Zero bubble H2 (the same, section 2.2): twice the forwards ahead, weights put off by 2 d. Holds 2 p - 1
    activations; no device idles between its first and last operation where F = I = W."""
    return _played("zb_h2", looped(stages, 1), microbatches, lambda d: [
        (2 * (stages - 1 - d), "F0"), (2 * d, "F0 I0"), (microbatches, "F0 I0 W0")])


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Zero bubble V (the same, section 6; Qi et al., arXiv 2405.15362): two chunks a device, folded. Holds 2 p
    activations of a chunk, as many bytes as 1F1B's p of a stage."""
    steady = max(microbatches, 2 * stages - 1) - stages
    return _played("zb_v", folded(stages), microbatches, lambda d: [
        (2 * (stages - d) - 1, "F0"), (d, "F1 F0"), (stages - d, "F1 I1 W1"), (steady, "F0 I0 W0 F1 I1 W1"),
        (d, "I0 I1"), (stages - d, "I0 W0"), (microbatches, "W1"), (microbatches, "W0")])


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipeV, the folded half of DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1; the eight steps of
    github.com/deepseek-ai/DualPipe). Raises ValueError below 2 p micro-batches."""
    if microbatches < 2 * stages:
        raise ValueError(f"dualpipe_v with {stages} stages takes at least {2 * stages} micro-batches, not "
                         f"{microbatches}")

    def phases(d: int) -> Phases:
        rest, last = stages - 1 - d, d + 1
        # From the middle of the closing backwards on their weights' half is put off, to fill the drain.
        closing = [(1, f"{'I' if turn > last // 2 - (d % 2) else 'B'}1 {'I' if turn >= last // 2 else 'B'}0")
                   for turn in range(last)]
        alone = rest == 0  # the last device's first two are not overlapped: others wait for them
        return [(2 * rest, "F0"), (last, "F0 F1"), (rest, "I1 W F1"), (alone, "F0 B1 F1+B0"),
                (microbatches - 2 * stages + last - alone, "F0+B1 F1+B0"), (rest, "B1 F1+B0"), *closing, (rest, "W I0"),
                (last, "W")]

    return _played("dualpipe_v", folded(stages), microbatches, phases)


def local(stages: int, microbatches: int, chunks: int, sync_every: int) -> Schedule:
    """The order of 1F1B (one chunk) or interleaved, between replicas that exchange parameters every ``sync_every``
    steps (DiLoCo-like): not the synchronous optimization. Raises ValueError for ``sync_every`` below 1."""
    if sync_every < 1:
        raise ValueError(f"sync_every must be at least 1 step, got {sync_every}")
    base = one_f_one_b(stages, microbatches) if chunks == 1 else interleaved(stages, microbatches, chunks)
    return replace(base, name="local", exact=False, sync_every=sync_every)


def _played(name: str, placement: tuple[int, ...], microbatches: int, phases: Callable[[int], Phases]) -> Schedule:
    """Each device's phases written out. "W" without a place is the oldest input backward whose weights are due."""
    stages = max(placement) + 1
    held = [[chunk for chunk, on in enumerate(placement) if on == device] for device in range(stages)]
    ops, pairs, before = [], [], 0
    for device in range(stages):
        begun = {kind + str(place): 0 for kind in "FI" for place in range(len(held[device]))}
        due: list[tuple[int, int]] = []  # (place, micro-batch), oldest first
        listed: list[Op] = []
        for times, pattern in phases(device):
            for _ in range(times):
                for word in pattern.replace("+", " +").split():
                    if word[0] == "+":
                        pairs.append(before + len(listed) - 1)
                        word = word[1:]
                    kind = word[0]
                    if kind == "W":
                        oldest = next((one for one in due if word in ("W", f"W{one[0]}")), None)
                        if oldest is None:
                            continue
                        due.remove(oldest)
                        place, microbatch = oldest
                    else:
                        place, counter = int(word[1:]), ("F" if kind == "F" else "I") + word[1:]
                        microbatch = begun[counter]
                        if microbatch == microbatches:
                            continue
                        begun[counter] += 1
                        if kind == "I":
                            due.append((place, microbatch))
                    listed.append(Op(kind, microbatch, held[device][place]))
        ops.append(listed)
        before += len(listed)
    return Schedule.of(name, ops, placement, pairs=np.array(pairs, np.int64))
