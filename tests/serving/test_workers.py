"""Several processes behind one port: one truth, whichever answers, and whoever is killed."""

import http.client
import json
import os
import re
import resource
import shutil
import signal
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel import Client
from semel.cli import app
from semel.examples import ExposureLog, OutcomeLog
from semel.history import HistoryStore, Projection
from semel.serving import replay
from serving.live import Server
from serving.stand_ins import make_store, save_tiny_model

pytestmark = pytest.mark.timeout(600)
WORKERS = 2


class Worker:
    """A connection that one worker has accepted, kept open."""

    def __init__(self, url):
        address = urlsplit(url)
        self._http = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        self.number = self("GET", "/healthz")[1]["worker"]

    def __call__(self, method, path, body=None):
        self._http.request(method, path, None if body is None else json.dumps(body),
                           {"Content-Type": "application/json"})
        response = self._http.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text.startswith(b"{") else text.decode()

    def close(self):
        self._http.close()


class Site:
    """A server of two workers over a store with ids that are strings."""

    def __init__(self, folder):
        self.run, self.store, self.errors = folder / "run", folder / "store", folder / "errors"
        for store in make_store(self.store, strings=True):
            store.close()
        save_tiny_model(self.run, strings=True)
        self.server = Server(self.run, self.store, self.errors, workers=WORKERS)
        self.url = self.server.url
        self.pool = {}

    def worker(self, number):
        """The connection to a worker; made again until that one has accepted it."""
        for _ in range(500):
            if number in self.pool:
                return self.pool[number]
            found = Worker(self.url)
            if found.number in self.pool:
                found.close()
                time.sleep(0.01)
            else:
                self.pool[found.number] = found
        raise AssertionError(f"worker {number} accepts no connection")

    def pid(self, role):
        """The newest child of that role ("writer", "worker-0")."""
        runtime = json.loads((self.store / "server.json").read_text())
        for line in os.popen(f"ps -ww -o pid=,args= --ppid {runtime['pid']}").read().splitlines():
            pid, _, args = line.strip().partition(" ")
            if args.endswith(f"main() {role}"):
                return int(pid)
        raise AssertionError(f"there is no {role}")

    def socket(self, number):
        folder = json.loads((self.store / "server.json").read_text())["socket"].rpartition("/")[0]
        return f"{folder}/worker-{number}.sock"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = Site(tmp_path_factory.mktemp("workers"))
    try:
        yield made
    finally:
        made.server.kill()


def event(user, item, **more):
    return {"events": [{"user_id": user, "item_id": item, **more}]}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, WORKERS - 1), st.integers(0, WORKERS - 1)),
                min_size=1, max_size=6))
def test_what_one_worker_acknowledged_the_other_has_seen(site, steps):
    for number, (user, writes, reads) in enumerate(steps):
        user, item = f"reader-{user}", f"iü{number}"
        status, before = site.worker(reads)("POST", "/v1/rank", {"user_id": user, "candidates": [item]})
        assert status == 200
        status, written = site.worker(writes)("POST", "/v1/events", event(user, item))
        assert status == 200, written
        status, ranked = site.worker(reads)("POST", "/v1/rank", {"user_id": user, "candidates": [item]})
        assert status == 200 and ranked["pointer"]["version"] >= written["version"]
        # Not only the version: this event's time is before the request's, though another process stamped it.
        with HistoryStore.open(site.store) as store:
            seen = store.lengths(store.point([user], ranked["pointer"]["as_of"]), Projection(("item_id",)))[0][0]
            earlier = store.lengths(store.point([user], before["pointer"]["as_of"]), Projection(("item_id",)))[0][0]
        assert seen == earlier + 1


def test_keys_and_outcomes_count_once_whichever_worker_gets_them(site):
    first, second = site.worker(0), site.worker(1)
    body = event("once", "iü1", event_key="k")
    assert first("POST", "/v1/events", body)[1]["accepted"] == 1
    assert second("POST", "/v1/events", body)[1] == {**first("POST", "/v1/events", body)[1], "accepted": 0,
                                                      "duplicates": 1}
    ranked = second("POST", "/v1/rank", {"user_id": "once", "candidates": ["iü1", "iü2"]})[1]
    outcome = {"outcomes": [{"request_id": ranked["request_id"], "item_id": "iü1", "label": {"like": 1},
                             "outcome_key": "o"}]}
    assert first("POST", "/v1/outcomes", outcome)[1]["accepted"] == 1
    assert second("POST", "/v1/outcomes", outcome)[1]["duplicates"] == 1
    status, answer = first("POST", "/v1/events", {"events": [{"user_id": "once", "item_id": "iü1", "rating": "x"}]})
    assert status == 422 and answer["error"]["field"] == "events.0.rating"
    assert OutcomeLog(site.store / "outcomes").read()["request_id"].to_pylist().count(ranked["request_id"]) == 1


