"""A sharded table beside TorchRec's ``EmbeddingCollection``: same numbers, and how long a step takes.

    python -m benchmarks.embedding_torchrec [--rows 200000] [--dim 64] [--positions 16384] [--rounds 7] [--json FILE]

Needs TorchRec and FBGEMM (``semel[torchrec]``; the CPU build of FBGEMM is another package, see pyproject.toml). Two
processes, gloo, no throttling. TorchRec: one table, row-wise, FBGEMM's kernels with the fused optimizer, gradients not
divided by the world size; its deduplication before the exchange has no CPU kernel, so repeated ids travel as they are
(its default). A step is forward, a backward of stated gradients, and the update; contestants take turns, on the same
ids. Afterwards all rows of both are compared.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semel.comm import Collective, spawn
from semel.training.embedding import SGD, Blocking, RowOptimizer, RowWiseAdagrad, ShardedEmbedding

STEPS = 10
LENGTH = 128
"""Positions are histories of as many events."""
WORLD_SIZE = 2


class TorchRec:
    """One row-wise table with the fused optimizer, its rows set to ``start``."""

    def __init__(self, start: Tensor, optimizer: RowOptimizer) -> None:
        import torch.distributed as dist
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingCollection, EmbeddingConfig
        from torchrec.distributed.comm_ops import set_gradient_division
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

        set_gradient_division(False)
        fused = {SGD: EmbOptimType.EXACT_SGD, RowWiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD}[type(optimizer)]
        rows, dim = start.shape
        sharder: Any = EmbeddingCollectionSharder(fused_params={
            "optimizer": fused, "learning_rate": optimizer.learning_rate, "eps": getattr(optimizer, "eps", 0.0)})
        collection = EmbeddingCollection(device=torch.device("meta"), tables=[
            EmbeddingConfig(name="table", embedding_dim=dim, num_embeddings=rows, feature_names=["id"])])
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
            constraints={"table": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])})
        plan = planner.collective_plan(collection, [sharder], dist.GroupMember.WORLD)
        self.model: Any = DistributedModelParallel(collection, device=torch.device("cpu"), plan=plan,
                                                   sharders=[sharder])
        for shard in self._shards():
            low = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(start[low : low + len(shard.tensor)])

    def _shards(self) -> list[Any]:
        return next(iter(self.model.state_dict().values())).local_shards()

    def step(self, ids: Tensor, gradient: Tensor) -> None:
        from torchrec import KeyedJaggedTensor

        lengths = torch.full((len(ids) // LENGTH,), LENGTH, dtype=torch.int32)
        keyed = KeyedJaggedTensor(keys=["id"], values=ids, lengths=lengths)
        self.model(keyed)["id"].values().backward(gradient)

    def rows(self) -> list[tuple[int, np.ndarray]]:
        return [(shard.metadata.shard_offsets[0], shard.tensor.detach().numpy().copy()) for shard in self._shards()]


def on_rank(options: dict[str, Any]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    if options["positions"] % LENGTH:
        raise ValueError(f"positions must be a multiple of {LENGTH}, got {options['positions']}")
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, options["rows"], (STEPS, WORLD_SIZE, options["positions"]), generator=random)
    ids = torch.minimum(ids, torch.randint(0, options["rows"], ids.shape, generator=random))  # some come more often
    gradients = torch.randn(STEPS, WORLD_SIZE, options["positions"], options["dim"], generator=random) / 100
    out = []
    for optimizer in (SGD(0.1), RowWiseAdagrad(0.1)):
        transport = Collective()
        table = ShardedEmbedding(options["dim"], transport, rows=options["rows"], optimizer=optimizer)
        everything = torch.arange(options["rows"])
        theirs = TorchRec(table.read(everything), optimizer)
        mine = ids[:, transport.rank], gradients[:, transport.rank]
        seconds: dict[str, list[float]] = {"semel": [], "torchrec": []}
        for turn in range(options["rounds"] + 1):
            start = time.perf_counter()
            schedule = Blocking(table)
            for (_, gradient), vectors in schedule(zip(*mine, strict=True), ids=lambda step: step[0]):
                vectors.grad = gradient
                schedule.step()
            middle = time.perf_counter()
            for step, gradient in zip(*mine, strict=True):
                theirs.step(step, gradient)
            if turn:
                seconds["semel"].append((middle - start) / STEPS)
                seconds["torchrec"].append((time.perf_counter() - middle) / STEPS)
        ours = table.read(everything).numpy()
        difference = max((float(np.abs(ours[low : low + len(rows)] - rows).max()) for low, rows in theirs.rows()),
                         default=0.0)
        out.append({"optimizer": type(optimizer).__name__, "seconds": seconds, "largest_difference": difference,
                    "largest": float(np.abs(ours).max()), "compared": sum(len(rows) for _, rows in theirs.rows())})
    return out


def run(options: dict[str, Any]) -> dict[str, Any]:
    ranks = spawn(on_rank, WORLD_SIZE, options)
    cases = []
    for both in zip(*ranks, strict=True):
        ms = {name: np.max([one["seconds"][name] for one in both], axis=0) * 1e3 for name in ("semel", "torchrec")}
        ratios = ms["torchrec"] / ms["semel"]
        cases.append({"optimizer": both[0]["optimizer"], "compared": sum(one["compared"] for one in both),
                      "largest": both[0]["largest"],
                      "largest_difference": max(one["largest_difference"] for one in both),
                      **{f"{name}_ms": float(np.median(values)) for name, values in ms.items()},
                      "ratio": float(np.median(ratios)), "ratio_least": float(ratios.min()),
                      "ratio_most": float(ratios.max())})
    return {**options, "processes": WORLD_SIZE, "cases": cases}


def show(result: dict[str, Any]) -> None:
    print(f"{result['processes']} gloo processes, {result['rows']:,} rows of {result['dim']}, {result['positions']:,} "
          f"positions a process and step; ms a step, medians of {result['rounds']} rounds of {STEPS} steps")
    for case in result["cases"]:
        print(f"  {case['optimizer']:<16} semel {case['semel_ms']:6.1f}   torchrec {case['torchrec_ms']:6.1f}   ratio "
              f"{case['ratio']:.2f} [{case['ratio_least']:.2f}, {case['ratio_most']:.2f}]   largest difference "
              f"{case['largest_difference']:.1e} of {case['largest']:.2f} over {case['compared']:,} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--positions", type=int, default=16_384, help="a process and step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    try:
        import torchrec  # noqa: F401
    except ImportError as error:
        parser.exit(2, f"TorchRec cannot be imported ({error}); install semel[torchrec]\n")
    result = run({name: value for name, value in vars(arguments).items() if name != "json"})
    show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
