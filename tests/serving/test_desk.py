"""The process that writes, without processes: erasing beside requests, exposures that are sent twice, a writer away."""

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from semel.examples import ExposureLog, OutcomeLog
from semel.history import WriterUnavailable
from semel.history.server.listening import MessageServer
from semel.serving.desk import MAX_BYTES, Desk
from semel.serving.errors import InvalidRequest
from semel.serving.predictor import Predictor
from semel.serving.remote import RemoteExposures, RemoteWriters, WriterLink, over_socket
from semel.serving.server import create_app
from semel.serving.writers import ExposureWriter, Writers
from serving.stand_ins import make_store, seen_items, stand_in

USER = 123_456_789_123


@pytest.fixture
def site(tmp_path):
    """(HTTP client, desk, predictor) of a server that does all in one process."""
    store, catalogue = make_store(tmp_path / "store")
    exposures = ExposureWriter(ExposureLog(tmp_path / "store" / "exposures"))
    with store, Predictor(stand_in(seen_items), store, catalogue, exposures=exposures) as predictor:
        writers = Writers(store, catalogue, "item_id", exposures, predictor.clock.now)
        app = create_app(predictor, writers=writers)
        with TestClient(app, base_url="http://127.0.0.1") as http:
            yield http, Desk(writers, app.state.service.told), predictor


def holding(folder, user):
    needle = user.to_bytes(8, "little")
    return [path.name for path in folder.rglob("*") if path.is_file() and needle in path.read_bytes()]


def test_erasing_reaches_every_file_and_writing_goes_on(site):
    http, desk, predictor = site
    folder = predictor.store.path
    events = [{"user_id": USER, "item_id": item, "event_key": str(item)} for item in range(3)]
    assert http.post("/v1/events", json={"events": events}).json()["accepted"] == 3
    ranked = [http.post("/v1/rank", json={"user_id": user, "candidates": [1]}).json()["request_id"]
              for user in (USER, 5)]
    http.post("/v1/outcomes", json={"outcomes": [
        {"request_id": one, "item_id": 1, "label": {"like": 1}, "outcome_key": one} for one in ranked]})
    assert predictor.flush(20) and len(holding(folder, USER)) >= 3
    report = desk.answer({"kind": "erase", "users": [USER], "also": []}, bytearray())
    assert report["users"] == 1 and report["traces"] == [] and holding(folder, USER) == []
    assert predictor.states.bytes == 0
    assert ExposureLog(folder / "exposures").read()["request_id"].to_pylist() == ranked[1:]
    assert OutcomeLog(folder / "outcomes").read()["request_id"].to_pylist() == ranked[1:]
    # All logs are written on, and what was known of others is known still.
    assert http.post("/v1/events", json={"events": events}).json()["accepted"] == 3
    again = {"outcomes": [{"request_id": ranked[1], "item_id": 1, "label": {"like": 1}, "outcome_key": ranked[1]}]}
    assert http.post("/v1/outcomes", json=again).json()["duplicates"] == 1
    assert http.post("/v1/rank", json={"user_id": USER, "candidates": [1]}).status_code == 200
    assert predictor.flush(20) and len(ExposureLog(folder / "exposures").read()) == 2


def test_nothing_is_erased_where_exposures_cannot_be_written_or_a_place_is_missing(site, tmp_path):
    _, desk, predictor = site
    refusing = Desk(desk._writers, lambda verb: False)
    with pytest.raises(OSError, match="nothing was erased"):
        refusing.answer({"kind": "erase", "users": [5], "also": []}, bytearray())
    with pytest.raises(Exception, match="is not there"):
        desk.answer({"kind": "erase", "users": [5], "also": [str(tmp_path / "none")]}, bytearray())
    assert 5 in predictor.store.keys().tolist()
    with pytest.raises(ValueError, match="knows no 'x'"):
        desk.answer({"kind": "x"}, bytearray())


def test_exposures_that_are_sent_again_are_logged_once_over_a_restart_too(site, tmp_path):
    _, _, predictor = site
    written = []
    real, predictor._log = predictor._log, type("Kept", (), {"append": lambda _, table: written.append(table)})()
    for _ in range(3):
        predictor.rank(1, [4])
    assert predictor.flush(20)
    predictor._log = real
    table = pa.concat_tables(written)
    first = ExposureWriter(ExposureLog(tmp_path / "log"))
    first.append(table.slice(0, 2))
    first.append(table.slice(0, 2))
    first.close()
    second = ExposureWriter(ExposureLog(tmp_path / "log"))
    second.append(table)
    second.append(table)
    second.close()
    assert ExposureLog(tmp_path / "log").read()["request_id"].to_pylist() == table["request_id"].to_pylist()


def test_over_the_socket_errors_keep_their_kind_and_a_writer_that_is_away_says_so(site, tmp_path):
    import tempfile
    from pathlib import Path

    _, desk, predictor = site
    with tempfile.TemporaryDirectory(prefix="semel-") as short:
        link = WriterLink(over_socket(Path(short) / "w.sock"))
        remote = RemoteWriters(predictor.store, predictor.catalogue, "item_id", link, predictor.clock.now)
        rows = remote.rows["events"]
        job = rows.rows([{"user_id": 9, "item_id": 4, "event_key": "k"}], "events")
        with pytest.raises(WriterUnavailable, match=r"does not answer .*nothing was stored"):
            rows.submit(job).result(20)
        assert "does not answer" in str(rows.failure)
        with pytest.raises(WriterUnavailable):
            RemoteExposures(link).append(pa.table({"request_id": ["r"]}))
        with MessageServer(Path(short) / "w.sock", desk.answer, max_bytes=MAX_BYTES):
            first, second = rows.submit(job).result(20), rows.submit(job).result(20)
            assert (first.accepted, first.duplicates, second.accepted, second.duplicates) == (1, 0, 0, 1)
            assert rows.failure is None and rows.pending == 0
            wrong = job.table.set_column(0, "user_id", pa.array(["text"]))
            with pytest.raises(InvalidRequest, match="user_id"):
                rows.submit(type(job)(wrong, [None])).result(20)
            items = remote.rows["items"]
            assert items.submit(items.rows([{"item_id": 77, "title": "t"}], "items")).result(20).accepted == 1
            outcome = remote.outcomes.rows([{"request_id": "r", "item_id": 1, "label": {"like": 1.0}}])
            assert remote.outcomes.submit(outcome).result(20).accepted == 1
        remote.close()
