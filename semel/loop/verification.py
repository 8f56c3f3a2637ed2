"""After a loop: was anything lost or done twice, and can everything that was served be computed again?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from semel.loop.config import LoopFolder
from semel.loop.ledger import Ledger

WARM_UP_SHARE = 0.4
STEADY_S = 240.0
GROWTH_MB, GROWTH_SHARE = 24.0, 0.08
"""Memory that a process may gain after its warm-up and still count as steady: allocators and caches breathe."""
USERS_A_READ = 256
END_OF_TIME = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Verification:
    """``..._lost``: acknowledged and not there; ``..._repeated``: there more often than they were sent. ``exposures``
    are compared with ``answers``: of those that a kill took, the answer was seen by a user and is not in the log.
    ``replayed`` is promise 8 over all of the log, ``coverage`` the share of logged candidates with a finite score.
    ``growth``: of each process that ran long enough, MB gained after its warm-up and per minute."""

    answers: int
    events: int
    events_lost: int
    events_repeated: int
    outcomes: int
    outcomes_lost: int
    outcomes_repeated: int
    items: int
    items_lost: int
    exposures: int
    answers_not_logged: int
    coverage: float | None
    replayed: dict[str, Any] | None
    growth: dict[str, dict[str, float]]

    @property
    def nothing_lost(self) -> bool:
        return not (self.events_lost or self.outcomes_lost or self.items_lost)

    @property
    def good(self) -> bool:
        """Nothing lost, nothing twice, every candidate scored, the replay exact."""
        return (self.nothing_lost and not self.events_repeated and not self.outcomes_repeated
                and self.coverage in (None, 1.0) and (self.replayed is None or bool(self.replayed["exact"])))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "nothing_lost": self.nothing_lost, "good": self.good}


def verify(folder: LoopFolder, replay_all: bool = True, progress: Callable[[int, int], None] | None = None
           ) -> Verification:
    """Compare the driver's ledger with the store and the logs, and replay every exposure. To be called when the loop
    has ended. Raises FileNotFoundError where there is none."""
    with Ledger(folder.ledger, read_only=True) as ledger:
        sent = _Sent.of(ledger)
        items = _items(folder, ledger)
    events, outcomes, logged = _events(folder, sent), _outcomes(folder, sent), _Logged.of(folder)
    replayed = None
    if replay_all and len(logged.requests):
        replayed = _replay(folder, progress)
    return Verification(
        answers=len(sent.requests), **events, **outcomes, **items, exposures=len(logged.requests),
        answers_not_logged=int((~np.isin(sent.requests, logged.requests)).sum()), coverage=logged.coverage,
        replayed=replayed, growth=memory_growth(folder.samples))


class _Digests:
    """Eight bytes for each of many keys; a key that is lost is taken for another with a chance of its number in
    2**64."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, key: object) -> None:
        self._bytes += blake2b(repr(key).encode(), digest_size=8).digest()

    def array(self) -> np.ndarray:
        return np.frombuffer(bytes(self._bytes), np.uint64)


@dataclass(frozen=True)
class _Sent:
    """Digests of what the ledger has: ids of answered requests, events, of these the acknowledged ones, and the
    acknowledged labels. ``users``: who sent events."""

    requests: np.ndarray
    events: np.ndarray
    events_acknowledged: np.ndarray
    labels_acknowledged: np.ndarray
    users: set[Any]

    @classmethod
    def of(cls, ledger: Ledger) -> _Sent:
        requests, events, acknowledged, labels = _Digests(), _Digests(), _Digests(), _Digests()
        users: set[Any] = set()
        for answer, has_events, has_outcomes in ledger.accounts():
            requests.add(answer.request_id)
            for row in answer.events:
                users.add(row["user_id"])
                key = row["user_id"], row["item_id"], row["event_time"]
                events.add(key)
                if has_events:
                    acknowledged.add(key)
            for row in answer.outcomes if has_outcomes else ():
                for task in row["label"]:
                    labels.add(f"{row['outcome_key']}/{task}")
        return cls(requests.array(), events.array(), acknowledged.array(), labels.array(), users)


def _events(folder: LoopFolder, sent: _Sent) -> dict[str, int]:
    from semel.batch import Pointers
    from semel.history import HistoryStore, Projection

    stored = _Digests()
    with HistoryStore.open(folder.store) as store:
        users = np.asarray(store.keys())
        users = users[[user in sent.users for user in users.tolist()]]
        for low in range(0, len(users), USERS_A_READ):
            part = users[low : low + USERS_A_READ]
            table = store.read(Pointers(part, np.full(len(part), END_OF_TIME), np.full(len(part), store.version)),
                               Projection(("event_time", "item_id")))
            items = table.strings("item_id") if "item_id" in (table.dictionaries or {}) else table.columns["item_id"]
            owner = np.repeat(part, np.diff(table.offsets))
            for key in zip(owner.tolist(), np.asarray(items).tolist(), table.columns["event_time"].tolist(),
                           strict=True):
                stored.add(key)
    there = stored.array()
    there = there[np.isin(there, sent.events)]  # the rest is the past that the store began with
    return {"events": len(sent.events_acknowledged), "events_lost": _more(sent.events_acknowledged, there),
            "events_repeated": _more(there, sent.events)}


