"""Schedules as the CSV files that torch.distributed.pipelining loads: a row a rank, a cell an operation ("3F0": virtual
stage 3, forward, micro-batch 0)."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np

from semel.planning.schedules.check import check
from semel.planning.schedules.operations import Op, Schedule

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^)]*)\)OVERLAP_F_B")


def write_csv(schedule: Schedule, path: Path | str) -> None:
    """Computation only: the runtime adds sends and gathers itself (``_PipelineScheduleRuntime._load_csv``). Pairs are
    torch's ``OVERLAP_F_B``."""
    pairs = set(schedule.pairs.tolist())
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        for begin, listed in zip(schedule.offsets.tolist(), schedule.ops, strict=False):
            cells = []
            for at, op in enumerate(listed, begin):
                if at in pairs:
                    cells.append(f"({op};{listed[at + 1 - begin]})OVERLAP_F_B")
                elif at - 1 not in pairs:
                    cells.append(str(op))
            writer.writerow(cells)


def read_csv(path: Path | str, name: str | None = None) -> Schedule:
    """What ``write_csv`` or torch's ``_dump_csv(..., format="compute_only")`` wrote, checked; empty cells (torch's
    bubbles) are skipped. Raises ValueError that names row and cell."""
    ops: list[list[Op]] = []
    pairs: list[int] = []
    before = 0
    with open(path, newline="") as file:
        for rank, row in enumerate(csv.reader(file)):
            listed: list[Op] = []
            for cell in (text.strip() for text in row):
                pair = _PAIR.fullmatch(cell)
                if pair:
                    pairs.append(before + len(listed))
                for word in (pair[1].split(";") if pair else [cell] if cell else []):
                    match = _CELL.fullmatch(word.strip())
                    if match is None:
                        raise ValueError(f"{path}, row {rank + 1}: {word!r} is no operation of computation such as "
                                         f"\"3F0\" (virtual stage, one of F B I W, micro-batch)")
                    listed.append(Op(match[2], int(match[3]), int(match[1])))
            if listed:
                ops.append(listed)
                before += len(listed)
    if not ops:
        raise ValueError(f"{path} holds no operations")
    held = {op.chunk: device for device, listed in enumerate(ops) for op in listed}
    missing = next((chunk for chunk in range(max(held) + 1) if chunk not in held), None)
    if missing is not None:
        raise ValueError(f"{path}: virtual stage {missing} is on no rank, though {max(held)} is")
    schedule = Schedule.of(name or Path(path).stem, ops, [held[chunk] for chunk in range(len(held))],
                           pairs=np.array(pairs, np.int64))
    check(schedule)
    return schedule
