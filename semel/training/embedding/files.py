"""A sharded table on disk: one safetensors file a rank that saved, and ``index.json``, which is written last.

``rank-00001-of-00004-STEPS.safetensors`` holds ``ShardedEmbedding.state_dict()`` of rank 1 of 4: rows with their keys,
so that any number of ranks can load them and each takes its own. (torch.distributed.checkpoint saves tensors of fixed
global shape; rows that are known by id, and come and go, have none.) A save that is cut short leaves the older one as
it was: files of another step have other names, and the index says which belong together.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from semel.training.embedding.table import ShardedEmbedding

FORMAT_VERSION = 1


def save_table(table: ShardedEmbedding, folder: Path) -> None:
    from safetensors.torch import save_file

    rank, world_size = table.transport.rank, table.transport.world_size
    folder.mkdir(parents=True, exist_ok=True)
    state = table.state_dict()
    names = [f"rank-{r:05d}-of-{world_size:05d}-{table.steps}.safetensors" for r in range(world_size)]
    part = folder / f".part-{rank}-{os.getpid()}"
    save_file({name: value.contiguous() for name, value in state.items()}, part)
    os.replace(part, folder / names[rank])
    _meet(table)
    if rank == 0:
        index = {"format_version": FORMAT_VERSION, **_identity(table), "steps": table.steps, "files": names}
        part.write_text(json.dumps(index, indent=1))
        os.replace(part, folder / "index.json")
        for old in set(folder.glob("rank-*.safetensors")) - {folder / name for name in names}:
            old.unlink()
    _meet(table)


def load_table(table: ShardedEmbedding, folder: Path) -> None:
    from safetensors.torch import load_file

    if not (folder / "index.json").exists():
        raise FileNotFoundError(f"{folder} holds no saved table: it has no index.json; train anew, or look for the "
                                f"folder that ShardedEmbedding.save wrote")
    index = json.loads((folder / "index.json").read_text())
    if index["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{folder} has format version {index['format_version']}, this version of semel reads "
                         f"{FORMAT_VERSION}")
    for name, own in _identity(table).items():
        if index[name] != own:
            raise ValueError(f"{folder} was saved with {name}={index[name]!r}, this table has {own!r}; make the table "
                             f"as it was")
    table.load_state_dict(load_file(folder / name) for name in index["files"])
    _meet(table)


def _identity(table: ShardedEmbedding) -> dict[str, Any]:
    """What must be the same for saved rows to mean the same."""
    return {"new_ids": table.rows.name, "rows": table.size, "dim": table.dim, "seed": table.seed,
            "deviation": table.deviation, "optimizer": type(table.optimizer).__name__}


def _meet(table: ShardedEmbedding) -> None:
    """Returns when all ranks are here."""
    table.transport.all_gather(torch.zeros(1, device=table.weight.device)).wait()
