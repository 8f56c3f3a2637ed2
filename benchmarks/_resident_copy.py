"""The copy kernel of ``sm_free``: Triton wants its kernels in a file of their own."""

import triton
import triton.language as tl


@triton.jit
def resident_copy(source, target, count, BLOCK: tl.constexpr):
    """As many blocks as are launched share ``count`` words; each stays where it is until its share is copied."""
    for at in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)
