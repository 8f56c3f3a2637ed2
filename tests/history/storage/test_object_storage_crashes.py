"""Promise 2 on object storage: a writer may die, or lose the store to another one, at any of its requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from semel.history import EventSchema, HistoryStore, Projection, StoreError, WriterFenced

pytest.importorskip("obstore")
from semel.history.storage.objects import Objects

SCHEMA = EventSchema({"item_id": pa.int64(), "action": pa.string()})
URL = "memory:///store"


class Killed(BaseException):
    """As a process ends that is killed: nothing of it runs any more."""


class Requests:
    """Counts the requests of all handles; at number ``stop``, before it is done or after, does ``what``."""

    def __init__(self, patch: pytest.MonkeyPatch, stop: int, done: bool, what: Callable[[], None]) -> None:
        self.count, self.stop, self.done, self.what, self.busy = 0, stop, done, what, False
        ask = Objects._ask

        def asked(objects: Objects, name: str, request: Callable[[], Any]) -> Any:
            if self.busy:  # of the other writer
                return ask(objects, name, request)
            self.count += 1
            now = self.count == self.stop
            if now and not self.done:
                self._do()
            answer = ask(objects, name, request)
            if now and self.done:
                self._do()
            return answer

        patch.setattr(Objects, "_ask", asked)

    def _do(self) -> None:
        self.busy = True
        self.what()
        self.busy = False


def event(item: int) -> pa.Table:
    return pa.table({"user_id": [item % 3], "event_time": [item], "item_id": [item], "action": [f"action {item}"]})


def work(store: HistoryStore, acknowledged: set[int], first: int = 0) -> None:
    """Appends, some with tokens, and two compactions."""
    for item in range(first, first + 6):
        store.append(event(item), None if item % 2 else f"token {item}")
        acknowledged.add(item)
        if item % 3 == 1:
            store.compact()


def found(store: HistoryStore) -> list[int]:
    table = store.read(store.point([0, 1, 2], 2**62), Projection(("item_id", "action")))
    assert table.strings("action").tolist() == [f"action {item}" for item in table.columns["item_id"].tolist()]
    return sorted(table.columns["item_id"].tolist())


def check(acknowledged: set[int], cache: Path) -> None:
    """All that was acknowledged is there, once, for a reader and for the next writer, which leaves no litter."""
    with HistoryStore.open(URL, cache_folder=cache) as reader:
        seen = found(reader)
        assert len(seen) == len(set(seen)) and acknowledged <= set(seen)
        reader.verify()
    with HistoryStore.open(URL, mode="a", cache_folder=cache) as store:
        for item in range(0, 6, 2):  # as a client does whose append was not answered
            store.append(event(item), f"token {item}")
        work(store, acknowledged, first=100)
        seen = found(store)
        assert len(seen) == len(set(seen)) and acknowledged | {0, 2, 4} <= set(seen)
        store.compact()
        store.verify()
        names = [name for name, _ in Objects(URL).entries("")]
        assert not [name for name in names if name.startswith("log/")]
        assert len({name.split("/")[1] for name in names if name.startswith("generations/")}) == 1


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore.store

    kept: dict[str, Any] = {}
    monkeypatch.setattr(obstore.store, "from_url", lambda url, **_: kept.setdefault(url, obstore.store.MemoryStore()))


EVERY = [pytest.param(7, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


def requests_of_all(monkeypatch: pytest.MonkeyPatch, cache: Path) -> int:
    with monkeypatch.context() as patch:
        fresh(patch)
        requests = Requests(patch, -1, False, lambda: None)
        with HistoryStore.create(URL, SCHEMA, shards=1, cache_folder=cache) as store:
            before = requests.count
            work(store, set())
        return requests.count - before


@pytest.mark.timeout(300)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("done", [False, True])
def test_a_writer_that_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, done: bool, every: int) -> None:
    total = requests_of_all(monkeypatch, tmp_path)
    assert total > 50
    for stop in range(1 + done, total + 1, every):
        fresh(monkeypatch)
        acknowledged: set[int] = set()
        store = HistoryStore.create(URL, SCHEMA, shards=1, cache_folder=tmp_path)
        with monkeypatch.context() as patch:
            def die() -> None:
                patch.setattr(Objects, "_ask", dead)
                raise Killed

            def dead(*_: Any) -> Any:
                raise Killed

            Requests(patch, stop, done, die)
            with pytest.raises(Killed):
                work(store, acknowledged)
        check(acknowledged, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("compacts", [False, True])
def test_a_writer_that_loses_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, done: bool, compacts: bool, every: int,
) -> None:
    """Another one opens the store, appends and compacts, all during one request of the first."""
    total = requests_of_all(monkeypatch, tmp_path)
    for stop in range(1 + done, total + 1, every):
        fresh(monkeypatch)
        acknowledged: set[int] = set()
        others: list[HistoryStore] = []

        def take_over(acknowledged: set[int] = acknowledged, others: list[HistoryStore] = others) -> None:
            others.append(HistoryStore.open(URL, mode="a", cache_folder=tmp_path))
            others[0].append(event(50))
            acknowledged.add(50)
            if compacts:
                others[0].compact()

        store = HistoryStore.create(URL, SCHEMA, shards=1, cache_folder=tmp_path)
        with monkeypatch.context() as patch:
            Requests(patch, stop, done, take_over)
            try:
                work(store, acknowledged)
            except StoreError as error:
                assert isinstance(error, WriterFenced), error
        with pytest.raises(StoreError):  # if not during the work, then now
            store.append(event(60))
        with others[0] as other:
            other.append(event(51), "after")
            acknowledged.add(51)
            seen = found(other)
            assert len(seen) == len(set(seen)) and acknowledged <= set(seen)
        check(acknowledged, tmp_path)
