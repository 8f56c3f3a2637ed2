"""Promise 1 again, with the store on object storage (in memory here, where it is quick) and a cache that keeps
little."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from test_as_served_so_trained import _QUICK, _SLOW, AsServed, AsServedWithStringUsers

pytest.importorskip("obstore")
from semel.history.storage.block_cache import BlockCache


class Prefix:
    """Where the machine's stores lie."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch

    def __truediv__(self, name: str) -> str:
        return f"memory:///{self.scratch.name}/{name}"


class OnObjectStorage(AsServed):
    @property
    def folder(self) -> Any:
        return Prefix(self._scratch)

    @folder.setter
    def folder(self, scratch: Path) -> None:
        self._scratch = scratch
        from obstore.store import MemoryStore

        self._patch = pytest.MonkeyPatch()
        kept: dict[str, Any] = {}
        self._patch.setattr("obstore.store.from_url",
                            lambda url, **_: kept.setdefault(url, MemoryStore()))
        self._patch.setattr("semel.history.storage.object_storage.BlockCache",
                            lambda *_: BlockCache(scratch / "cache", 3_000))
        self._patch.setattr("semel.history.generation.array_files.BLOCK_BYTES", 64)
        self._patch.setattr("semel.history.storage.block_cache.BLOCK_BYTES", 64)
        self._patch.setattr("semel.history.storage.block_cache.AT_ONCE", 80)

    def teardown(self) -> None:
        for handle in (self.store, self.reader, self.view):
            handle.close()
        self.patch.undo()
        self._patch.undo()
        shutil.rmtree(self._scratch)


class OnObjectStorageWithStringUsers(OnObjectStorage):
    users = AsServedWithStringUsers.users
    key_type = AsServedWithStringUsers.key_type


TestIntegerUsers = OnObjectStorage.TestCase
TestIntegerUsers.settings = settings(_QUICK, max_examples=8)
TestStringUsers = OnObjectStorageWithStringUsers.TestCase
TestStringUsers.settings = settings(_QUICK, max_examples=8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [OnObjectStorage, OnObjectStorageWithStringUsers])
def test_many_histories(machine: type[OnObjectStorage]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=_SLOW)
