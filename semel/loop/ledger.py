"""The driver's ledger: what was asked and answered, what is to be sent and what was acknowledged. Survives ``kill -9``.

An answer and what follows from it (events, outcomes) are written down together before any of it is sent, and each row
is marked when the server has acknowledged it. After a restart the unmarked ones are sent again under the same keys.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    place INTEGER PRIMARY KEY AUTOINCREMENT, number INTEGER UNIQUE NOT NULL, request_id TEXT NOT NULL,
    user_id TEXT NOT NULL, answered_at REAL NOT NULL, model_version TEXT NOT NULL, shown TEXT NOT NULL,
    events TEXT NOT NULL, outcomes TEXT NOT NULL, events_at REAL, outcomes_at REAL);
CREATE INDEX IF NOT EXISTS unsent_events ON answers (number) WHERE events_at IS NULL;
CREATE INDEX IF NOT EXISTS unsent_outcomes ON answers (number) WHERE outcomes_at IS NULL;
CREATE TABLE IF NOT EXISTS items (
    item_id TEXT PRIMARY KEY, row TEXT NOT NULL, began_at REAL, acknowledged_at REAL, shown_at REAL, request_id TEXT);
CREATE TABLE IF NOT EXISTS position (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_time ON answers (answered_at);
"""


PAGE = 512
"""Answers that are read at once."""
_FORGOTTEN = "SELECT COALESCE(MAX(value), 0) FROM position WHERE name = 'forgotten'"


@dataclass(frozen=True)
class Answer:
    """An answered request. ``shown``: (item, served score, label or None, true probability or None) by position.
    ``events``, ``outcomes``: the rows to be sent, with their keys."""

    number: int
    request_id: str
    user_id: Any
    answered_at: float
    model_version: str
    shown: list[tuple[Any, float, float | None, float | None]]
    events: list[dict[str, Any]]
    outcomes: list[dict[str, Any]]


