"""Kernels in which requests and their candidates meet, without broadcasting the requests.

Every function takes the request side with its own leading axis [R, ...], the candidate side with its own [C, ...], and
``offsets`` [R + 1]: the candidates of request r are rows ``offsets[r]:offsets[r + 1]``. Requests may have any number of
candidates, none included; R and C may be 0. All have a backward, survive ``torch.compile`` and ``torch.export`` as one
operator each, and give the values of the plain form of the same name in ``reference`` up to summation order.

Which path runs: Triton on CUDA for float16, bfloat16 and float32, torch operations elsewhere (``paths``).
``docs/kernels.md`` says what each computes and why that saves.
"""

from semel.sharing.kernels.broadcast_attention import broadcast_attention
from semel.sharing.kernels.gather_add import gather_add, segment_sum
from semel.sharing.kernels.linear_compression import linear_compression
from semel.sharing.kernels.pair_interaction import Pairs, pair_columns, pair_interaction

__all__ = [
    "Pairs", "broadcast_attention", "gather_add", "linear_compression", "pair_columns", "pair_interaction",
    "segment_sum",
]
