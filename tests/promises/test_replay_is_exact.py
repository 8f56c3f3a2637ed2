"""Promise 8: a replayed exposure sees the history that was served and gets the scores that were served, bit for bit."""

import threading

import httpx
import numpy as np
import pyarrow as pa
import pytest
from serving.live import serving
from serving.stand_ins import make_store, save_next_item, save_tiny_model

from semel import Client
from semel.examples import ExposureLog, OutcomeLog
from semel.history import HistoryStore
from semel.serving import Predictor, replay

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def site(tmp_path):
    """(run, store): a real, untrained ranker and a small store that nobody has open."""
    for store in make_store(tmp_path / "store"):
        store.close()
    save_tiny_model(tmp_path / "run")
    return tmp_path / "run", tmp_path / "store"


def exact(report, requests):
    assert report.requests == requests
    assert report.histories_equal == report.bit_equal == requests and report.histories_erased == 0
    assert report.max_difference == report.max_scaled_difference == 0.0 and report.incomplete_batches == 0
    assert report.exact
    return report


def rank_many(client, number, seed):
    rng = np.random.default_rng(seed)
    results = []
    for _ in range(number):
        candidates = rng.permutation(80)[: rng.integers(1, 60)]
        context = [{}, {"surface": "home", "hour": 7}, {"surface": "nowhere", "hour": 3.25, "more": {"a": [1]}}]
        results.append(client.rank(int(rng.integers(0, 25)), candidates, context[rng.integers(0, 3)],
                                   limit=int(rng.integers(1, 70)),
                                   as_of=int(rng.integers(1, 10**15)) if rng.random() < 0.3 else None))
    return results


def test_through_late_events_new_items_compaction_and_restarts_while_serving(site, tmp_path):
    run, folder = site
    with serving(run, folder, tmp_path / "errors.1") as server, Client(server.url) as client:
        ranked = rank_many(client, 20, seed=1)
        late = [{"user_id": user, "item_id": user, "event_time": 5, "rating": 1} for user in range(25)]
        client.events(late)  # they happened before every request, and were known after it
        client.items([{"item_id": item, "genres": "war", "year": 2020} for item in range(30)])
        ranked += rank_many(client, 20, seed=2)
        outcomes = [{"request_id": result.request_id, "item_id": item, "label": {"like": int(item % 3 == 0)}}
                    for result in ranked[:10] for item, _ in result.results[:5]]
        assert client.outcomes(outcomes).duplicates == 0
        assert server.stop() == 0
    exact(replay(run, folder), 40)

    for path in (folder, folder / "catalogue"):
        with HistoryStore.open(path, mode="a") as store:
            store.compact()
    exact(replay(run, folder), 40)

    with serving(run, folder, tmp_path / "errors.2") as server, Client(server.url) as client:
        rank_many(client, 5, seed=3)
        done = threading.Event()

        def load():
            seed = 10
            while not done.is_set():
                client.events(late)
                rank_many(client, 2, seed=(seed := seed + 1))

        traffic = threading.Thread(target=load)
        traffic.start()
        try:
            for _ in range(3):  # beside the running server
                report = replay(run, folder)
                exact(report, report.requests)
                assert report.requests >= 40
        finally:
            done.set()
            traffic.join(60)
        assert server.stop() == 0
    report = exact(replay(run, folder), len(ExposureLog(folder / "exposures").read()))
    assert report.labelled == len(outcomes) and report.served_ne == report.replayed_ne and report.skew == 0.0
    assert replay(run, folder, limit=7).requests == 7


def test_all_stages_through_late_events_new_items_and_compaction(site, tmp_path):
    run, folder = site
    light, near = tmp_path / "light", tmp_path / "next"
    save_tiny_model(light, seed=1, kind="dcnv2")
    save_next_item(near)
    stages = {"retrieve": str(near), "prerank": str(light)}
    rng, shown = np.random.default_rng(0), []

    def ask(client, number):
        for _ in range(number):
            user, as_of = int(rng.integers(0, 25)), int(rng.integers(1, 10**15)) if rng.random() < 0.3 else None
            context = {"surface": "home", "hour": float(rng.integers(0, 24))}
            found = client.recommend(user, 5, context, as_of, exclude_seen=bool(rng.random() < 0.5),
                                     blocked=[1, 2, 3], diversity={"column": "genres", "most": 3})
            shown.extend({"request_id": found.request_id, "item_id": item, "label": {"like": item % 2}}
                         for item, _ in found.results)
            client.retrieve(user, 7, context, as_of, diversity={"column": "year"})
            client.prerank(user, rng.permutation(60)[:40], context, 9, as_of, exclude_seen=True)

    with serving(run, folder, tmp_path / "errors", **stages) as server, Client(server.url) as client:
        ask(client, 6)
        client.events([{"user_id": user, "item_id": user, "event_time": 5, "rating": 1} for user in range(25)])
        client.items([{"item_id": item, "genres": "war", "year": 2020} for item in range(10, 30)])
        ask(client, 6)
        client.outcomes(shown)
        assert server.stop() == 0
    for path in (folder, folder / "catalogue"):
        with HistoryStore.open(path, mode="a") as store:
            store.compact()
    for each, requests, labelled in ((run, 12, len(shown)), (light, 24, 0), (near, 24, 0)):
        report = exact(replay(each, folder), requests)
        assert report.labelled == labelled and report.served_ne == report.replayed_ne


