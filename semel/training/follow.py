"""Online training: one pass, in time order, over a folder of request rows that grows.

Every row is scored before the update that it causes, so NE and AUC are prequential: they say how good the model was at
what it had not seen. What a step trains on depends on the files and their names only, never on when they appeared: a
follower that was stopped and one that was not go through the same losses.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semel.batch import RequestBatch
from semel.examples import RequestLoader, read_rows
from semel.examples.predictions import PredictionLog
from semel.metrics import AUC, NormalizedEntropy
from semel.models import load_model, save_model
from semel.models.early_ranker import memory_layer
from semel.training import loops
from semel.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from semel.training.curves import Curves
from semel.training.gradients import gradient_sums
from semel.training.memory import memory_writer, take_over
from semel.training.objectives import RankingObjective, RequestObjective
from semel.training.pieces import Workers
from semel.training.ranks import Ranks
from semel.training.recipe import Recipe
from semel.training.run import Run
from semel.training.sharded import sharded_tables
from semel.training.stages import StepStages, Work, updates
from semel.training.timeline import Timeline
from semel.training.trainer import LOG_EVERY, Interrupted, OnSigterm, new_run

POLL_S = 0.5
ALIVE = "alive"
"""In the run's folder: touched after every step and every look for files, so that who watches sees a hang."""
SCORED_TOGETHER = 8192
"""Candidates, so that memory does not grow with the catalogue where requests rank all of it."""
REPORT_S = 5.0
"""A follower that waits for files tells how good it was at the last ones, if it has not for so long."""


@dataclass(frozen=True)
class Followed:
    """Told to ``Follower(on_progress=...)`` on rank 0: ``ne`` and ``auc`` of all rows so far and, ``window_...``, of
    those since the last report; ``file``: the one that was trained on last; ``waiting``: files not begun yet."""

    step: int
    rows: int
    file: str
    waiting: int
    loss: float
    samples_per_s: float
    ne: float
    auc: float
    window_ne: float
    window_auc: float
    seconds: dict[str, float]


class Follower:
    """``Follower(recipe, folder).fit() -> Run``: trains on the Parquet files of request rows (``rows_to_table``) in
    ``folder``, by name, the rows of each by ``as_of``, and waits for more.

    Files appear whole (written elsewhere and renamed) and with growing names; they are not changed and may be removed
    once trained on. ``start``: a run whose model is trained on; without it the model is new, its vocabularies those of
    the store's training examples. There is no last step, so the learning rate is constant after the warm-up.
    """

    def __init__(self, recipe: Recipe, folder: str | Path, *, start: str | Path | None = None,
                 on_progress: Callable[[Followed], None] | None = None) -> None:
        if recipe.model.objective != "ranking":
            raise ValueError(f"recipe {recipe.name!r} predicts the next item; following trains ranking recipes")
        self.folder, self.start, self.on_progress = Path(folder), start, on_progress
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder; name the one in which files of request rows appear")
        if (self.folder / "log.json").exists():
            raise ValueError(f"{folder} is a log of what was served, without labels; join it with its outcomes "
                             "(semel.examples.join) and write the rows as Parquet files (rows_to_table)")
        self.recipe = dataclasses.replace(
            recipe, optimizer=dataclasses.replace(recipe.optimizer, schedule="constant"))
        self._stop = threading.Event()

    def stop(self) -> None:
        """Save after the current step and leave ``fit`` with ``Interrupted``, on all ranks."""
        self._stop.set()

    def fit(self, resume: str | Path | None = None, until_idle: float | None = None) -> Run:
        """Follow until SIGTERM or ``stop`` (``Interrupted``), or until no file has come for ``until_idle`` seconds.

        ``resume``: a run of this kind, gone on with after its last checkpoint. Raises what ``Trainer.fit`` raises, and
        ValueError for a file that is none of request rows or has changed.
        """
        self._stop.clear()
        ranks = Ranks()
        if resume is not None:
            run = Run.open(resume)
            if not list((run.path / "checkpoints").glob("step-*")):
                raise FileNotFoundError(f"{resume} has no checkpoint to resume from; follow anew")
        with torch.random.fork_rng(devices=[]), OnSigterm(self.stop):
            torch.manual_seed(self.recipe.seed)
            model = ranks.in_turn(lambda: self._make_model(resume, ranks))
            objective = RequestObjective(self.recipe, checksum=True)
            try:
                if resume is None:
                    run = Run(Path(ranks.first(lambda: str(new_run(self.recipe)))), self.recipe)
                with Curves(run, ranks) as curves:
                    following = _Following(self, run, objective, model, ranks, curves)
                    try:
                        following.go(resume is not None, until_idle)
                    finally:
                        following.close()
            finally:
                objective.close()
        return run

    def _make_model(self, resume: str | Path | None, ranks: Ranks) -> Any:
        start = resume or self.start
        if start is not None:
            artifact = load_model(start)
            if (artifact.config, artifact.features) != (self.recipe.model, self.recipe.features):
                raise ValueError(f"{start} holds another model than recipe {self.recipe.name!r}; leave its model and "
                                 "features as they are")
            layer = memory_layer(artifact.model)
            if layer is not None and resume is None:  # a checkpoint holds its own rows
                take_over(layer, Run.open(start).recipe.memory.url or Path(start) / "memory")
            return artifact.model
        objective = RankingObjective(self.recipe, ranks)
        try:
            return objective.make_model()
        finally:
            objective.close()


