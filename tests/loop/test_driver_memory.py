"""What a driver holds does not grow with what it has asked, nor with what its ledger holds when it is started again."""

import gc
import itertools
import threading
import time
import tracemalloc

import pytest

from semel import recipes
from semel.datasets.simulate import FIRST_ITEM, FIRST_USER
from semel.loop import LoopConfig, LoopFolder
from semel.loop.config import Served
from semel.loop.driver import Driver
from semel.loop.ledger import Answer, Ledger
from semel.serving.calls import WriteResult
from semel.serving.results import Pointer, RecommendResult, StageCost

ITEMS = range(FIRST_ITEM, FIRST_ITEM + 100)


class Server:
    """Answers at once, with the catalogue's first items, and takes all that is sent."""

    def __init__(self):
        self.numbers = itertools.count()

    def recommend(self, user_id, limit, context, as_of, retrieve):
        counts = {"in": len(ITEMS), "scored": len(ITEMS), "out": len(ITEMS)}
        return RecommendResult(f"r{next(self.numbers)}", "m", Pointer(user_id, as_of, 10**9),
                               [(item, 1.0 / (item + 1)) for item in ITEMS], [StageCost("rank", "m", counts, {})], {})

    def events(self, rows):
        return WriteResult(len(rows), 0, 1)

    outcomes = items = events

    def close(self):
        pass


@pytest.fixture
def folder(tmp_path):
    folder = LoopFolder(tmp_path / "loop")
    folder.settle(LoopConfig(users=20, past_hours=24, rate=100.0, speedup=600.0, window=0.2))
    folder.write_served(Served.of(recipes.get("site_rank")))
    return folder


def driver_of(folder):
    driver = Driver(folder, "http://127.0.0.1:9")
    driver.client.close()
    driver.client = Server()
    return driver


def test_requests_leave_nothing_behind(folder):
    tracemalloc.start()
    driver = driver_of(folder)
    figures = driver.figures
    for _ in range(20_000):  # windows that are full, and stay it: so they cost the same all the time
        figures.latency.add(1e12, 0.0)
        figures.visible.add(1e12, 0.0)
        figures.served.add(1.0, 0.5)
        figures.best.add(1.0, 0.5)
    for number in range(0, 9 * 512, 512):
        driver.site.ask(number)
    running = threading.Thread(target=driver.run)
    held, answers, until = [], [], time.monotonic() + 90
    try:
        running.start()
        for wanted in range(100, 500, 100):
            while figures.answers < wanted and figures.failure is None:
                assert time.monotonic() < until, figures.answers
                time.sleep(0.02)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
            answers.append(figures.answers)
    finally:
        tracemalloc.stop()
        driver.stop()
        running.join(30)
    assert not running.is_alive() and figures.failure is None
    # An answer with its rows takes 5,000 bytes and more; the 25 of a quarter of a second are on their way.
    assert held[-1] - held[1] < 1_000 * (answers[-1] - answers[1]), (held, answers)


def test_a_restart_takes_no_more_of_a_long_ledger_than_of_a_short_one(folder, monkeypatch):
    monkeypatch.setattr("semel.loop.ledger.PAGE", 64)

    def answer(number):
        rows = [{"user_id": FIRST_USER + number % 20, "item_id": slot, "event_time": 1000 * number + slot,
                 "action": "view", "event_key": f"key-{number}-{slot}"} for slot in range(8)]
        shown = [(FIRST_ITEM + slot, 0.5, 0.0, 0.1) for slot in range(8)]
        return Answer(number, f"r{number}", FIRST_USER + number % 20, 1.0, "m", shown, rows, rows)

    peaks = []  # after 600 answers the figures' windows are full
    for numbers in (range(600), range(600, 1800)):
        with Ledger(folder.ledger) as ledger:
            for number in numbers:
                ledger.add(answer(number))
            for kind in ("events", "outcomes"):
                ledger.acknowledge(kind, numbers, 1.0)
        driver = driver_of(folder)
        driver.site.begin_with_past()
        tracemalloc.start()
        driver._restore()  # what ``run`` begins with
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert driver._next == numbers.stop
        driver.ledger.close()
    assert peaks[1] < peaks[0] + 500_000, peaks  # 1,200 answers more, of 2,000 bytes each as text alone
