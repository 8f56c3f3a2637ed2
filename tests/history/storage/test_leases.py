"""A lease lasts until it is released and the last read within it has ended."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from semel.history.errors import GenerationGone
from semel.history.storage.leases import Lease, remove_generations


def generation(folder: Path, number: int) -> Path:
    path = folder / f"{number:08d}"
    path.mkdir()
    (path / "generation.json").write_text("{}")
    return path


def test_a_released_lease_lasts_until_its_last_read_ends(tmp_path: Path) -> None:
    lease = Lease(generation(tmp_path, 1))
    generation(tmp_path, 2)
    with lease:
        with lease:
            lease.release()
            assert remove_generations(tmp_path, 2, keep=1) == []
        assert remove_generations(tmp_path, 2, keep=1) == []
    assert remove_generations(tmp_path, 2, keep=1) == [1]
    with lease:  # a read that had its view before
        pass
    lease.release()


def test_reads_do_not_release_a_lease(tmp_path: Path) -> None:
    lease = Lease(generation(tmp_path, 1))
    generation(tmp_path, 2)
    for _ in range(3):
        with pytest.raises(RuntimeError), lease:
            raise RuntimeError
    assert remove_generations(tmp_path, 2, keep=1) == []
    del lease
    gc.collect()
    assert remove_generations(tmp_path, 2, keep=1) == [1]


def test_no_lease_on_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GenerationGone):
        Lease(tmp_path / "00000001")
