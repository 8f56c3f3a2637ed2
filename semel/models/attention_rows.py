"""Jagged attention on a CPU: compiled loops over the rows as they are, without padding.

Per row and head, blocks of ``BLOCK`` queries meet the keys they may see; a block's scores, its bias, its weights and
their use stay in the first caches. The backward computes the scores again, so memory is linear in the length. Rows are
shared out to ``torch.get_num_threads()`` threads; every sum has one order whatever their number, so the result does not
depend on it.

Semi-local attention packs what a block of queries may see, the first keys of the row and a window, into neighbouring
columns: two runs of keys, of which the first is empty otherwise.

Axes as in ``semel.models.attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semel.models.compiled import exp, kernel, shared_out
from semel.models.time_bias import TIME_BOUNDS

BLOCK = 32
"""Queries of a block: 200 keys' scores are 25 KiB of float32, a first-level cache's worth."""

SERIAL_PAIRS = 1 << 14
"""Fewer query-key pairs than this are not worth a second thread."""


TimeRuns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""What a query sees, in runs of one time bucket: those ``first[query]`` to ``end[query]``; each one's ``stop``, the
column behind its last, and ``bucket``. All layers, forward and backward, add by these."""

_NO_RUNS: TimeRuns = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8))

_EVERYTHING = 1 << 62
"""A window that leaves nothing out."""


class RowsPlan:
    """Who meets whom, in the order in which rows are worked on: longest first."""

    def __init__(self, query_offsets: Tensor, key_offsets: Tensor, causal: bool, query_time: Tensor | None,
                 key_time: Tensor | None, window: int | None = None, prefix: int = 0) -> None:
        near = _EVERYTHING if window is None else window
        seen = (0, near) if window is None else (prefix, near)
        self.rows = (query_offsets.numpy(), key_offsets.numpy(), causal, *seen)
        self.times = None if query_time is None or key_time is None else (query_time.numpy(), key_time.numpy())
        pairs = np.diff(self.rows[0]) * np.minimum(np.diff(self.rows[1]), near + prefix + BLOCK)
        self.pairs = int(pairs.sum())
        self.order = np.argsort(-pairs, kind="stable")
        self._runs: dict[tuple[int, int], TimeRuns] = {}

    def run(self, loop: Callable[..., None], timed: bool, *arguments: Any) -> None:
        """``loop`` over all rows, shared out to threads; ``timed``: where there are times, with time buckets."""
        threads = min(torch.get_num_threads(), len(self.order)) if self.pairs > SERIAL_PAIRS else 1

        def part(number: int) -> None:
            order = np.ascontiguousarray(self.order[number::threads])
            runs = _NO_RUNS
            if timed and self.times is not None:
                if (threads, number) not in self._runs:
                    self._runs[threads, number] = _time_runs(*self.times, np.array(TIME_BOUNDS), *self.rows, order)
                runs = self._runs[threads, number]
            loop(*arguments, *runs, *self.rows, order)

        shared_out(part, threads)


