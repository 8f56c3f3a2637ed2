"""RecTools' side of ``benchmarks/rectools.py``: run by a Python that has RecTools, not by the one that has Semel.

    python _rectools_worker.py IN.npz OUT.npz '{"epochs": 5, "dim": 64, ...}'

``IN.npz``: ``user``, ``item`` [N] int64, events in their order, and ``train`` [N] bool: those to train on; the others
are known when recommending. ``OUT.npz``: ``user`` [U], ``top`` [U, 10] item ids, best first (-1 where fewer),
``epoch_ends`` [epochs, 2] wall and CPU clocks (seconds), ``fit_seconds``, ``recommend_seconds``.
"""

import json
import sys
import time
import warnings
from typing import ClassVar

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel


class EpochClock(pl.Callback):
    """Wall and CPU seconds at the end of each epoch; on the class, since RecTools trains a copy of its trainer."""

    ends: ClassVar[list[tuple[float, float]]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))


def main(source: str, target: str, settings: dict) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(settings["threads"])
    pl.seed_everything(settings["seed"], verbose=False)
    data = np.load(source)
    # RecTools sorts by time without promising what ties do; distinct times keep the given order.
    events = pd.DataFrame({
        Columns.User: data["user"], Columns.Item: data["item"], Columns.Weight: 1.0,
        Columns.Datetime: pd.Timestamp("2000-01-01") + pd.to_timedelta(np.arange(len(data["user"])), unit="s"),
    })
    train, known = Dataset.construct(events[data["train"]]), Dataset.construct(events)

    def trainer() -> pl.Trainer:
        return pl.Trainer(max_epochs=settings["epochs"], min_epochs=settings["epochs"], accelerator="cpu", devices=1,
                          enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
                          logger=False, callbacks=[EpochClock()])

    model = SASRecModel(
        n_factors=settings["dim"], n_blocks=settings["blocks"], n_heads=settings["heads"],
        session_max_len=settings["length"], batch_size=settings["batch"], n_negatives=settings["negatives"],
        loss=settings["loss"], epochs=settings["epochs"], deterministic=True, get_trainer_func=trainer,
    )
    started = time.perf_counter()
    model.fit(train)
    fitted = time.perf_counter()
    users = np.unique(data["user"])
    found = model.recommend(users=users, dataset=known, k=10, filter_viewed=False)
    done = time.perf_counter()
    top = np.full((len(users), 10), -1, dtype=np.int64)
    top[np.searchsorted(users, found[Columns.User]), found[Columns.Rank] - 1] = found[Columns.Item]
    np.savez(target, user=users, top=top, epoch_ends=np.array(EpochClock.ends), fit_seconds=fitted - started,
             recommend_seconds=done - fitted)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
