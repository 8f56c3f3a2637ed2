"""Whole histories as sequences, for next-item training: leave-one-out as papers do it, and before one moment in time.

Leave-one-out cannot be told by pointers: it cuts by position, and where the last events of a user share a timestamp no
``as_of`` lies between them. So a ``SequenceSet`` reads whole histories through one pointer each and cuts them itself.
``docs/examples.md`` says why the protocol leaks; use the time split for decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semel.batch import JaggedTable, Pointers, expand_rows, offsets_of
from semel.history import HistoryStore, Projection

EVERYTHING = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class SequenceSet:
    """Histories in stable order ``(event_time, version, position in the append)``, the last ``holdout`` events apart.

    ``user_id`` [U]; ``histories``: whole ones, as the store gave them (strings as codes + dictionary; see
    ``semel.examples.history_tensors`` for a model's input); ``pointers`` [U]: what they were read through.
    """

    user_id: np.ndarray
    histories: JaggedTable
    pointers: Pointers
    holdout: int = 0

    def __len__(self) -> int:
        return len(self.user_id)

    @property
    def evaluated(self) -> np.ndarray:
        """[U] bool: users with at least one event left to train on beside the ones held out."""
        return np.asarray(self.histories.lengths > self.holdout)

    def train(self) -> JaggedTable:
        """[U] histories without the events held out. A user with too few keeps all here and is not evaluated."""
        return self._head(np.where(self.evaluated, self.histories.lengths - self.holdout, self.histories.lengths),
                          np.arange(len(self)))

    def validation(self) -> tuple[JaggedTable, JaggedTable]:
        """(what comes before, the one event before the last) of the evaluated users; needs ``holdout`` 2."""
        return self._held_out(2)

    def test(self) -> tuple[JaggedTable, JaggedTable]:
        """(what comes before, the last event) of the evaluated users; the validation event comes before."""
        return self._held_out(1)

    def _held_out(self, from_end: int) -> tuple[JaggedTable, JaggedTable]:
        if self.holdout < from_end:
            raise ValueError(f"this set holds out {self.holdout} events a user, {from_end} are needed")
        users = np.flatnonzero(self.evaluated)
        before = self.histories.lengths[users] - from_end
        return self._head(before, users), take_events(self.histories, self.histories.offsets[users] + before,
                                                      np.ones(len(users), dtype=np.int64))

    def _head(self, lengths: np.ndarray, users: np.ndarray) -> JaggedTable:
        return take_events(self.histories, self.histories.offsets[users], lengths)


def leave_one_out(
    store: HistoryStore, columns: Sequence[str] = ("item_id",), holdout: int = 2, min_events: int = 1,
) -> SequenceSet:
    """All histories at the store's version: the last event tests, the one before it validates (``holdout`` 2).

    ``event_time`` is always among the columns. Users with fewer than ``min_events`` events are left out.
    """
    if holdout < 0:
        raise ValueError(f"holdout must not be negative, got {holdout}")
    return _sequences(store, EVERYTHING, columns, holdout, min_events)


def sequences_before(
    store: HistoryStore, time: int, columns: Sequence[str] = ("item_id",), min_events: int = 1,
) -> SequenceSet:
    """What was known of all users before ``time`` (microseconds): events with ``event_time < time``, nothing held out.
    The global-time view, which does not leak."""
    return _sequences(store, time, columns, 0, min_events)


def _sequences(store: HistoryStore, as_of: int, columns: Sequence[str], holdout: int, min_events: int) -> SequenceSet:
    users = store.keys()
    pointers = Pointers(users, np.full(len(users), as_of), np.full(len(users), store.version))
    histories = store.read(pointers, Projection(columns=tuple(dict.fromkeys(["event_time", *columns]))))
    keep = np.flatnonzero(histories.lengths >= max(min_events, 1))
    if len(keep) < len(users):
        histories = take_events(histories, histories.offsets[keep], histories.lengths[keep])
        pointers = pointers[keep]
    return SequenceSet(pointers.user_id, histories, pointers, holdout)


def take_events(table: JaggedTable, starts: np.ndarray, lengths: np.ndarray) -> JaggedTable:
    """Rows of ``lengths`` events each, from places ``starts`` of the table's events on."""
    bounds = np.stack([starts, starts + lengths], axis=1).ravel() if len(starts) else np.zeros(1, np.int64)
    index, _ = expand_rows(bounds, np.arange(0, 2 * len(starts), 2))
    return JaggedTable(
        {name: column[index] for name, column in table.columns.items()}, offsets_of(lengths),
        None if table.validity is None else {name: valid[index] for name, valid in table.validity.items()},
        table.dictionaries,
    )
