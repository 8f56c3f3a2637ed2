"""Memory by address, for kernels: numbers wherever they lie, copies, and rows of bit-packed lanes as vectors.

numba's arrays know neither unaligned numbers nor vectors; these few instructions do, on every machine that LLVM knows.
An address is the uint64 of ``array.ctypes.data`` plus bytes. Nothing is checked here: callers stay inside what
``packing.view_packed`` or ``array_files.checked`` has found sound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INT32 = ir.IntType(32)


def _load(bits: int) -> Any:
    def load(typing: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()))
            value.align = 1
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return types.uint64(types.uint64), generate

    return intrinsic(load)


load8, load32, load64 = (_load(bits) for bits in (8, 32, 64))
"""``load64(address)``: the number that lies there, little-endian, as uint64."""


def _prefetch(typing: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        flag = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag]), "llvm.prefetch.p0")
        builder.call(function, [pointer, flag(0), flag(3), flag(1)])  # to read, keep in all caches, data
        return context.get_dummy_value()

    return types.none(types.uint64), generate


prefetch: Any = intrinsic(_prefetch)
"""``prefetch(address)``: have the cache line that holds it brought in, without waiting. Any address will do."""


def _copy(typing: Any, out: Any, to: Any, address: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, to, address, count = arguments
        target = builder.gep(context.make_array(signature.args[0])(context, builder, out).data, [to])
        source = builder.inttoptr(address, target.type)
        cgutils.raw_memcpy(builder, target, source, count, signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(out, types.uint64, types.uint64, types.uint64), generate


copy_values: Any = intrinsic(_copy)
"""``copy_values(out, to, address, count)``: ``count`` values of the type of ``out`` from ``address`` on into
out[to:to + count]."""


def _row(lanes: int, scaled: bool) -> Any:
    bits = 128 // lanes

    def row(typing: Any, out: Any, to: Any, address: Any, shift: Any, mask: Any, base: Any,
            scale: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            out, to, address, shift, mask, base, scale = arguments
            width = signature.args[0].dtype.bitwidth
            lane = ir.IntType(bits)

            def splat(value: Any, size: int) -> Any:
                kind = ir.IntType(size)
                value = builder.trunc(value, kind) if size < value.type.width else value
                one = builder.insert_element(ir.Constant(ir.VectorType(kind, lanes), ir.Undefined), value, _INT32(0))
                return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes))

            source = builder.inttoptr(address, ir.VectorType(lane, lanes).as_pointer())
            low, high = builder.load(source), builder.load(builder.gep(source, [_INT32(1)]))
            low.align = high.align = 1
            # the upper word is shifted in two steps: by its full width in one would be undefined
            high = builder.shl(builder.shl(high, splat(lane(1), bits)),
                               splat(builder.sub(shift.type(bits - 1), shift), bits))
            value = builder.and_(builder.or_(builder.lshr(low, splat(shift, bits)), high), splat(mask, bits))
            wide = max(width, bits)
            if wide > bits:
                value = builder.zext(value, ir.VectorType(ir.IntType(wide), lanes))
            if scaled:
                value = builder.mul(value, splat(scale, wide))
            value = builder.add(value, splat(base, wide))
            if width < wide:
                value = builder.trunc(value, ir.VectorType(ir.IntType(width), lanes))
            target = builder.gep(context.make_array(signature.args[0])(context, builder, out).data, [to])
            builder.store(value, builder.bitcast(target, value.type.as_pointer())).align = width // 8
            return context.get_dummy_value()

        number = types.uint64
        return types.none(out, number, number, number, number, number, number), generate

    return intrinsic(row)


row_of_4, row_of_4_scaled = _row(4, False), _row(4, True)
row_of_2, row_of_2_scaled = _row(2, False), _row(2, True)
"""``row_of_4(out, to, address, shift, mask, base, scale)``: out[to:to + 4] = base + scale * bits, modulo the type of
``out``. The bits of lane l begin at bit ``shift`` of its word at ``address`` and go on in the one 16 bytes later: four
lanes of 32-bit words, or two of 64-bit words. Without ``_scaled`` the scale counts for 1."""