def test_a_server_that_does_not_share_is_replayed_as_it_served(site, tmp_path):
    run, folder = site
    with serving(run, folder, tmp_path / "errors", share=False) as server:
        with Client(server.url) as client:
            rank_many(client, 10, seed=4)
        assert server.stop() == 0
    with serving(run, folder, tmp_path / "errors.2", state_bytes=0) as server:
        with Client(server.url) as client:
            rank_many(client, 10, seed=4)
        assert server.stop() == 0
    paths = ExposureLog(folder / "exposures").read()["path"].to_pylist()
    assert [path.split()[0] for path in paths] == ["broadcast"] * 10 + ["eager"] * 10
    exact(replay(run, folder), 20)


def test_another_number_of_threads_and_another_process_change_nothing(site):
    import torch

    run, folder = site
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with Predictor.load(run, folder) as predictor:
            for user in range(10):
                predictor.rank(user, list(range(60)))
        torch.set_num_threads(1)
        exact(replay(run, folder), 10)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_what_differs_is_found(site):
    """The comparison itself works: a changed score, checksum or history is counted."""
    run, folder = site
    with Predictor.load(run, folder) as predictor:
        for user in (1, 2, 3):
            predictor.rank(user, [1, 2, 3])
    table = ExposureLog(folder / "exposures").read()
    scores, checksums = table["scores"].to_pylist(), table["history_checksum"].to_pylist()
    scores[1][2] = float(np.nextafter(np.float32(scores[1][2]), np.float32(2)))
    checksums[2] ^= 1
    changed = table.set_column(table.column_names.index("scores"), table.schema.field("scores"),
                               pa.array(scores, table.schema.field("scores").type))
    changed = changed.set_column(table.column_names.index("history_checksum"), table.schema.field("history_checksum"),
                                 pa.array(checksums, pa.uint64()))
    for segment in (folder / "exposures").glob("*.log"):
        segment.unlink()
    log = ExposureLog(folder / "exposures")
    log.append(changed)
    log.close()
    report = replay(run, folder)
    assert (report.requests, report.histories_equal, report.bit_equal) == (3, 2, 2)
    assert 0 < report.max_difference < 1e-6 and not report.exact


def test_the_scores_are_of_this_history_and_this_context(site):
    """The promise is not kept by scores that depend on nothing."""
    run, folder = site
    with Predictor.load(run, folder, log_exposures=False) as predictor:
        def scores(user, **request):
            return {item: value for item, value in predictor.rank(user, [1, 2, 3], **request).results}

        assert scores(1) == scores(1) != scores(2)
        assert scores(1) != scores(1, context={"surface": "home"}) != scores(1, context={"surface": "search"})
        assert scores(1) != scores(1, as_of=0)


def test_bad_arguments_are_one_line(site, tmp_path):
    run, folder = site
    with pytest.raises(FileNotFoundError, match="no exposures under"):
        replay(run, folder)
    with pytest.raises(FileNotFoundError, match="no run at"):
        replay(tmp_path / "nothing", folder)
    with pytest.raises(FileNotFoundError, match="no store at"):
        replay(run, tmp_path / "nothing")
    with pytest.raises(ValueError, match="limit must be at least 1"):
        replay(run, folder, limit=0)
    with Predictor.load(run, folder) as predictor:
        predictor.rank(1, [1])
    save_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="no exposures of model tiny-"):
        replay(tmp_path / "other", folder)
    assert len(OutcomeLog(folder / "outcomes").read()) == 0


def test_many_clients_at_once_and_pages_of_one_request(site, tmp_path):
    """Requests are scored together as they come, and states are kept: the log says enough to do it again."""
    run, folder = site
    with serving(run, folder, tmp_path / "errors") as server:
        def pages(seed):
            rng = np.random.default_rng(seed)
            with Client(server.url) as client:
                for _ in range(15):
                    user, as_of = int(rng.integers(0, 25)), None
                    for page in np.split(rng.permutation(80), 4):
                        as_of = client.rank(user, page, {"surface": "home"}, as_of=as_of).pointer.as_of

        clients = [threading.Thread(target=pages, args=(seed,)) for seed in range(6)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(60)
        text = httpx.get(f"{server.url}/metrics", timeout=10).text
        metrics = dict(line.split() for line in text.splitlines() if line.startswith("semel_state_"))
        assert server.stop() == 0
    exact(replay(run, folder), 6 * 15 * 4)
    table = ExposureLog(folder / "exposures").read()
    assert max(table["batch_requests"].to_pylist()) > 1  # else nothing was scored together
    assert float(metrics["semel_state_hits"]) == 6 * 15 * 3 and float(metrics["semel_state_misses"]) == 6 * 15
