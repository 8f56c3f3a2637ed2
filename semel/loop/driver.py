"""The driver: asks for recommendations as a site would, answers as its users do, and sends what they did.

    python -m semel.loop.driver FOLDER URL

Nothing is sent that is not in the ledger first. Whatever the server does not acknowledge is sent again, under the same
key, until it does; a request is asked again until it is answered.
"""

from __future__ import annotations

import heapq
import json
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from semel.loop.config import LoopFolder
from semel.loop.figures import Entropy, Recent, quantile
from semel.loop.ledger import Answer, Ledger
from semel.loop.sites import NEW_PLACES, Ask, Site, make_site
from semel.serving.requests import MOST_RETRIEVED, StageSize
from semel.serving.results import RankResult, RecommendResult

if TYPE_CHECKING:
    from semel.serving import Client

ASKING = 4
"""Requests that are on their way at once, at most."""
PAGE_FROM = 100
"""Items of the catalogue that are retrieved and ranked for a page."""
AGAIN_S = 0.25
FORGET_EVERY_S = 30.0
ROWS_A_POST, ITEMS_A_POST = 400, 200
EVENT_DELAY_S, OUTCOME_DELAY_S = 0.15, 0.8
LATE_SHARE = 0.01
"""Of the answers: outcomes that come after the window, and events that come after the user's next requests."""