def test_one_scrape_gives_the_metrics_of_all(site):
    for number in range(WORKERS):
        assert site.worker(number)("POST", "/v1/rank", {"user_id": "m", "candidates": ["iü1"]})[0] == 200
    for number in range(WORKERS):
        text = site.worker(number)("GET", "/metrics")[1]
        for other in range(WORKERS):
            found = re.search(rf'semel_responses_total{{code="200",endpoint="rank",process="worker-{other}"}} (\S+)',
                              text)
            assert found and float(found[1]) >= 1
        assert text.count("# TYPE semel_responses_total counter") == 1


def test_a_worker_that_is_killed_is_started_again_and_the_other_serves_on(site):
    victim, other = site.pid("worker-1"), site.worker(0)
    site.pool.pop(1).close() if 1 in site.pool else None
    os.kill(victim, signal.SIGKILL)
    for _ in range(20):
        assert other("POST", "/v1/rank", {"user_id": "k", "candidates": ["iü1"]})[0] == 200
    deadline = time.monotonic() + 200
    while 1 not in site.pool and time.monotonic() < deadline:
        found = Worker(site.url)
        if found.number == 1:
            site.pool[1] = found
        else:
            found.close()
            time.sleep(0.2)
    assert site.worker(1)("POST", "/v1/rank", {"user_id": "k", "candidates": ["iü1"]})[0] == 200
    assert 'semel_process_starts{process="worker-1"} 2.0' in other("GET", "/metrics")[1]