def _more(keys: np.ndarray, others: np.ndarray) -> int:
    """How many of ``keys`` are there more often than among ``others``, each as often as it is."""
    own, count = np.unique(keys, return_counts=True)
    there, often = np.unique(others, return_counts=True)
    place = np.minimum(np.searchsorted(there, own), max(0, len(there) - 1))
    has = np.where(there[place] == own, often[place], 0) if len(there) else np.zeros(len(own), np.int64)
    return int(np.maximum(count - has, 0).sum())


def _outcomes(folder: LoopFolder, sent: _Sent) -> dict[str, int]:
    """Keys of labels: a key of an outcome, and its task."""
    from semel.examples import OutcomeLog

    logged = _Digests()
    for table in OutcomeLog(folder.store / "outcomes").tables():
        for key in table["outcome_key"].drop_null().to_pylist():
            logged.add(key)
    there = logged.array()
    return {"outcomes": len(sent.labels_acknowledged),
            "outcomes_lost": int((~np.isin(sent.labels_acknowledged, there)).sum()),
            "outcomes_repeated": len(there) - len(np.unique(there))}


@dataclass(frozen=True)
class _Logged:
    """Of the exposures: digests of the requests' ids, and the share of candidates with a finite score."""

    requests: np.ndarray
    coverage: float | None

    @classmethod
    def of(cls, folder: LoopFolder) -> _Logged:
        from semel.examples import ExposureLog

        requests, scored, candidates = _Digests(), 0, 0
        for table in ExposureLog(folder.store / "exposures").tables():
            for request in table["request_id"].to_pylist():
                requests.add(request)
            scores = table["scores"].combine_chunks().flatten().to_numpy()
            told = table["scored"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            scored += int((np.isfinite(scores) & told.astype(bool)).sum())
            candidates += len(scores)
        return cls(requests.array(), scored / candidates if candidates else None)


def _items(folder: LoopFolder, ledger: Ledger) -> dict[str, int]:
    from semel.history import HistoryStore

    acknowledged = [row["item_id"] for row in ledger.items_acknowledged()]
    lost = 0
    if acknowledged and (folder.store / "catalogue").exists():
        with HistoryStore.open(folder.store / "catalogue") as catalogue:
            there = set(catalogue.keys().tolist())
        lost = sum(item not in there for item in acknowledged)
    return {"items": len(acknowledged), "items_lost": lost}


def _replay(folder: LoopFolder, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
    from semel.serving import replay

    run = json.loads((folder.path / "run.json").read_text())["run"]
    report = replay(run, folder.store, progress=progress).to_json()
    report["exact"] = report["exact"] and not report["other_versions"] and not report["memory_gone"]
    return report


def memory_growth(samples: Path) -> dict[str, dict[str, float]]:
    """By process, of the life that was longest and lasted ``STEADY_S`` at least: ``before_mb`` and ``after_mb``
    (medians of the first and last quarter after the warm-up), ``mb_per_minute`` (a line through them all),
    ``steady``."""
    lives: dict[tuple[str, int], list[tuple[float, float]]] = {}
    if samples.exists():
        with samples.open() as lines:
            for line in lines:
                if not line.rstrip().endswith("}"):
                    continue
                one = json.loads(line)
                for name, facts in one["processes"].items():
                    if facts["pid"] is not None and facts["rss_mb"]:
                        lives.setdefault((name, facts["pid"]), []).append((one["time"], facts["rss_mb"]))
    longest: dict[str, list[tuple[float, float]]] = {}
    for (name, _), series in lives.items():
        if series[-1][0] - series[0][0] > (longest[name][-1][0] - longest[name][0][0] if name in longest else STEADY_S):
            longest[name] = series
    return {name: _growth(np.array(series)) for name, series in longest.items()}


def _growth(series: np.ndarray) -> dict[str, float]:
    time, size = series.T
    warm = time >= time[0] + WARM_UP_SHARE * (time[-1] - time[0])
    time, size = time[warm] - time[warm][0], size[warm]
    quarter = max(1, len(size) // 4)
    before, after = float(np.median(size[:quarter])), float(np.median(size[-quarter:]))
    slope = float(np.polyfit(time, size, 1)[0]) if len(size) > 2 else 0.0
    return {"before_mb": before, "after_mb": after, "mb_per_minute": 60 * slope, "seconds": float(time[-1]),
            "steady": float(after - before <= max(GROWTH_MB, GROWTH_SHARE * before))}