@dataclass
class _Sums:
    """Of the rows since the last report: losses by step (of all ranks), the rest of this rank."""

    ne: NormalizedEntropy = dataclasses.field(default_factory=NormalizedEntropy)
    auc: AUC = dataclasses.field(default_factory=AUC)
    losses: list[float] = dataclasses.field(default_factory=list)
    samples: int = 0


def _in_parts(batch: RequestBatch) -> Iterator[RequestBatch]:
    """Its requests in order, together as long as they have no more than ``SCORED_TOGETHER`` candidates."""
    if batch.candidates <= SCORED_TOGETHER:
        yield batch
        return
    ends, start = batch.candidate_offsets.numpy(), 0
    while start < batch.requests:
        stop = max(start + 1, int(np.searchsorted(ends, ends[start] + SCORED_TOGETHER, "right")) - 1)
        yield batch.slice(start, stop)
        start = stop


class _Following:
    """The state of one ``fit``."""

    def __init__(self, follower: Follower, run: Run, objective: RequestObjective, model: Any, ranks: Ranks,
                 curves: Curves) -> None:
        self.follower, self.recipe, self.run, self.objective = follower, follower.recipe, run, objective
        self.model, self.ranks, self.curves = model, ranks, curves
        config = self.recipe.optimizer
        self.timeline = Timeline(ranks.rank)
        self.tables = sharded_tables(model, self.recipe, self.timeline)
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=config.learning_rate,
                                           betas=(config.beta1, config.beta2), weight_decay=config.weight_decay)
        self.sums = gradient_sums(self.optimizer, ranks, self.timeline)
        self.memory = memory_writer(model, self.recipe, run.path, ranks, objective.catalogue)
        self.predictions = PredictionLog(run.path / "predictions", ranks.rank)
        self.versioned = time.monotonic()   # when weights were last saved for who serves them
        self.step = 0
        self.done: list[str] = []           # files that are trained on
        self.opened: dict[int, str] = {}    # the names of loaders, by identity
        self.begun: set[str] = set()        # files whose batches are on their way, or done
        self.resumed: tuple[str, dict[str, Any]] | None = None
        self.at: tuple[str, RequestLoader] | None = None  # the file that is trained on, and where in it
        self.total, self.window = (NormalizedEntropy(), AUC()), _Sums()
        self.saved = 0                      # the step of the last checkpoint
        self.beaten = 0.0                   # when it last gave a sign of life
        self.version = ""
        self.seconds, self.since = 0.0, time.perf_counter()

    def go(self, resume: bool, until_idle: float | None) -> None:
        if resume:
            self._restore()
        self._version()
        if self.memory is not None:
            self.memory.start()
        recipe = self.recipe
        loop: Callable[..., Any] = loops.plain
        if recipe.overlap:
            loop = partial(loops.overlapped, meet=self.tables.meet if self.tables else None)
        with Workers(-(-recipe.pieces // self.ranks.world_size), recipe.seed) as workers:
            step = StepStages(recipe, self.objective, self.model, self.optimizer, workers, self.ranks, self.timeline,
                              self.follower._stop.is_set, tables=self.tables, score=self._score,
                              memory=self.memory, under_backward=self.sums)
            step.step = self.step
            stages = step.stages()
            idle_since = time.monotonic()
            while True:
                with closing(loop(stages, self._works(), self.timeline)) as works:
                    for work in works:
                        self._after(work, step)
                        idle_since = time.monotonic()
                if self.ranks.any(self.follower._stop.is_set()):
                    self._interrupt()
                if self.window.losses and time.perf_counter() - self.since >= REPORT_S:
                    self._report()
                if self.step != self.saved:
                    self._save()
                over = until_idle is not None and time.monotonic() - idle_since >= until_idle
                if self.ranks.any(over and self.ranks.rank == 0):
                    break
                if self.memory is not None:
                    self.memory.idle()
                self._beat()
                time.sleep(POLL_S)
        if self.window.losses:
            self._report()
        self._save()
        self.curves.trace(self.timeline)
        if self.ranks.rank == 0:
            ne, auc = self.total
            (self.run.path / "run.json").write_text(json.dumps({
                "model_version": self.version, "epochs": 1, "steps": self.step, "seconds": self.seconds,
                "stopped_early": False, "best": {"ne": ne.to_json()["ne"]}, "files": len(self.done), "rows": ne.rows,
                "prequential": {**ne.to_json(), **auc.to_json()}, "wait_seconds": self.timeline.totals["input"],
                "threads": torch.get_num_threads(), "ranks": self.ranks.world_size,
                "parameters": sum(p.numel() for p in self.model.parameters())
                + (self.tables.parameters if self.tables else 0)}, indent=1))

    def _works(self) -> Iterator[Work]:
        """The batches of the files that are there, until there is none that was not begun."""
        while (name := self._next_file()) is not None:
            loader = self._open(name)
            self.begun.add(name)
            self.opened[id(loader)] = name
            found = updates(loader, self.recipe.accumulate_tokens, 0, 1)
            for update in found:
                update.done = 0.0
                for number in range(len(update.batches)):
                    yield Work(update, number)
            if not found:
                self.done.append(name)

    def _next_file(self) -> str | None:
        """What rank 0 sees counts: the others may see a file a moment later."""
        if self.resumed is not None and self.resumed[0] not in self.begun:
            return self.resumed[0]
        return self.ranks.first(lambda: next(iter(self._waiting()), None))

    def _waiting(self) -> list[str]:
        return sorted(path.name for path in self.follower.folder.glob("*.parquet")
                      if path.name not in self.begun and not path.name.startswith("."))

    def _open(self, name: str) -> RequestLoader:
        path = self.follower.folder / name
        rows = read_rows(path)
        rows = rows.select(np.argsort(rows.pointers.as_of, kind="stable"))
        loader = RequestLoader(rows, self.objective.store, features=self.recipe.features,
                               catalogue=self.objective.catalogue, batch_requests=self.recipe.batch, shuffle=None)
        if self.resumed is not None and name == self.resumed[0]:
            try:
                loader.load_state_dict(self.resumed[1])
            except ValueError as error:
                raise ValueError(f"{path} has changed since it was trained on in part ({error})") from None
        return loader

    def _score(self, work: Work) -> None:
        self.model.eval()
        with torch.inference_mode():
            for _, piece in work.pieces:
                output = torch.cat([self.model(part) for part in _in_parts(piece)])
                self.predictions.add(self.step, piece, output)
                label, logits = self.objective.judged_rows(piece, output)
                if np.isfinite(logits).all():  # else the loss is not either, and that is an error
                    self.window.ne.update_logits(label, logits)
                    self.window.auc.update_logits(label, logits)
                self.window.samples += piece.candidates

    def _after(self, work: Work, step: StepStages) -> None:
        if not work.last:
            return
        self._beat()
        update = work.update
        self.step = step.step
        step.observed.clear()  # nothing is tuned by it here
        assert update.loss is not None and isinstance(update.loader, RequestLoader)
        self.window.losses.append(float(update.loss))
        self.at = self.opened[id(update.loader)], update.loader
        for _ in update.batches:
            update.loader.took()
        if not update.loader.upcoming():
            self.done.append(self.at[0])
            del self.opened[id(update.loader)]
            self.at = None
        self.timeline.end_step()
        if self.step % LOG_EVERY == 0:
            self._report()
        if step.stopping:
            self._interrupt()
        if self.step % self.recipe.checkpoint_steps == 0:
            self._save()
        elif self._due():
            self._version()

    def _beat(self) -> None:
        now = time.monotonic()
        if self.ranks.rank == 0 and now - self.beaten >= POLL_S:
            (self.run.path / ALIVE).touch()
            self.beaten = now

    def _interrupt(self) -> None:
        self._save()
        self.curves.trace(self.timeline)
        raise Interrupted(f"stopped at step {self.step}; resume {self.run.path} to go on")

    def _report(self) -> None:
        window, now = self.window, time.perf_counter()
        ne, auc = self.ranks.sum_metric(window.ne), self.ranks.sum_metric(window.auc)
        rate = float(self.ranks.sum([window.samples])[0]) / (now - self.since)
        self.total = self.total[0] + ne, self.total[1] + auc
        self.seconds += now - self.since
        self.window, self.since = _Sums(), now
        seconds, loss = self.timeline.means(), sum(window.losses) / len(window.losses)
        whole, all_auc = self.total
        file = self.at[0] if self.at else self.done[-1]
        figures = {"ne": whole.to_json()["ne"], "auc": all_auc.to_json()["auc"], "window_ne": ne.to_json()["ne"],
                   "window_auc": auc.to_json()["auc"]}
        self.curves.record({"kind": "train", "step": self.step, "epoch": 0, "loss": loss, "samples_per_s": rate,
                            "rows": whole.rows, **figures, "file": file, "seconds": seconds,
                            **(self.tables.report() if self.tables else {})})
        if self.follower.on_progress is not None and self.ranks.rank == 0:
            self.follower.on_progress(Followed(self.step, whole.rows, file, len(self._waiting()), loss, rate,
                                               whole.ne, all_auc.value, ne.ne, auc.value, seconds))

    def _save(self) -> None:
        """The weights for who serves them, and everything that the next step depends on, of all ranks."""
        sums = {"total": self.total, "window": (self.ranks.sum_metric(self.window.ne),
                                                self.ranks.sum_metric(self.window.auc))}
        samples = int(self.ranks.sum([self.window.samples])[0])
        self.saved = self.step
        self.predictions.save(self.step)
        self._version()
        folder = self.run.path / "checkpoints"
        parts: dict[str, Path] = {}
        for name, held in (("tables", self.tables), ("memory", self.memory)):
            if held is not None:
                parts[name] = folder / f".{name}"
                held.save(parts[name])
        if self.ranks.rank:
            return
        tensors: dict[str, Tensor] = {
            f"{name}.{metric}.{part}": torch.from_numpy(np.asarray(value))
            for name, pair in sums.items() for metric, one in zip(("ne", "auc"), pair, strict=True)
            for part, value in one.state().items()}
        state = {"done": self.done, "file": None if self.at is None else self.at[0],
                 "loader": None if self.at is None else self.at[1].state_dict(), "losses": self.window.losses,
                 "samples": samples, "seconds": self.seconds, "version": self.version}
        save_checkpoint(folder, self.step, self.model, self.optimizer, tensors, state, parts)

    def _due(self) -> bool:
        """Whether who serves is to get weights: by rank 0's clock, and the same on all ranks where they hold parts."""
        due = self.ranks.rank == 0 and time.monotonic() - self.versioned >= self.recipe.version_seconds
        return due if self.tables is None and self.memory is None else self.ranks.any(due)

    def _version(self) -> None:
        """Weights for who serves, behind the rows that were written so far: all ranks together where they hold
        parts."""
        with self.tables.gathered() if self.tables is not None else nullcontext():
            self._write_version()

    def _write_version(self) -> None:
        if self.memory is not None:
            self.memory.fill()
            self.memory.publish()  # not the weights either, where another trainer has taken over
        if self.ranks.rank == 0:
            self.version = save_model(self.run.path, self.model, self.recipe.model, self.recipe.features,
                                      self.recipe.name, self.recipe.keep_versions)
        if self.memory is not None:
            self.memory.publish_model(self.run.path, self.version)
        self.versioned = time.monotonic()

    def close(self) -> None:
        """Publish what is written."""
        if self.sums is not None:
            self.sums.close()
        if self.tables is not None:
            self.tables.close()
        if self.memory is not None:
            self.memory.close()

    def _restore(self) -> None:
        path = latest_checkpoint(self.run.path / "checkpoints")
        assert path is not None
        tensors, state = load_checkpoint(path, self.model, self.optimizer)
        if "done" not in state:
            raise ValueError(f"{self.run.path} was trained in epochs; begin a run that follows from its model instead: "
                             f"--from {self.run.path}")
        if self.memory is not None:
            self.memory.load(path)
        if self.tables is not None:
            self.tables.load(path / "tables")

        def sums(kind: Any, name: str) -> Any:
            return kind.from_state({part.removeprefix(name): value.numpy() for part, value in tensors.items()
                                    if part.startswith(name)})

        self.total = sums(NormalizedEntropy, "total.ne."), sums(AUC, "total.auc.")
        self.window = _Sums(losses=list(state["losses"]))
        if self.ranks.rank == 0:  # what all ranks had counted
            self.window.ne, self.window.auc = sums(NormalizedEntropy, "window.ne."), sums(AUC, "window.auc.")
            self.window.samples = state["samples"]
        self.step = self.saved = state["step"]
        self.seconds, self.version = state["seconds"], state["version"]
        self.done = list(state["done"])
        self.begun = set(self.done)
        if state["file"] is not None:
            self.resumed = state["file"], state["loader"]
        self.curves.forget_after(self.step)
        if self.ranks.rank == 0:
            self.predictions.forget_after(self.step)
