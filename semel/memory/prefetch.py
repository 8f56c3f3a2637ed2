"""Asks for the cache lines of a row that is needed soon, and goes on.

``prefetch_byte(array, row, byte)``: the line in which a byte of ``array[row]`` lies; ``prefetch_lines(array, row,
size)``: those of its first ``size`` bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from semel.memory.index import kernel


def _prefetch_byte(context: Any, array: Any, row: Any, byte: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        array, row, byte = arguments
        header = context.make_array(array_type)(context, builder, array)
        strides = cgutils.unpack_tuple(builder, header.strides)
        data = builder.bitcast(header.data, ir.IntType(8).as_pointer())
        at = builder.gep(data, [builder.add(builder.mul(row, strides[0]), byte)])
        number = ir.IntType(32)
        function = builder.module.declare_intrinsic("llvm.prefetch", [at.type],
                                                    ir.FunctionType(ir.VoidType(), [at.type, number, number, number]))
        builder.call(function, [at, number(0), number(3), number(1)])  # to read, keep near, data
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


prefetch_byte: Any = intrinsic(_prefetch_byte)


@kernel()
def prefetch_lines(array, row, size):
    """The first ``size`` bytes of ``array[row]``."""
    for byte in range(0, size, 64):
        prefetch_byte(array, row, byte)