class RowsAttention(torch.autograd.Function):
    """Values come and go without ``1 / norm`` and queries without ``scale``: the loops see them multiplied in."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, position_bias: Tensor,
                time_bias: Tensor, plan: RowsPlan, weighting: str, scale: float, norm: float) -> Tensor:
        inputs = [x.contiguous() for x in (q * scale, k, v / norm, own_k, own_v / norm, position_bias, time_bias)]
        out = torch.empty_like(inputs[0])
        plan.run(_forward, len(time_bias) > 0, *map(_array, inputs), weighting == "softmax", out.numpy())
        ctx.save_for_backward(*inputs)
        ctx.plan, ctx.weighting, ctx.scale, ctx.norm = plan, weighting, scale, norm
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs, plan = ctx.saved_tensors, ctx.plan
        rows = len(plan.order)
        *tokens, position_bias, time_bias = inputs
        totals = [torch.zeros_like(x) for x in tokens]
        # One line a row, added up in their order: the sum is then the same for any number of threads.
        by_row = [torch.zeros(rows, len(x), dtype=x.dtype) for x in (position_bias, time_bias)]
        plan.run(_backward, len(time_bias) > 0, *map(_array, inputs), ctx.weighting == "softmax",
                 _array(grads[0].contiguous()), *map(_array, totals), *map(_array, by_row))
        dq, dk, dv, down_k, down_v = totals
        needed = ctx.needs_input_grad
        return (
            dq * ctx.scale, dk, dv / ctx.norm,
            down_k if needed[3] else None, down_v / ctx.norm if needed[4] else None,
            by_row[0].sum(0) if needed[5] else None, by_row[1].sum(0) if needed[6] else None,
            None, None, None, None,
        )


def _array(x: Tensor) -> np.ndarray:
    return x.detach().numpy()


@kernel
def _dots(rows, first, count, head, columns, at, width, out, to):
    """``out[i, to + j] = sum_d rows[first + i, head, d] columns[d, at + j]`` for i < count, j < width. Two rows and
    four terms at a time: what the vector registers hold. ``out`` has a row to spare."""
    depth = rows.shape[2]
    for i in range(0, count, 2):
        a, b = rows[first + i, head], rows[first + min(i + 1, count - 1), head]
        o, p = out[i, to:], out[i + 1, to:]
        for j in range(width):
            o[j] = 0
            p[j] = 0
        d = 0
        while d + 4 <= depth:
            a0, a1, a2, a3, b0, b1, b2, b3 = a[d], a[d + 1], a[d + 2], a[d + 3], b[d], b[d + 1], b[d + 2], b[d + 3]
            c0, c1, c2, c3 = columns[d, at:], columns[d + 1, at:], columns[d + 2, at:], columns[d + 3, at:]
            for j in range(width):
                o[j] += a0 * c0[j] + a1 * c1[j] + a2 * c2[j] + a3 * c3[j]
                p[j] += b0 * c0[j] + b1 * c1[j] + b2 * c2[j] + b3 * c3[j]
            d += 4
        while d < depth:
            a0, b0, c0 = a[d], b[d], columns[d, at:]
            for j in range(width):
                o[j] += a0 * c0[j]
                p[j] += b0 * c0[j]
            d += 1


@kernel
def _weigh(a, b, width, rows, first, head, o, p):
    """``o[d] += sum_j a[j] rows[first + j, head, d]`` for j < width, and ``p`` the same with ``b``."""
    j = 0
    while j + 4 <= width:
        a0, a1, a2, a3, b0, b1, b2, b3 = a[j], a[j + 1], a[j + 2], a[j + 3], b[j], b[j + 1], b[j + 2], b[j + 3]
        at = first + j
        c0, c1, c2, c3 = rows[at, head], rows[at + 1, head], rows[at + 2, head], rows[at + 3, head]
        for d in range(len(o)):
            o[d] += a0 * c0[d] + a1 * c1[d] + a2 * c2[d] + a3 * c3[d]
            p[d] += b0 * c0[d] + b1 * c1[d] + b2 * c2[d] + b3 * c3[d]
        j += 4
    while j < width:
        a0, b0, c0 = a[j], b[j], rows[first + j, head]
        for d in range(len(o)):
            o[d] += a0 * c0[d]
            p[d] += b0 * c0[d]
        j += 1


@kernel
def _weigh_block(weights, at, count, width, rows, first, head, out, to, spare):
    """``out[to + i, head] += sum_j weights[i, at + j] rows[first + j, head]`` for i < count, j < width."""
    for i in range(0, count - 1, 2):
        _weigh(weights[i, at:], weights[i + 1, at:], width, rows, first, head, out[to + i, head], out[to + i + 1, head])
    if count % 2:
        i = count - 1
        _weigh(weights[i, at:], weights[i, at:], width, rows, first, head, out[to + i, head], spare)


@kernel
def _transpose(rows, first, count, head, out):
    """``out[d, j] = rows[first + j, head, d]``."""
    for j in range(count):
        b = rows[first + j, head]
        for d in range(len(b)):
            out[d, j] = b[d]


@kernel
def _sum(a, start, stop):
    total = a.dtype.type(0)
    for j in range(start, stop):
        total += a[j]
    return total


@kernel
def _dot(a, b):
    total = a[0] * b[0]
    for d in range(1, len(a)):
        total += a[d] * b[d]
    return total


@kernel
def _by_column(position_bias, longest):
    """``out[longest - distance]`` for distances 0 to ``longest``: neighbouring columns, neighbouring places."""
    positions = len(position_bias)
    out = np.empty(longest + 1 if positions else 0, position_bias.dtype)
    for place in range(len(out)):
        out[place] = position_bias[min(longest - place, positions - 1)]
    return out


@kernel
def _add_line(scores, start, stop, line, at):
    """``scores[j] += line[at + j]`` for the columns ``start:stop``."""
    for j in range(start, stop):
        scores[j] += line[at + j]


@kernel
def _add_runs(scores, time_bias, run_stop, run_bucket, first, end):
    """Add the biases of the runs ``first`` to ``end``. Columns between two that do not touch get some, too."""
    start = 0
    for run in range(first, end):
        bias = time_bias[run_bucket[run]]
        for j in range(start, run_stop[run]):
            scores[j] += bias
        start = run_stop[run]


@kernel
def _block(start, count, keys, causal, prefix, window):
    """What the queries ``start`` to ``start + count`` see together: keys ``0:low`` and ``local:high``. In columns the
    second run follows the first: column j >= low is key j + ``gap``."""
    high = start + count if causal else keys
    low = min(prefix, high)
    local = max(low, (start if causal else keys) - window)
    return low, high, local, local - low


@kernel
def _seen(query, keys, causal, window, low, local, gap):
    """Of these one query sees the columns ``0:a`` and ``b:seen``; it stands ``behind`` key 0 by so many."""
    behind = query if causal else keys
    stop = query + 1 if causal else keys
    a = min(low, stop)
    seen = max(a, stop - gap)
    return behind, a, min(max(a, max(local, behind - window) - gap), seen), seen


@kernel
def _time_runs(query_time, key_time, bounds, query_offsets, key_offsets, causal, prefix, window, order):
    """``TimeRuns`` of the rows of ``order``."""
    run_first, run_end = np.empty(len(query_time), np.int64), np.empty(len(query_time), np.int64)
    run_stop, run_bucket = np.empty(16 * len(query_time), np.int32), np.empty(16 * len(query_time), np.uint8)
    runs = 0
    for row in order:
        first_q, first_k = query_offsets[row], key_offsets[row]
        queries, keys = query_offsets[row + 1] - first_q, key_offsets[row + 1] - first_k
        for start in range(0, queries, BLOCK):
            low, _, local, gap = _block(start, min(BLOCK, queries - start), keys, causal, prefix, window)
            for query in range(start, min(start + BLOCK, queries)):
                at = first_q + query
                if query and not causal and query_time[at] == query_time[at - 1]:  # a request's candidates
                    run_first[at], run_end[at] = run_first[at - 1], run_end[at - 1]
                    continue
                _, a, b, seen = _seen(query, keys, causal, window, low, local, gap)
                if runs + seen > len(run_stop):
                    run_stop = np.append(run_stop, np.empty(runs + seen, np.int32))
                    run_bucket = np.append(run_bucket, np.empty(runs + seen, np.uint8))
                run_first[at] = runs
                runs = _find_runs(0, a, query_time[at], key_time, first_k, bounds, run_stop, run_bucket, runs)
                runs = _find_runs(b, seen, query_time[at], key_time, first_k + gap, bounds, run_stop, run_bucket, runs)
                run_end[at] = runs
    return run_first, run_end, run_stop, run_bucket


@kernel
def _find_runs(start, stop, now, key_time, first, bounds, run_stop, run_bucket, runs):
    """Cut the columns ``start:stop`` (column 0 is key ``first``) and put them behind the ``runs`` there are; how many
    then. Neighbours in a history are neighbours in time: the bucket of the key before is the place to look from."""
    b, last, j = 0, len(bounds) - 1, start
    while j < stop:
        distance = abs(now - key_time[first + j])
        while distance < bounds[b]:
            b -= 1
        while b < last and distance >= bounds[b + 1]:
            b += 1
        low, high = bounds[b], bounds[b + 1] if b < last else np.iinfo(np.int64).max
        j += 1
        while j < stop and low <= abs(now - key_time[first + j]) < high:
            j += 1
        run_stop[runs], run_bucket[runs] = j, b
        runs += 1
    return runs


@kernel
def _forward(q, k, v, own_k, own_v, position_bias, time_bias, softmax, out, run_first, run_end, run_stop, run_bucket,
             query_offsets, key_offsets, causal, prefix, window, order):
    depth = q.shape[2]
    one = q.dtype.type(1)
    own = len(own_k) > 0
    longest = 0
    for row in order:
        longest = max(longest, key_offsets[row + 1] - key_offsets[row])
    columns = np.empty((depth, longest), q.dtype)
    scores = np.empty((BLOCK + 1, longest + 1), q.dtype)  # the own token's score stands behind the last key's
    spare = np.empty(depth, q.dtype)
    line = _by_column(position_bias, longest)
    for row in order:
        first_q, first_k = query_offsets[row], key_offsets[row]
        queries, keys = query_offsets[row + 1] - first_q, key_offsets[row + 1] - first_k
        for head in range(q.shape[1]):
            _transpose(k, first_k, keys, head, columns)
            for start in range(0, queries, BLOCK):
                count = min(BLOCK, queries - start)
                low, high, local, gap = _block(start, count, keys, causal, prefix, window)
                block = high - gap
                if low:
                    _dots(q, first_q + start, count, head, columns, 0, low, scores, 0)
                _dots(q, first_q + start, count, head, columns, local, high - local, scores, low)
                for i in range(count):
                    at = first_q + start + i
                    behind, a, b, seen = _seen(start + i, keys, causal, window, low, local, gap)
                    s, o = scores[i], out[at, head]
                    if len(line):
                        _add_line(s, 0, a, line, longest - behind)
                        _add_line(s, b, seen, line, longest - behind + gap)
                    if len(run_first):
                        _add_runs(s, time_bias, run_stop, run_bucket, run_first[at], run_end[at])
                    for j in range(a, b):
                        s[j] = -np.inf
                    width = seen
                    if own:
                        s[seen] = _dot(q[at, head], own_k[at, head])
                        width += 1
                    if softmax:
                        _softmax(s, width)
                    else:
                        for j in range(width):
                            s[j] = s[j] / (one + exp(-s[j]))
                    for d in range(depth):
                        o[d] = s[seen] * own_v[at, head, d] if own else 0
                    for j in range(a, b):
                        s[j] = 0
                    for j in range(seen, block):
                        s[j] = 0
                if low:
                    _weigh_block(scores, 0, count, low, v, first_k, head, out, first_q + start, spare)
                _weigh_block(scores, low, count, block - low, v, first_k + local, head, out, first_q + start, spare)


@kernel
def _softmax(s, width):
    if not width:
        return
    top = s[0]
    for j in range(1, width):
        top = max(top, s[j])
    for j in range(width):
        s[j] = exp(s[j] - top)
    total = s[0]
    for j in range(1, width):
        total += s[j]
    for j in range(width):
        s[j] /= total


@kernel
def _backward(q, k, v, own_k, own_v, position_bias, time_bias, softmax, grad, dq, dk, dv, down_k, down_v, dposition,
              dtime, run_first, run_end, run_stop, run_bucket, query_offsets, key_offsets, causal, prefix, window,
              order):
    depth = q.shape[2]
    one = q.dtype.type(1)
    own = len(own_k) > 0
    positions = len(position_bias)
    longest = 0
    for row in order:
        longest = max(longest, key_offsets[row + 1] - key_offsets[row])
    k_columns, v_columns = np.empty((depth, longest), q.dtype), np.empty((depth, longest), q.dtype)
    scores, dscores = np.empty((BLOCK + 1, longest + 1), q.dtype), np.empty((BLOCK + 1, longest + 1), q.dtype)
    # The same two turned around, to be summed over queries.
    weights_t, dscores_t = np.empty((longest, BLOCK), q.dtype), np.empty((longest, BLOCK), q.dtype)
    spare = np.empty(depth, q.dtype)
    line = _by_column(position_bias, longest)
    dline = np.zeros_like(line)
    for row in order:
        first_q, first_k = query_offsets[row], key_offsets[row]
        queries, keys = query_offsets[row + 1] - first_q, key_offsets[row + 1] - first_k
        for head in range(q.shape[1]):
            _transpose(k, first_k, keys, head, k_columns)
            _transpose(v, first_k, keys, head, v_columns)
            for start in range(0, queries, BLOCK):
                count = min(BLOCK, queries - start)
                low, high, local, gap = _block(start, count, keys, causal, prefix, window)
                block = high - gap
                if low:
                    _dots(q, first_q + start, count, head, k_columns, 0, low, scores, 0)
                    _dots(grad, first_q + start, count, head, v_columns, 0, low, dscores, 0)
                _dots(q, first_q + start, count, head, k_columns, local, high - local, scores, low)
                _dots(grad, first_q + start, count, head, v_columns, local, high - local, dscores, low)
                for i in range(count):
                    at = first_q + start + i
                    behind, a, b, seen = _seen(start + i, keys, causal, window, low, local, gap)
                    s, ds = scores[i], dscores[i]
                    if len(line):
                        _add_line(s, 0, a, line, longest - behind)
                        _add_line(s, b, seen, line, longest - behind + gap)
                    if len(run_first):
                        _add_runs(s, time_bias, run_stop, run_bucket, run_first[at], run_end[at])
                    for j in range(a, b):
                        s[j], ds[j] = -np.inf, 0
                    width = seen
                    if own:
                        s[seen] = _dot(q[at, head], own_k[at, head])
                        ds[seen] = _dot(grad[at, head], own_v[at, head])
                        width += 1
                    if softmax:
                        _softmax(s, width)
                        inner = _dot(s[:width], ds[:width]) if width else one
                        for j in range(width):
                            ds[j] = s[j] * (ds[j] - inner)
                    else:
                        for j in range(width):
                            x = s[j]
                            chance = one / (one + exp(-x))
                            s[j] = x * chance
                            ds[j] *= chance * (one + x * (one - chance))
                    for j in range(a, b):
                        s[j], ds[j] = 0, 0
                    if own:
                        for d in range(depth):
                            dq[at, head, d] += ds[seen] * own_k[at, head, d]
                            down_k[at, head, d] += ds[seen] * q[at, head, d]
                            down_v[at, head, d] += s[seen] * grad[at, head, d]
                    if len(line):
                        _add_line(dline[longest - behind:], 0, a, ds, 0)
                        _add_line(dline[longest - behind + gap:], b, seen, ds, 0)
                    if len(run_first):
                        column = 0
                        for run in range(run_first[at], run_end[at]):
                            dtime[row, run_bucket[run]] += _sum(ds, column, run_stop[run])
                            column = run_stop[run]
                    for j in range(seen):
                        weights_t[j, i], dscores_t[j, i] = s[j], ds[j]
                    for j in range(seen, block):
                        weights_t[j, i], dscores_t[j, i], ds[j] = 0, 0, 0
                near, first_near = block - low, first_k + local
                if low:
                    _weigh_block(dscores, 0, count, low, k, first_k, head, dq, first_q + start, spare)
                    _weigh_block(dscores_t, 0, low, count, q, first_q + start, head, dk, first_k, spare)
                    _weigh_block(weights_t, 0, low, count, grad, first_q + start, head, dv, first_k, spare)
                _weigh_block(dscores, low, count, near, k, first_near, head, dq, first_q + start, spare)
                _weigh_block(dscores_t[low:], 0, near, count, q, first_q + start, head, dk, first_near, spare)
                _weigh_block(weights_t[low:], 0, near, count, grad, first_q + start, head, dv, first_near, spare)
        for place in range(len(line)):
            dposition[row, min(longest - place, positions - 1)] += dline[place]
            dline[place] = 0
