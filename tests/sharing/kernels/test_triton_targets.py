"""The launches that kernels make, compiled for devices that are not here: no device is needed to find out that a kernel
does not compile, asks for more memory than a multiprocessor has, or misses the tensor cores."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ON_CHIP = {80: 163 << 10, 90: 227 << 10}
"""Bytes of shared memory that one block may ask for, by compute capability."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("capability", "dtype"), [(90, "float16"), (80, "bfloat16"), (80, "float32")])
def test_launches_compile_and_fit(capability, dtype, tmp_path):
    root = Path(__file__).parents[3]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, __file__, str(capability), dtype], env=environment, capture_output=True,
                          text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    kernels = {name for name, *_ in rows}
    assert kernels == {"_gather_add", "_segment_sum", "_product", "_weight_grad", "_multiply", "_multiply_sum",
                       "_forward", "_backward_queries", "_backward_keys"}
    for name, shared, tensor_cores in rows:
        assert int(shared) <= ON_CHIP[capability], name
        if dtype != "float32" and name not in ("_gather_add", "_segment_sum"):
            assert tensor_cores == "True", name


def launches(dtype: Any) -> list[tuple[Any, dict[str, Any]]]:
    """What the host functions would launch: the published shapes with fewer candidates, and narrow ones."""
    import torch
    from triton.runtime.jit import JITFunction

    from semel.sharing.kernels import triton_attention, triton_gather, triton_linear, triton_pairs

    seen: list[tuple[Any, dict[str, Any]]] = []
    JITFunction.run = lambda self, *args, grid, warmup, **how: seen.append(  # type: ignore[method-assign]
        (self, dict(zip(self.arg_names, args, strict=False)) | how))
    o = torch.tensor([0, 3, 8])
    owner = torch.repeat_interleave(torch.arange(2), o.diff())

    def x(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    half = dtype != torch.float32  # products of float32 are unrolled and take minutes to compile: one shape of each
    triton_gather.gather_add(x(8, 512), x(2, 512), owner)
    triton_gather.segment_sum(x(8, 512), o)
    for m, k_candidate, k_request, d in ((433, 866, 1178, 256), (24, 20, 80, 10)) if half else ((433, 866, 1178, 256),):
        triton_linear.linear_compression(x(m, k_candidate), x(m, k_request), x(8, k_candidate, d), x(2, k_request, d),
                                         owner)
        triton_linear.weight_grad(x(8, m, d), x(8, k_candidate, d))
    triton_pairs.multiply(x(8, 20, 32), x(2, 80, 32).transpose(1, 2), o)
    triton_pairs.multiply_sum(x(8, 20, 80), x(8, 20, 32), o)
    for queries, width in ((64, 128), (64, 64), (1, 256)) if half else ((64, 64),):
        q, k = x(8, queries, 2, width), x(8, 2, width)
        for weighting in ("softmax", "silu") if half else ("softmax",):
            out, lse = triton_attention.history_forward(q, k, k, o, o, weighting, 0.1)
            triton_attention.history_backward(q, q, k, k, out, lse, o, o, weighting, 0.1)
    return seen


def compiled(function: Any, values: dict[str, Any], capability: int) -> Any:
    """As the launcher would: integers that are 1 become constants, multiples of 16 and pointers are marked aligned."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32",
             torch.int64: "i64"}
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(function.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name], constants[(place,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + names[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            aligned[(place,)] = [["tt.divisibility", 16]]
    options = {k: v for k, v in values.items() if k in ("num_warps", "num_stages")}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    import torch

    done = set()
    for function, values in launches(getattr(torch, sys.argv[2])):
        shapes = str([(k, v if not isinstance(v, torch.Tensor) else v.dtype) for k, v in values.items()])
        if (function.__name__, shapes) in done:
            continue
        done.add((function.__name__, shapes))
        kernel = compiled(function, values, int(sys.argv[1]))
        code = kernel.asm["ptx"]
        print(function.__name__, kernel.metadata.shared, "wgmma" in code or "mma.sync" in code, flush=True)


if __name__ == "__main__":
    main()