def test_a_writer_that_is_killed_loses_nothing_that_was_acknowledged(site):
    acknowledged, refused = [], []
    stop = threading.Event()

    def post(number):
        with httpx.Client(base_url=site.url, trust_env=False, timeout=60) as client:
            for count in range(10_000):
                if stop.is_set():
                    return
                body = event(f"durable-{number}", f"iü{count}", event_key=str(count), event_time=count)
                response = client.post("/v1/events", json=body)
                assert response.status_code in (200, 503), response.text
                (acknowledged if response.status_code == 200 else refused).append((f"durable-{number}", count))
                if response.status_code == 503:
                    time.sleep(0.05)

    threads = [threading.Thread(target=post, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(acknowledged) > 20)
    os.kill(site.pid("writer"), signal.SIGKILL)
    ranked = site.worker(0)("POST", "/v1/rank", {"user_id": "durable-0", "candidates": ["iü1"]})
    assert ranked[0] == 200  # what only reads goes on
    count = len(acknowledged)
    wait_for(lambda: len(acknowledged) > count + 20)
    stop.set()
    for thread in threads:
        thread.join(60)
    with HistoryStore.open(site.store) as store:
        for number in range(3):
            user = f"durable-{number}"
            table = store.read(store.point([user], 2**60), Projection(("item_id", "event_time")))
            stored = table.columns["event_time"].tolist()
            mine = [item for who, item in acknowledged if who == user]
            assert len(stored) == len(set(stored))
            assert set(mine) <= set(stored) <= set(mine) | {item for who, item in refused if who == user}
    wait_for(lambda: ranked[1]["request_id"] in logged(site))  # its exposure waited for the writer
    assert len(logged(site)) == len(set(logged(site)))


def test_a_full_disk_refuses_writes_says_so_and_loses_nothing(site):
    writer = site.pid("writer")
    worker = site.worker(0)
    size = max(path.stat().st_size for path in site.store.rglob("*") if path.is_file())
    before = resource.prlimit(writer, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # less than any log has
    try:
        assert size > 4096
        status, answer = worker("POST", "/v1/events", event("full", "iü1", event_key="f"))
        assert status == 503 and "File too large" in answer["error"]["message"], answer
        assert worker("POST", "/v1/rank", {"user_id": "full", "candidates": ["iü1"]})[0] == 200
        status, answer = worker("GET", "/readyz")
        assert status == 503 and "cannot be written" in answer["error"]["message"]
    finally:
        resource.prlimit(writer, resource.RLIMIT_FSIZE, before)
    wait_for(lambda: worker("POST", "/v1/events", event("full", "iü1", event_key="f"))[0] == 200)
    wait_for(lambda: worker("GET", "/readyz")[0] == 200)
    with HistoryStore.open(site.store) as store:
        assert store.lengths(store.point(["full"], 2**60), Projection(("item_id",)))[0].tolist() == [1]


def test_a_store_that_disappears_is_503_until_it_is_back(site):
    away = site.store.with_name("away")
    site.store.rename(away)
    try:
        for number in range(WORKERS):
            rank = {"user_id": "a", "candidates": ["iü1"]}
            for path, body in (("/v1/rank", rank), ("/v1/events", event("a", "iü1"))):
                status, answer = site.worker(number)("POST", path, body)
                assert status == 503 and "store" in answer["error"]["message"], answer
            assert site.worker(number)("GET", "/healthz")[0] == 200
    finally:
        away.rename(site.store)
    for number in range(WORKERS):
        assert site.worker(number)("POST", "/v1/rank", {"user_id": "a", "candidates": ["iü1"]})[0] == 200
        wait_for(lambda number=number: site.worker(number)("POST", "/v1/events", event("a", "iü1"))[0] == 200)


def test_erase_reaches_the_running_server_and_every_byte(site, semel):
    user = "erase-me-7391"
    worker = site.worker(0)
    for number in range(3):
        assert worker("POST", "/v1/events", event(user, f"iü{number}", event_key=f"key-{number}"))[0] == 200
    ranked = [site.worker(number)("POST", "/v1/rank", {"user_id": user, "candidates": ["iü1"]})[1]["request_id"]
              for number in range(WORKERS)]
    assert worker("POST", "/v1/outcomes", {"outcomes": [
        {"request_id": ranked[0], "item_id": "iü1", "label": {"like": 1}}]})[0] == 200
    wait_for(lambda: set(ranked) <= set(logged(site)))
    assert named(site.store, user)  # the search finds it before
    result = semel("erase", site.store, user, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["users"] == 1 and report["traces"] == [] and sum(report["rows"].values()) >= 5
    assert named(site.store, user) == [] and named(site.store, ranked[0]) == []
    for number in range(WORKERS):
        text = site.worker(number)("GET", "/metrics")[1]
        assert f'semel_state_bytes{{process="worker-{number}"}} 0.0' in text
        assert site.worker(number)("POST", "/v1/rank", {"user_id": "k", "candidates": ["iü1"]})[0] == 200
    # The keys went with their events, and the server writes on.
    assert worker("POST", "/v1/events", event(user, "iü1", event_key="key-1"))[1]["accepted"] == 1


def test_sigterm_ends_all_of_them_with_0_and_replay_is_exact(site):
    answered, threads = [], []

    def ask():
        with Client(site.url, retries=0, timeout=60) as client:
            while True:
                try:
                    answered.append(client.rank("uü3", ["iü1", "iü2", "iü3"]).request_id)
                except httpx.TransportError:
                    return

    for _ in range(4):
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
    wait_for(lambda: len(answered) > 10)
    pids = [site.pid("writer"), site.pid("worker-0"), site.pid("worker-1")]
    runtime = os.path.dirname(site.socket(0))
    for worker in site.pool.values():
        worker.close()
    assert site.server.stop(120) == 0
    for thread in threads:
        thread.join(60)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not os.path.exists(runtime) and not (site.store / "server.json").exists()
    assert set(answered) <= set(logged(site))
    assert replay(site.run, site.store).exact
    for line in site.errors.read_text().splitlines():
        assert set(json.loads(line)) >= {"time", "level", "process", "logger"}
    with HistoryStore.open(site.store, mode="a"):
        pass  # the lock is free


@pytest.mark.slow
def test_when_the_parent_is_killed_all_end_and_leave_nothing_behind(tmp_path):
    made = Site(tmp_path)
    try:
        pids = [made.pid(name) for name in ("writer", "worker-0", "worker-1")]
        runtime = os.path.dirname(made.socket(0))
        ranked = made.worker(0)("POST", "/v1/rank", {"user_id": "orphan", "candidates": ["iü1"]})[1]
    finally:
        made.server.kill()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert not os.path.exists(runtime) and not (made.store / "server.json").exists()
    assert logged(made) == [ranked["request_id"]]  # it was still on its way to the writer
    with HistoryStore.open(made.store, mode="a"):
        pass


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path):
    folder = tmp_path / "store"
    for store in make_store(folder):
        store.close()
    with HistoryStore.open(folder, mode="a"), pytest.raises(RuntimeError, match="StoreLocked"):
        Server(tmp_path / "run", folder, tmp_path / "errors", workers=WORKERS)
    assert not (folder / "server.json").exists()
    shutil.rmtree(folder)
    with pytest.raises(RuntimeError, match="no store at"):
        Server(tmp_path / "run", folder, tmp_path / "errors", workers=WORKERS)


def logged(site):
    return ExposureLog(site.store / "exposures").read()["request_id"].to_pylist()


def named(folder, text):
    """The files that hold these bytes."""
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def wait_for(condition, seconds=100):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def semel():
    from typer.testing import CliRunner

    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])
