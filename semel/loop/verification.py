"""After a loop: was anything lost or done twice, and can everything that was served be computed again?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semel.loop.config import LoopFolder
from semel.loop.ledger import Ledger

WARM_UP_SHARE = 0.4
STEADY_S = 240.0
GROWTH_MB, GROWTH_SHARE = 24.0, 0.08
"""Memory that a process may gain after its warm-up and still count as steady: allocators and caches breathe."""
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
    from semel.examples import ExposureLog, OutcomeLog

    with Ledger(folder.ledger, read_only=True) as ledger:
        events = _events(folder, ledger)
        outcomes = _outcomes(OutcomeLog(folder.store / "outcomes").read()["outcome_key"].to_pylist(), ledger)
        items = _items(folder, ledger)
        exposures = ExposureLog(folder.store / "exposures").read()
        known = set(exposures["request_id"].to_pylist())
        answers = [answer.request_id for answer in ledger.answers()]
    replayed = None
    if replay_all and len(exposures):
        replayed = _replay(folder, progress)
    scores = exposures["scores"].combine_chunks().flatten().to_numpy() if len(exposures) else np.empty(0)
    scored = exposures["scored"].combine_chunks().flatten().to_numpy(zero_copy_only=False) if len(exposures) else scores
    return Verification(
        answers=len(answers), **events, **outcomes, **items, exposures=len(exposures),
        answers_not_logged=sum(one not in known for one in answers),
        coverage=float((np.isfinite(scores) & scored.astype(bool)).mean()) if len(scores) else None,
        replayed=replayed, growth=memory_growth(folder.samples))


def _events(folder: LoopFolder, ledger: Ledger) -> dict[str, int]:
    from semel.batch import Pointers
    from semel.history import HistoryStore, Projection

    sent: Counter[tuple[Any, Any, int]] = Counter()
    acknowledged: Counter[tuple[Any, Any, int]] = Counter()
    for answer in ledger.answers():
        sent.update(map(_event, answer.events))
    for answer in ledger.acknowledged("events"):
        acknowledged.update(map(_event, answer.events))
    stored: Counter[tuple[Any, Any, int]] = Counter()
    with HistoryStore.open(folder.store) as store:
        users = np.asarray(store.keys())
        wanted = {user for user, *_ in sent}
        users = users[[user in wanted for user in users.tolist()]]
        for low in range(0, len(users), 4096):
            part = users[low : low + 4096]
            table = store.read(Pointers(part, np.full(len(part), END_OF_TIME), np.full(len(part), store.version)),
                               Projection(("event_time", "item_id")))
            items = table.strings("item_id") if "item_id" in (table.dictionaries or {}) else table.columns["item_id"]
            owner = np.repeat(part, np.diff(table.offsets))
            stored.update(key for key in zip(owner.tolist(), np.asarray(items).tolist(),
                                             table.columns["event_time"].tolist(), strict=True) if key in sent)
    return {"events": acknowledged.total(), "events_lost": (acknowledged - stored).total(),
            "events_repeated": (stored - sent).total()}


def _event(row: dict[str, Any]) -> tuple[Any, Any, int]:
    return row["user_id"], row["item_id"], row["event_time"]


def _outcomes(logged: Sequence[str | None], ledger: Ledger) -> dict[str, int]:
    """Keys of labels: a key of an outcome, and its task."""

    def keys(answers: Any) -> list[str]:
        return [f"{row['outcome_key']}/{task}" for answer in answers for row in answer.outcomes
                for task in row["label"]]

    there = Counter(key for key in logged if key is not None)
    acknowledged = keys(ledger.acknowledged("outcomes"))
    return {"outcomes": len(acknowledged), "outcomes_lost": sum(key not in there for key in acknowledged),
            "outcomes_repeated": sum(count - 1 for count in there.values())}


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
        for line in samples.read_text().splitlines():
            if not line.endswith("}"):
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