class Ledger:
    """SQLite with a write-ahead log: what was committed outlives the process. Thread-safe."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self._lock = threading.Lock()
        if read_only and not path.exists():
            raise FileNotFoundError(f"{path}: no such ledger; the loop has not run yet")
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30)
        if not read_only:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_TABLES)

    def add(self, answer: Answer) -> None:
        self._run("INSERT INTO answers (number, request_id, user_id, answered_at, model_version, shown, events, "
                  "outcomes, events_at, outcomes_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                  (answer.number, answer.request_id, json.dumps(answer.user_id), answer.answered_at,
                   answer.model_version, *map(json.dumps, (answer.shown, answer.events, answer.outcomes)),
                   None if answer.events else 0.0, None if answer.outcomes else 0.0))

    def acknowledge(self, kind: str, numbers: Iterable[int], at: float) -> None:
        """The server has acknowledged the ``kind`` ("events", "outcomes") of these answers."""
        column = {"events": "events_at", "outcomes": "outcomes_at"}[kind]
        with self._lock, self._db:
            self._db.execute("BEGIN")
            self._db.executemany(f"UPDATE answers SET {column} = ? WHERE number = ?", [(at, n) for n in numbers])
            self._db.execute("COMMIT")

    def answered(self, number: int) -> bool:
        return number < self._forgotten or bool(self._rows("SELECT 1 FROM answers WHERE number = ?", (number,)))

    def first_unanswered(self) -> int:
        """The smallest number that has no answer."""
        gone = self._forgotten
        count, last = self._rows("SELECT COUNT(*), MAX(number) FROM answers")[0]
        if not count or last + 1 == gone + count:
            return int(gone + count)
        known = {row[0] for row in self._rows("SELECT number FROM answers")}
        return next(number for number in range(gone, gone + count + 1) if number not in known)

    def forget(self, before: float) -> int:
        """Let go of answers of before a moment (wall clock) whose events and outcomes were acknowledged, from the first
        number on without a gap; and of items that were shown before it. How many answers; ``counts`` has them on."""
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            [[gone]] = self._db.execute(_FORGOTTEN).fetchall()
            first = self._db.execute("SELECT MIN(number) FROM answers WHERE answered_at >= ? OR events_at IS NULL OR "
                                     "outcomes_at IS NULL", (before,)).fetchone()[0]
            upto = gone
            for (number,) in self._db.execute("SELECT number FROM answers WHERE ? IS NULL OR number < ? "
                                              "ORDER BY number", (first, first)):
                if number != upto:
                    break  # an earlier one is still asked
                upto += 1
            self._db.execute("DELETE FROM answers WHERE number < ?", (upto,))
            self._db.execute("DELETE FROM items WHERE shown_at < ?", (before,))
            self._db.execute("INSERT OR REPLACE INTO position VALUES ('forgotten', ?)", (upto,))
            self._db.execute("COMMIT")
        return int(upto - gone)

    @property
    def _forgotten(self) -> int:
        """All numbers below were answered, and let go of."""
        return int(self._rows(_FORGOTTEN)[0][0])

    def answers(self, where: str = "1", most: int = -1) -> Iterator[Answer]:
        """In the order of the answers; ``most`` of the last ones."""
        return (answer for answer, *_ in self.accounts(where, most))

    def accounts(self, where: str = "1", most: int = -1) -> Iterator[tuple[Answer, bool, bool]]:
        """Answers, each with whether its events and its outcomes were acknowledged. A page at a time: an hour's take
        hundreds of megabytes."""
        place = -1
        if most >= 0:
            found = self._rows("SELECT MIN(place) - 1 FROM (SELECT place FROM answers WHERE " + where +
                               " ORDER BY place DESC LIMIT ?)", (most,))
            place = -1 if found[0][0] is None else found[0][0]
        while rows := self._rows(
                "SELECT number, request_id, user_id, answered_at, model_version, shown, events, outcomes, "
                "events_at IS NOT NULL, outcomes_at IS NOT NULL, place FROM answers "
                f"WHERE ({where}) AND place > ? ORDER BY place LIMIT {PAGE}", (place,)):
            for row in rows:
                yield Answer(row[0], row[1], json.loads(row[2]), row[3], row[4],
                             [tuple(s) for s in json.loads(row[5])], json.loads(row[6]),
                             json.loads(row[7])), bool(row[8]), bool(row[9])
            place = rows[-1][-1]

    def unsent(self, kind: str) -> list[Answer]:
        return list(self.answers(f"{kind}_at IS NULL"))

    def counts(self) -> dict[str, int]:
        """Answers so far, and how many of them have acknowledged events and outcomes."""
        row, gone = self._rows("SELECT COUNT(*), COUNT(events_at), COUNT(outcomes_at) FROM answers")[0], self._forgotten
        return {name: gone + count for name, count in zip(("answers", "events", "outcomes"), row, strict=True)}

    # Items

    def add_items(self, rows: Sequence[dict[str, Any]], position: int) -> None:
        """Items to upload; those created up to ``position`` (site time) are now in the ledger."""
        with self._lock, self._db:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR IGNORE INTO items (item_id, row) VALUES (?, ?)",
                                 [(json.dumps(row["item_id"]), json.dumps(row)) for row in rows])
            self._db.execute("INSERT OR REPLACE INTO position VALUES ('items', ?)", (position,))
            self._db.execute("COMMIT")

    def items_position(self) -> int | None:
        rows = self._rows("SELECT value FROM position WHERE name = 'items'")
        return int(rows[0][0]) if rows else None

    def items_to_upload(self) -> list[dict[str, Any]]:
        return [json.loads(row[0]) for row in self._rows("SELECT row FROM items WHERE acknowledged_at IS NULL")]

    def items_acknowledged(self) -> list[dict[str, Any]]:
        return [json.loads(row[0]) for row in self._rows("SELECT row FROM items WHERE acknowledged_at IS NOT NULL")]

    def items_unseen(self) -> list[Any]:
        """Items that the server has and that were never shown, the oldest first."""
        return [json.loads(row[0]) for row in self._rows(
            "SELECT item_id FROM items WHERE acknowledged_at IS NOT NULL AND shown_at IS NULL ORDER BY began_at")]

    def items_uploaded(self, ids: Sequence[Any], began: float, at: float) -> None:
        with self._lock, self._db:
            self._db.execute("BEGIN")
            self._db.executemany("UPDATE items SET began_at = COALESCE(began_at, ?), acknowledged_at = ? "
                                 "WHERE item_id = ?", [(began, at, json.dumps(item)) for item in ids])
            self._db.execute("COMMIT")

    def item_shown(self, item: Any, request_id: str, at: float) -> float | None:
        """Seconds since its upload began, if this is the first time that the item is shown."""
        with self._lock:
            changed = self._db.execute("UPDATE items SET shown_at = ?, request_id = ? WHERE item_id = ? AND shown_at "
                                       "IS NULL AND began_at IS NOT NULL", (at, request_id, json.dumps(item))).rowcount
        if not changed:
            return None
        return float(at - self._rows("SELECT began_at FROM items WHERE item_id = ?", (json.dumps(item),))[0][0])

    def freshness(self) -> tuple[list[float], int]:
        """Seconds from the beginning of an upload to the first time the item was shown, of all that were; how many
        acknowledged ones never were."""
        seconds = [row[0] for row in self._rows("SELECT shown_at - began_at FROM items WHERE shown_at IS NOT NULL "
                                                "ORDER BY shown_at")]
        return seconds, len(self.items_unseen())

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, statement: str, values: tuple[Any, ...] = ()) -> None:
        with self._lock:
            self._db.execute(statement, values)

    def _rows(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._lock:
            return self._db.execute(statement, values).fetchall()
