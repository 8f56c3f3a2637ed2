"""A step as each device runs it: one compute stream, and links that serve transfers in the order in which they are
issued. Every time is a maximum of sums of earlier times, so that a faster link, a shorter latency or a faster operation
never makes anything later (promise 9). ``reference.run`` says the same as a recursion.

What an operation does, in this order:

1. the gather for the next operation is issued (weights are fetched one operation ahead)
2. the operation waits for its input and its own gather; transfers beside it are issued as it begins
3. what trails the operation before it (scattered gradients) is issued
4. it computes; of ``parts`` layers the first waits for its gather, the others overlap theirs
5. its in-line transfers, one after the other
6. its output is sent

A pair is one operation that waits for both inputs, has the in-line transfers of both beside its computation, and sends
both outputs at its end.

A transfer begins when it is ready and all its links have served what was issued before; it keeps each link for its
bytes over that link's bandwidth and ends ``latency`` + the longest of these later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from semel.planning.kernel import inner, kernel

BEFORE, BESIDE, IN_LINE, AFTER, AT_END, AT_END_IN_LINE, AT_START, AT_START_IN_LINE = range(8)
ROLES = 8
F, B, W = 0, 1, 3  # places in schedules.KINDS; 2 is the backward for the input

OPERATION = np.dtype([("kind", "i8"), ("microbatch", "i8"), ("chunk", "i8"), ("width", "i8"),
                      ("start", "f8"), ("computed", "f8"), ("end", "f8")])
"""width 2: runs with the next as a pair. start: computation begins; computed: it ends, with what it waited for gathers
in between; end: its output is there."""
CHUNK = np.dtype([("device", "i8"), ("send", "i8"), ("send_in_line", "i8"),
                  ("left", "i8"), ("ready", "f8"), ("ready_key", "i8")])
"""send: transfer to the next chunk (gradients back: the same), -1 without. left: gradients still to come; ready: from
when on its weights are there."""
TRANSFER = np.dtype([("total", "f8"), ("parts", "i8"), ("key", "i8"), ("first_load", "i8"), ("end_load", "i8")])
"""total: seconds on free links; parts: like ones, a layer or a bucket each; key: what exposed time is booked under."""
LOAD = np.dtype([("link", "i8"), ("seconds", "f8")])
RECORD = np.dtype([("device", "i8"), ("op", "i8"), ("transfer", "i8"), ("start", "f8"), ("end", "f8")])
"""A transfer that took place; op -1: of the step, not of an operation."""
DEVICE = np.dtype([("first", "i8"), ("stop", "i8"), ("at", "i8"), ("before", "i8"), ("free", "f8"), ("end", "f8"),
                   ("waiting", "f8"), ("out", "f8"), ("out_key", "i8"),
                   ("gather_first", "f8"), ("gather_last", "f8"), ("gather_parts", "i8"), ("gather_key", "i8")])
"""first, stop: its operations; at: the next, before: the last one's first; free: when the compute stream is; waiting:
seconds for other devices' operations; out: end of the last transfer that nothing on it waits for; gather_*: of the next
operation."""


class Program(NamedTuple):
    """All that a step is made of. Transfers of an operation: ``listed[lists[k]:lists[k + 1]]`` for k = (chunk * 4 +
    kind) * ROLES + role; those at start and end have kind 0."""

    operations: np.ndarray  # [operations] OPERATION
    devices: np.ndarray  # [devices] DEVICE
    chunks: np.ndarray  # [chunks] CHUNK
    seconds: np.ndarray  # [chunks, 4] by kind
    transfers: np.ndarray  # [transfers] TRANSFER
    loads: np.ndarray  # [loads] LOAD
    lists: np.ndarray
    listed: np.ndarray
    links: np.ndarray  # [devices, links] when each is free
    arrival: np.ndarray  # [2, chunks, micro-batches] inputs of forwards, of backwards; below 0: not known yet
    under_way: np.ndarray  # [2, chunks, micro-batches] how long each was sent
    exposed: np.ndarray  # [devices, keys] seconds
    records: np.ndarray  # [room] RECORD
    used: np.ndarray  # [1] records written


@inner
def issue(t, ready, device, op, program):
    """End of transfer ``t``, begun when it is ``ready`` and its links are free."""
    transfer = program.transfers[t]
    start = ready
    for at in range(transfer.first_load, transfer.end_load):
        start = max(start, program.links[device, program.loads[at].link])
    for at in range(transfer.first_load, transfer.end_load):
        program.links[device, program.loads[at].link] = start + program.loads[at].seconds
    end = start + transfer.total
    record = program.records[program.used[0]]
    record.device, record.op, record.transfer = device, op, t
    record.start, record.end = start, end
    program.used[0] += 1
    return end


@inner
def issue_gathers(op, d, program):
    """Weights for the operation (or pair) at ``op``."""
    device = program.devices[d]
    device.gather_first, device.gather_last, device.gather_parts, device.gather_key = 0.0, 0.0, 1, -1
    for i in range(op, op + program.operations[op].width):
        k = (program.operations[i].chunk * 4 + program.operations[i].kind) * ROLES + BEFORE
        for x in range(program.lists[k], program.lists[k + 1]):
            t = program.listed[x]
            transfer = program.transfers[t]
            end = issue(t, device.free, d, i, program)
            device.gather_first = max(device.gather_first, end - transfer.total * (1 - 1 / transfer.parts))
            device.gather_parts = max(device.gather_parts, transfer.parts)
            if end > device.gather_last:
                device.gather_last, device.gather_key = end, transfer.key


@inner
def issue_trailing(i, at_end, program):
    """From the first of its parts on beside the computation, the last part after it."""
    operation = program.operations[i]
    d = program.chunks[operation.chunk].device
    device = program.devices[d]
    k = operation.chunk * 4 * ROLES + (AT_END if at_end else operation.kind * ROLES + AFTER)
    for x in range(program.lists[k], program.lists[k + 1]):
        t = program.listed[x]
        transfer = program.transfers[t]
        ready = operation.start + (operation.computed - operation.start) / transfer.parts
        end = max(issue(t, ready, d, i, program), operation.computed + transfer.total / transfer.parts)
        program.records[program.used[0] - 1].end = end
        if end > device.out:
            device.out, device.out_key = end, transfer.key


@inner
def begin(program):
    """What precedes the first operations."""
    step = np.int64(-1)  # belongs to no operation
    for i in range(len(program.operations)):
        if program.operations[i].kind == B or program.operations[i].kind == W:
            program.chunks[program.operations[i].chunk].left += 1
    for c in range(len(program.chunks)):
        chunk = program.chunks[c]
        device = program.devices[chunk.device]
        k = c * 4 * ROLES
        for x in range(program.lists[k + AT_START], program.lists[k + AT_START + 1]):
            end = issue(program.listed[x], 0.0, chunk.device, step, program)
            if end > chunk.ready:
                chunk.ready, chunk.ready_key = end, program.transfers[program.listed[x]].key
        for x in range(program.lists[k + AT_START_IN_LINE], program.lists[k + AT_START_IN_LINE + 1]):
            end = issue(program.listed[x], device.free, chunk.device, step, program)
            program.exposed[chunk.device, program.transfers[program.listed[x]].key] += end - device.free
            device.free = end
    for d in range(len(program.devices)):
        if program.devices[d].first < program.devices[d].stop:
            issue_gathers(program.devices[d].first, d, program)


@inner
def send(i, d, program):
    """The output of operation ``i`` to where its micro-batch goes next."""
    operation, device = program.operations[i], program.devices[d]
    c, last = operation.chunk, len(program.chunks) - 1
    if operation.kind == F and c == last:
        program.arrival[1, c, operation.microbatch] = operation.end  # the loss is here: the way back begins
        return
    to, way = (c + 1, 0) if operation.kind == F else (c - 1, 1)
    if operation.kind == W or to < 0:
        return
    boundary = program.chunks[min(c, to)]
    arrives = operation.end
    if boundary.send >= 0 and program.chunks[to].device != d:
        arrives = issue(boundary.send, operation.end, d, i, program)
        if boundary.send_in_line and arrives > device.free:
            program.exposed[d, program.transfers[boundary.send].key] += arrives - device.free
            device.free = arrives
    program.arrival[way, to, operation.microbatch] = arrives
    program.under_way[way, to, operation.microbatch] = arrives - operation.end


@inner
def wait(i, d, program):
    """When operation (or pair) ``i`` begins to compute; -1 if one of its inputs is not known yet."""
    device = program.devices[d]
    came, sent, sent_key = 0.0, 0.0, 0
    for j in range(i, i + program.operations[i].width):
        operation = program.operations[j]
        if operation.kind != W:
            way = 0 if operation.kind == F else 1
            arrives = program.arrival[way, operation.chunk, operation.microbatch]
            if arrives < 0:
                return -1.0
            if arrives > came:
                came, sent = arrives, program.under_way[way, operation.chunk, operation.microbatch]
                if sent > 0:
                    sent_key = program.transfers[program.chunks[operation.chunk - (1 if way == 0 else 0)].send].key
    gather_first, gather_key = device.gather_first, device.gather_key
    start = device.free
    if came > start:
        sent = min(came - start, sent)
        program.exposed[d, sent_key] += sent
        device.waiting += came - start - sent
        start = came
    for j in range(i, i + program.operations[i].width):
        chunk = program.chunks[program.operations[j].chunk]
        if chunk.ready > start:
            program.exposed[d, chunk.ready_key] += chunk.ready - start
            start = chunk.ready
    if gather_first > start:
        program.exposed[d, gather_key] += gather_first - start
        start = gather_first
    return start


@inner
def operate(i, d, start, program):
    """Operation (or pair) ``i`` from its start on."""
    device = program.devices[d]
    after = i + program.operations[i].width
    last_gather, parts, gather_key = device.gather_last, device.gather_parts, device.gather_key
    if after < device.stop:
        issue_gathers(after, d, program)
    beside, beside_key, computation = start, -1, 0.0
    for j in range(i, after):
        operation = program.operations[j]
        operation.start = start
        computation += program.seconds[operation.chunk, operation.kind]
        k = (operation.chunk * 4 + operation.kind) * ROLES + BESIDE
        for x in range(program.lists[k], program.lists[k + 1]):
            end = issue(program.listed[x], start, d, j, program)
            if end > beside:
                beside, beside_key = end, program.transfers[program.listed[x]].key
    for j in range(device.before, i):
        issue_trailing(j, False, program)

    computed = max(start + computation, max(start + computation * (1 - 1 / parts), last_gather) + computation / parts)
    if gather_key >= 0:
        program.exposed[d, gather_key] += computed - (start + computation)
    now = computed
    for j in range(i, after):
        operation = program.operations[j]
        operation.computed = computed
        ready = start if after - i == 2 else computed
        k = (operation.chunk * 4 + operation.kind) * ROLES + IN_LINE
        for x in range(program.lists[k], program.lists[k + 1]):
            ready = issue(program.listed[x], ready, d, j, program)
            if ready > now:
                program.exposed[d, program.transfers[program.listed[x]].key] += ready - now
                now = ready
    if beside > now:
        program.exposed[d, beside_key] += beside - now
        now = beside
    device.free = now
    for j in range(i, after):
        operation = program.operations[j]
        operation.end = now
        send(j, d, program)
        if operation.kind == B or operation.kind == W:
            chunk = program.chunks[operation.chunk]
            chunk.left -= 1
            if chunk.left == 0:
                issue_trailing(j, True, program)
    device.before, device.at = i, after


@inner
def finish(program):
    """What follows the last operations."""
    step = np.int64(-1)
    for d in range(len(program.devices)):
        device = program.devices[d]
        for j in range(device.before, device.stop):
            issue_trailing(j, False, program)
        device.end = device.free
        if device.out > device.end:
            program.exposed[d, device.out_key] += device.out - device.end
            device.end = device.out
    for c in range(len(program.chunks)):
        d, k = program.chunks[c].device, c * 4 * ROLES + AT_END_IN_LINE
        device = program.devices[d]
        for x in range(program.lists[k], program.lists[k + 1]):
            end = issue(program.listed[x], device.end, d, step, program)
            program.exposed[d, program.transfers[program.listed[x]].key] += end - device.end
            device.end = end


@kernel
def run(program):
    """One step: fills times, ``exposed`` and ``records`` of ``program``, which is used up. False: the lists come to a
    standstill."""
    begin(program)
    moved = True
    while moved:
        moved = False
        for d in range(len(program.devices)):
            device = program.devices[d]
            while device.at < device.stop:
                start = wait(device.at, d, program)
                if start < 0:
                    break
                operate(device.at, d, start, program)
                moved = True
    for d in range(len(program.devices)):
        if program.devices[d].at < program.devices[d].stop:
            return False
    finish(program)
    return True