class Driver:
    """``run()`` until ``stop()`` (then what is due and what is not is sent, for ``last_s`` at most) or the site's last
    request."""

    def __init__(self, folder: LoopFolder, url: str) -> None:
        from semel.serving import Client

        self.folder, self.url = folder, url
        self.config, self.key = folder.load()
        served = folder.read_served()
        self.task = next(t.name for t in served.features.tasks if t.kind == "binary")
        self.site: Site = make_site(self.config, served)
        self.ledger = Ledger(folder.ledger)
        self.client: Client = Client(url, timeout=20.0, retries=0)
        self.stopping, self.ended = threading.Event(), threading.Event()
        self.figures = Figures()
        self._turn = threading.Lock()
        self._next = 0
        self._queues = {kind: Queue() for kind in ("events", "outcomes")}
        self._unseen: deque[Any] = deque()
        self._versions: dict[Any, int] = {}  # of each user: as of which its last events are visible

    def run(self, last_s: float = 15.0) -> None:
        self._restore()
        askers = [_thread(self, f"ask-{number}", self._ask) for number in range(ASKING)]
        senders = [_thread(self, f"send-{kind}", partial(self._send, kind)) for kind in self._queues]
        items = _thread(self, "items", self._upload)
        self._began = time.monotonic()
        for thread in (*askers, *senders, items):
            thread.start()
        swept = self._began
        while not self.stopping.wait(1.0):
            self._tell()
            if self.config.retention and time.monotonic() - swept >= FORGET_EVERY_S:
                self.ledger.forget(time.time() - self.config.retention)
                swept = time.monotonic()
            if not any(thread.is_alive() for thread in askers):
                break
        for thread in askers:
            thread.join()
        until = time.monotonic() + last_s
        while any(len(queue) for queue in self._queues.values()) and time.monotonic() < until \
                and self.figures.failure is None:
            for queue in self._queues.values():
                queue.hurry()
            time.sleep(0.05)
            self._tell()
        self.ended.set()
        for thread in (*senders, items):
            thread.join(25)
        self._tell()
        self.ledger.close()
        self.client.close()
        if self.figures.failure is not None:
            raise self.figures.failure

    def stop(self, *_: object) -> None:
        self.stopping.set()

    def _restore(self) -> None:
        """Go on where the ledger ends."""
        if hasattr(self.site, "begin_with_past"):
            self.site.begin_with_past()
        for answer in self.ledger.answers():
            self.site.remember(answer)
        now = time.time()
        for kind, queue in self._queues.items():
            for answer in self.ledger.unsent(kind):
                queue.put(now, answer.number, answer.events if kind == "events" else answer.outcomes)
        self._unseen.extend(self.ledger.items_unseen())
        for answer in self.ledger.answers(most=2000):
            self.figures.learned(answer)
        self._next = self.ledger.first_unanswered()
        self._first = self._next
        first = self.site.ask(self._first)
        self._first_time = first.as_of if first is not None else self.site.begin
        self.figures.answers = self.ledger.counts()["answers"]
        self.figures.uploads.extend(self.ledger.freshness()[0][-500:])

    # Asking

    def _ask(self) -> None:
        while not self.stopping.is_set():
            with self._turn:
                number = self._next
                self._next += 1
            if self.ledger.answered(number):
                continue
            ask = self.site.ask(number)
            if ask is None:
                return
            if not self._wait(ask):
                return
            self._one(ask)

    def _wait(self, ask: Ask) -> bool:
        """Until the request is due; False where the driver stops before."""
        due = self._began + (ask.as_of - self._first_time) / 1e6 / self.config.speedup
        while (left := due - time.monotonic()) > 0:
            if self.stopping.wait(min(left, 0.5)):
                return False
        self.figures.behind = max(0.0, -left)
        return not self.stopping.is_set()

    def _one(self, ask: Ask) -> None:
        while not self.stopping.is_set():
            before = self._versions.get(ask.user_id, 0)
            started = time.perf_counter()
            try:
                result = self._ranked(ask) if ask.candidates is not None else self._recommended(ask)
            except Exception as error:
                self._failed("recommend" if ask.candidates is None else "rank", error)
                self.stopping.wait(AGAIN_S)
                continue
            counts = [result.counts] if isinstance(result, RankResult) else [one.counts for one in result.stages]
            self.figures.ranked(time.perf_counter() - started, sum(one["scored"] for one in counts),
                                sum(one["in"] for one in counts), result.pointer.version < before)
            self._answered(ask, result)
            return

    def _recommended(self, ask: Ask) -> RecommendResult:
        """Of the whole catalogue, by the server's stages. While there are items that nobody has seen, all are ranked:
        one of those will be on the page."""
        with self._turn:
            wanted = MOST_RETRIEVED if self._unseen else PAGE_FROM
        return self.client.recommend(ask.user_id, wanted, ask.context, as_of=ask.as_of, retrieve=StageSize(wanted))

    def _ranked(self, ask: Ask) -> RankResult:
        """Of the request's own candidates, some of which give way to items that nobody has seen."""
        assert ask.candidates is not None
        with self._turn:
            new = [item for item in list(self._unseen)[: NEW_PLACES] if item not in ask.candidates]
        new = new[: len(ask.candidates) // 2]
        candidates = [*ask.candidates[: len(ask.candidates) - len(new)], *new]
        return self.client.rank(ask.user_id, candidates, ask.context, as_of=ask.as_of)

    def _answered(self, ask: Ask, result: RankResult | RecommendResult) -> None:
        now = time.time()
        with self._turn:
            there = {item for item, _ in result.results}
            new = [item for item in self._unseen if item in there]
            seen = self.site.seen(ask, [item for item, _ in result.results], new)
            score = dict(result.results)
            answer = Answer(
                ask.number, result.request_id, ask.user_id, now, result.model_version,
                [(item, score[item], label.get(self.task), p) for item, label, p in zip(
                    seen.shown, seen.labels, seen.probability, strict=True)],
                [{**event, "event_key": f"{self.key}-{ask.number}-{place}"} for place, event in enumerate(seen.events)],
                [{"request_id": result.request_id, "item_id": item, "label": {"shown": 1.0, **label},
                  "outcome_key": f"{self.key}-{ask.number}-{place}"}
                 for place, (item, label) in enumerate(zip(seen.shown, seen.labels, strict=True))])
            self.ledger.add(answer)
            for item in seen.page:
                if item in self._unseen:
                    self._unseen.remove(item)
                    seconds = self.ledger.item_shown(item, result.request_id, now)
                    if seconds is not None:
                        self.figures.uploads.append(seconds)
        self.figures.learned(answer)
        self.figures.answers += 1
        chance = random.Random(f"{self.key}-{ask.number}")  # the same after a restart, were it asked again
        late = chance.random() < LATE_SHARE
        if answer.events:
            self._queues["events"].put(now + EVENT_DELAY_S + (chance.expovariate(0.2) if late else 0.0), answer.number,
                                       answer.events)
        if answer.outcomes:
            usual = min(chance.expovariate(1 / OUTCOME_DELAY_S), 0.5 * self.config.window)
            self._queues["outcomes"].put(now + (1.3 * self.config.window if late else usual), answer.number,
                                         answer.outcomes)

    # Sending

    def _send(self, kind: str) -> None:
        queue = self._queues[kind]
        while not self.ended.is_set():
            due = queue.due(time.time(), ROWS_A_POST)
            if not due:
                self.ended.wait(0.03)
                continue
            rows = [row for _, own in due for row in own]
            started = time.perf_counter()
            while not self.ended.is_set():
                try:
                    written = self.client.events(rows) if kind == "events" else self.client.outcomes(rows)
                except Exception as error:
                    self._failed(kind, error)
                    self.ended.wait(AGAIN_S)
                    continue
                self.ledger.acknowledge(kind, [number for number, _ in due], time.time())
                if kind == "events":
                    self.figures.visible.add(time.monotonic(), time.perf_counter() - started)
                    for row in rows:
                        self._versions[row["user_id"]] = written.version or 0
                self.figures.duplicates[kind] += written.duplicates
                self.figures.accepted[kind] += written.accepted
                queue.done(len(due))
                break

    def _upload(self) -> None:
        """Items that appeared in the site's time so far."""
        position = self.ledger.items_position()
        position = self.site.begin if position is None else position
        while not self.ended.is_set():
            ask = self.site.ask(max(0, self._next - 1))
            if ask is not None and ask.as_of > position:
                table = self.site.new_items(position, ask.as_of)
                rows = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
                position = ask.as_of
                self.ledger.add_items(rows, position)
            waiting = self.ledger.items_to_upload()[:ITEMS_A_POST]
            if waiting:
                began = time.time()
                try:
                    self.client.items(waiting)
                except Exception as error:
                    self._failed("items", error)
                    self.ended.wait(AGAIN_S)
                    continue
                ids = [row["item_id"] for row in waiting]
                self.ledger.items_uploaded(ids, began, time.time())
                with self._turn:
                    self._unseen.extend(ids)
            self.ended.wait(0.05)

    def _failed(self, kind: str, error: Exception) -> None:
        """Whatever is not the server's being away or busy is a fault that waiting does not mend."""
        import httpx

        from semel.serving import ServerError

        status = error.status if isinstance(error, ServerError) else 0
        if not isinstance(error, httpx.TransportError) and status not in (500, 502, 503, 504):
            self.figures.failure = error
            self.stopping.set()
            self.ended.set()
            return
        self.figures.failed[kind, str(status) if status else "no connection"] = \
            self.figures.failed.get((kind, str(status) if status else "no connection"), 0) + 1

    def _tell(self) -> None:
        queues = {f"{kind}_waiting": len(queue) for kind, queue in self._queues.items()}
        self.folder.write_status("driver", {
            **self.figures.to_json(), **queues, "items_unseen": len(self._unseen),
            "finished": self.site.ask(self._next) is None})


class Figures:
    """What the driver saw of the server, for its status."""

    def __init__(self) -> None:
        self.answers, self.behind = 0, 0.0
        self.latency, self.visible = Recent(), Recent(60.0)
        self.scored = self.asked = self.stale = 0
        self.served, self.best = Entropy(), Entropy()
        self.uploads: deque[float] = deque(maxlen=500)
        self.failed: dict[tuple[str, str], int] = {}
        self.accepted = dict.fromkeys(("events", "outcomes"), 0)
        self.duplicates = dict.fromkeys(("events", "outcomes"), 0)
        self.failure: Exception | None = None
        self.version = ""
        self._lock = threading.Lock()

    def ranked(self, seconds: float, scored: int, asked: int, stale: bool) -> None:
        with self._lock:
            self.latency.add(time.monotonic(), seconds)
            self.scored += scored
            self.asked += asked
            self.stale += stale

    def learned(self, answer: Answer) -> None:
        with self._lock:
            self.version = answer.model_version
            for _, score, label, probability in answer.shown:
                if label is not None:
                    self.served.add(label, score)
                    if probability is not None:
                        self.best.add(label, probability)

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            now = time.monotonic()
            latencies, visible = self.latency.values(now), self.visible.values(now)
            uploads = list(self.uploads)
            return {
                "time": time.time(), "answers": self.answers, "requests_per_s": len(latencies) / 10.0,
                "p50_ms": _ms(quantile(latencies, 0.5)), "p99_ms": _ms(quantile(latencies, 0.99)),
                "behind_s": self.behind, "coverage": self.scored / self.asked if self.asked else None,
                "stale_reads": self.stale, "served_ne": self.served.recent, "best_ne": self.best.recent,
                "served_ne_all": self.served.all, "best_ne_all": self.best.all,
                "event_visible_p99_ms": _ms(quantile(visible, 0.99)),
                "item_shown_p50_s": quantile(uploads, 0.5), "item_shown_p99_s": quantile(uploads, 0.99),
                "items_shown": len(uploads), "model_version": self.version,
                "failed": {f"{kind}: {why}": count for (kind, why), count in self.failed.items()},
                "accepted": dict(self.accepted), "duplicates": dict(self.duplicates),
            }


class Queue:
    """What is to be sent, by when it is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, list[dict[str, Any]]]] = []
        self._lock = threading.Lock()
        self._under_way = 0

    def __len__(self) -> int:
        return len(self._heap) + self._under_way

    def put(self, due: float, number: int, rows: list[dict[str, Any]]) -> None:
        with self._lock:
            heapq.heappush(self._heap, (due, number, rows))

    def due(self, now: float, most: int) -> list[tuple[int, list[dict[str, Any]]]]:
        """Those that are due, up to ``most`` rows (one at least); ``done`` tells of them."""
        out: list[tuple[int, list[dict[str, Any]]]] = []
        rows = 0
        with self._lock:
            while self._heap and self._heap[0][0] <= now and (not out or rows + len(self._heap[0][2]) <= most):
                _, number, own = heapq.heappop(self._heap)
                out.append((number, own))
                rows += len(own)
            self._under_way += len(out)
        return out

    def done(self, number: int) -> None:
        with self._lock:
            self._under_way -= number

    def hurry(self) -> None:
        """All is due now."""
        with self._lock:
            self._heap = [(0.0, number, rows) for _, number, rows in self._heap]
            heapq.heapify(self._heap)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _thread(driver: Driver, name: str, work: Callable[[], None]) -> threading.Thread:
    """A thread whose fault ends the driver, which says what it was."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            driver.figures.failure = error
            driver.stopping.set()
            driver.ended.set()

    return threading.Thread(target=run, name=name, daemon=True)


def main(arguments: list[str]) -> None:
    folder, url = arguments
    driver = Driver(LoopFolder(folder), url)
    signal.signal(signal.SIGTERM, driver.stop)
    signal.signal(signal.SIGINT, driver.stop)
    driver.run()
    print(json.dumps({"ended": True, "answers": driver.figures.answers}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
