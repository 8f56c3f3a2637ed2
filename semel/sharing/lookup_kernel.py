"""The loop of ``lookup``: rows by address, compiled. Addresses are those of tensors that the caller holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _load(source: ir.Type, result: Any, widen: str) -> Any:
    def load(typing: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(builder.inttoptr(arguments[0], source.as_pointer()))
            return getattr(builder, widen)(value, ir.IntType(64)) if widen else value

        return result(types.int64), generate

    return intrinsic(load)


_int64 = _load(ir.IntType(64), types.int64, "")
_int32 = _load(ir.IntType(32), types.int64, "sext")
_float32 = _load(ir.FloatType(), types.int64, "fptosi")
_float64 = _load(ir.DoubleType(), types.int64, "fptosi")


def _copy(typing: Any, to: Any, source: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        to, source = (builder.inttoptr(address, byte) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), generate


copy: Any = intrinsic(_copy)


def _gather(fields: Any, kind: int, n: int, out: int) -> int:
    """``fields`` [6, F]: address, bytes a row, rows and bytes wanted of each table; address of its first index, bytes
    to the next. ``kind``: of the indices. Writes to ``out``; gives the field of the first wrong index, or -1."""
    to = out
    for row in range(n):
        for f in range(fields.shape[1]):
            where = fields[4, f] + row * fields[5, f]
            if kind == 0:
                at = _int64(where)
            elif kind == 1:
                at = _int32(where)
            elif kind == 2:
                at = _float32(where)
            else:
                at = _float64(where)
            if at < 0 or at >= fields[2, f]:
                return f
            copy(to, fields[0, f] + at * fields[1, f], fields[3, f])
            to += fields[3, f]
    return -1


try:
    gather = numba.njit("int64(int64[:,::1], int64, int64, int64)", cache=True, nogil=True)(_gather)
except RuntimeError:    # no folder to keep compiled code in: compile once a process
    gather = numba.njit("int64(int64[:,::1], int64, int64, int64)", nogil=True)(_gather)
