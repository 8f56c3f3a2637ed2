"""The trainer: a loop over an objective's batches, with curves, checkpoints and early stopping."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semel.models import save_model
from semel.training import loops
from semel.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from semel.training.curves import Curves
from semel.training.gradients import gradient_sums
from semel.training.memory import memory_writer
from semel.training.objectives import Objective, make_objective
from semel.training.pieces import Workers
from semel.training.ranks import Ranks
from semel.training.recipe import Recipe
from semel.training.run import Run
from semel.training.sharded import sharded_tables
from semel.training.stages import Exchange, StepStages, Work, updates, works
from semel.training.timeline import Timeline
from semel.training.tuning import GIVEN, Tuning, check_costs

LOG_EVERY = 20


@dataclass(frozen=True)
class Progress:
    """Told to ``Trainer(on_progress=...)`` every LOG_EVERY steps and at the end of an epoch, on rank 0.

    ``step`` of about ``steps``, ``epoch`` of ``epochs`` (from 0);
    ``samples_per_s``: labelled candidates (ranking) or events (next item) since the last report; ``wait_s``: time the
    loop has waited for data so far; ``validation``: the latest figures, empty before the first; ``seconds``: a step's
    since the last report, by stage and bubble (``semel.training.timeline``)."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    samples_per_s: float
    wait_s: float
    validation: dict[str, float]
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Interrupted(RuntimeError):
    """Training was told to stop (SIGTERM, or ``Trainer.stop``) and saved a checkpoint to resume from."""


class Trainer:
    """``Trainer(recipe).fit() -> Run``. The same recipe and data give the same losses, however many threads there are,
    and ranks up to the order in which floats are summed.

    Where torch.distributed is initialized, all its ranks call ``fit``, and rank 0 writes the run's folder, which all of
    them see. ``on_progress`` is called now and then with a ``Progress``, in the training thread.
    """

    def __init__(self, recipe: Recipe, on_progress: Callable[[Progress], None] | None = None) -> None:
        self.recipe = recipe
        self.on_progress = on_progress
        self._stop = threading.Event()

    def stop(self) -> None:
        """Save after the current step and leave ``fit`` with ``Interrupted``, on all ranks. Safe from a signal handler
        or thread."""
        self._stop.set()

    def fit(self, resume: str | Path | None = None) -> Run:
        """Train, in a new folder ``OUT/NAME-TIME`` or from the last checkpoint of the run ``resume``.

        A resumed run goes through the same losses as one that was never interrupted. Raises FileNotFoundError or
        ValueError for missing or unfit data, ``FloatingPointError`` for a loss that is not finite (naming the step and
        its requests), ``Interrupted`` after ``stop`` or SIGTERM, ``PeerLost`` where another rank has ended.
        """
        recipe = self.recipe
        self._stop.clear()
        check_costs(recipe)
        if resume is not None:
            run = Run.open(resume)
            free = ("out", "epochs", "store", "overlap", "memory", "keep_versions", "version_seconds")
            different = [name for name, value in run.recipe.to_json().items()
                         if name not in free and value != recipe.to_json()[name]]
            if different:
                raise ValueError(f"{resume} was trained with another {different[0]!r}; resume it with its own recipe")
        ranks = Ranks()
        with torch.random.fork_rng(devices=[]), OnSigterm(self.stop):
            torch.manual_seed(recipe.seed)
            objective = ranks.in_turn(lambda: make_objective(recipe, ranks))
            try:
                model = ranks.at_once(objective.make_model)
                if resume is None:
                    run = Run(Path(ranks.first(lambda: str(new_run(recipe)))), recipe)
                _Loop(self, run, objective, model, ranks).go(resume is not None)
            finally:
                objective.close()
        return run


class _Loop:
    """The state of one ``fit``."""

    def __init__(self, trainer: Trainer, run: Run, objective: Objective, model: Any, ranks: Ranks,
                 exchange: Exchange | None = None) -> None:
        self.trainer, self.recipe, self.run, self.objective, self.model = trainer, trainer.recipe, run, objective, model
        self.ranks, self.exchange = ranks, exchange
        self.timeline = Timeline(ranks.rank)
        self.tables = sharded_tables(model, self.recipe, self.timeline)
        config = self.recipe.optimizer
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=config.learning_rate,
                                           betas=(config.beta1, config.beta2), weight_decay=config.weight_decay)
        self.tuning = Tuning(self.recipe, run.path, ranks)
        self.sums = gradient_sums(self.optimizer, ranks, self.timeline)
        self.memory = memory_writer(model, self.recipe, run.path, ranks, objective.catalogue)
        self.step = 0
        self.epoch = 0
        self.best: float | None = None
        self.since_best = 0
        self.validation: dict[str, float] = {}
        self.version = ""
        self.seconds = 0.0

    @property
    def chief(self) -> bool:
        """Whether this rank is the one that writes."""
        return self.ranks.rank == 0

    def go(self, resume: bool) -> None:
        with Curves(self.run, self.ranks) as self.curves, closing(self.tables) if self.tables else nullcontext(), \
                closing(self.sums) if self.sums else nullcontext():
            if resume:
                self._restore()
            stopped_early = self.since_best >= self.recipe.patience
            while self.epoch < self.recipe.epochs and not stopped_early:
                self._train_epoch()
                last = self.epoch == self.recipe.epochs
                if self.epoch % self.recipe.validate_every == 0 or last:
                    stopped_early = self._validate()
                self._save()
                self.curves.trace(self.timeline)
        if self.chief:
            (self.run.path / "run.json").write_text(json.dumps({
                "model_version": self.version, "epochs": self.epoch, "steps": self.step, "seconds": self.seconds,
                "stopped_early": stopped_early, "best": {self.objective.score: self.best},
                "wait_seconds": self._waited(), "threads": torch.get_num_threads(), "ranks": self.ranks.world_size,
                "parameters": sum(p.numel() for p in self.model.parameters())
                + (self.tables.parameters if self.tables else 0),
            }, indent=1))

    def _train_epoch(self) -> None:
        loader, recipe = self.objective.loader, self.recipe
        loader.set_epoch(self.epoch)
        before = self.epoch * len(loader) + len(loader) - len(loader.upcoming())
        span = before, len(loader) * recipe.epochs
        ends = self.step + len(updates(loader, recipe.accumulate_tokens, *span))
        total = ends + (recipe.epochs - self.epoch - 1) * max(ends - self.step, 1)
        lengths = np.concatenate([loader.costs(batch) for batch in loader.upcoming()[:1]] or [np.empty(0, np.int64)])
        window: list[Tensor] = []
        samples, since = 0, time.perf_counter()
        with Workers(-(-recipe.pieces // self.ranks.world_size), recipe.seed) as workers:
            step = StepStages(recipe, self.objective, self.model, self.optimizer, workers, self.ranks, self.timeline,
                              self.trainer._stop.is_set, self.exchange, self.tables, memory=self.memory,
                              tuning=self.tuning, under_backward=self.sums)
            step.step = self.step

            def metrics(work: Work) -> None:
                nonlocal window, samples, since
                samples += self.objective.samples(work.batch)
                if not work.last:
                    return
                self.step = step.step
                assert work.update.loss is not None
                window.append(work.update.loss)
                self.timeline.end_step()
                if self.step % LOG_EVERY == 0 or self.step == ends:
                    now = time.perf_counter()
                    rate = float(self.ranks.sum([samples])[0]) / (now - since)
                    self.seconds += now - since
                    self._report(float(torch.stack(window).mean()), rate, total)
                    window, samples, since = [], 0, now

            stages = [*step.stages(), loops.Stage("metrics", metrics)]
            items = works(loader, recipe.accumulate_tokens, *span)
            loop = loops.overlapped(stages, items, self.timeline, meet=self.tables.meet if self.tables else None) \
                if recipe.overlap else loops.plain(stages, items, self.timeline)
            with closing(loop) as done:
                for work in done:
                    if not work.last:
                        continue
                    for _ in work.update.batches:
                        loader.took()
                    stop = step.stopping
                    if self.step == ends or self.ranks.world_size == 1:  # not only at the next update
                        stop = self.ranks.any(self.trainer._stop.is_set())
                    if stop or self.step % recipe.checkpoint_steps == 0:
                        self._save()
                    if stop:
                        self.curves.trace(self.timeline)
                        raise Interrupted(f"stopped at step {self.step}; resume {self.run.path} to go on")
            if self.ranks.world_size > 1 or recipe.costs != GIVEN:
                self.curves.record({"kind": "balance", "step": self.step, "epoch": self.epoch,
                                    **self.tuning.learn(self.epoch, step.observed, lengths)})
        self.epoch += 1

    def _report(self, loss: float, rate: float, total: int) -> None:
        if not self.chief:
            self.timeline.means()
            return
        seconds = self.timeline.means()
        self.curves.record({"kind": "train", "step": self.step, "epoch": self.epoch, "loss": loss,
                            "samples_per_s": rate, "wait_s": self._waited(), "seconds": seconds,
                            **(self.tables.report() if self.tables else {})})
        if self.trainer.on_progress is not None:
            self.trainer.on_progress(Progress(self.step, total, self.epoch, self.recipe.epochs, loss, rate,
                                              self._waited(), dict(self.validation), seconds))

    def _waited(self) -> float:
        """Seconds without a batch to compute: for the threads that prepare them, or preparing them in this one."""
        names = ("input",) if self.recipe.overlap else ("read", "exchange", "materialize")
        return sum(self.timeline.totals[name] for name in names)

    def _validate(self) -> bool:
        """Judge the model; keep it if it is the best so far, or if nothing judges it. True if patience is at its
        end."""
        self.model.eval()
        with torch.inference_mode(), self.tables.judged() if self.tables else nullcontext(self.model) as model:
            self.validation = dict(self.objective.validate(model))
        score = self.validation.get(self.objective.score)
        if score is not None:
            self.curves.record({"kind": "validation", "step": self.step, "epoch": self.epoch, **self.validation})
        if score is None or self.best is None or (score < self.best if self.objective.smaller else score > self.best):
            self.best, self.since_best = score, 0
            if self.memory is not None:  # rows and weights of one step: what is served is what was judged
                self.memory.fill()
                self.memory.publish()
            with self.tables.gathered() if self.tables else nullcontext():
                if self.chief:
                    self.version = save_model(self.run.path, self.model, self.recipe.model, self.recipe.features,
                                              self.recipe.name, self.recipe.keep_versions)
            if self.memory is not None:
                self.memory.publish_model(self.run.path, self.version)
        else:
            self.since_best += 1
        return self.since_best >= self.recipe.patience

    def _save(self) -> None:
        folder = self.run.path / "checkpoints"
        parts: dict[str, Path] = {}
        for name, part in (("tables", self.tables), ("memory", self.memory)):
            if part is not None:
                parts[name] = folder / f".{name}"
                part.save(parts[name])
        if not self.chief:
            return
        generators = {"torch": torch.get_rng_state()}
        state = {"epoch": self.epoch, "loader": self.objective.loader.state_dict(), "best": self.best,
                 "since_best": self.since_best, "validation": self.validation, "version": self.version,
                 "seconds": self.seconds}
        save_checkpoint(folder, self.step, self.model, self.optimizer, generators, state, parts)

    def _restore(self) -> None:
        path = latest_checkpoint(self.run.path / "checkpoints")
        if path is None:
            raise FileNotFoundError(f"{self.run.path} has no checkpoint to resume from; train it anew")
        generators, state = load_checkpoint(path, self.model, self.optimizer)
        if self.tables is not None:
            self.tables.load(path / "tables")
        if self.memory is not None:
            self.memory.load(path)
        torch.set_rng_state(generators["torch"])
        self.objective.loader.load_state_dict(state["loader"])
        self.step, self.epoch = state["step"], state["epoch"]
        self.best, self.since_best = state["best"], state["since_best"]
        self.validation, self.version, self.seconds = state["validation"], state["version"], state["seconds"]
        self.curves.forget_after(self.step)
        self.tuning.restore(self.epoch)


def new_run(recipe: Recipe) -> Path:
    """A new folder ``OUT/NAME-TIME`` that holds the recipe."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    for attempt in range(1000):
        path = Path(recipe.out) / (f"{recipe.name}-{stamp}" + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        (path / "recipe.json").write_text(json.dumps(recipe.to_json(), indent=1))
        return path
    raise FileExistsError(f"{recipe.out} is full of runs of {recipe.name} of this second")


class OnSigterm:
    """Within the block SIGTERM calls ``function`` (in the main thread only; elsewhere signals cannot be set)."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def __enter__(self) -> None:
        self.old: Any = None
        if threading.current_thread() is threading.main_thread():
            self.old = signal.signal(signal.SIGTERM, lambda *_: self.function())

    def __exit__(self, *_: Any) -> None:
        if self.old is not None:
            signal.signal(signal.SIGTERM, self.old)


def with_paths(recipe: Recipe, store: str | Path | None = None, out: str | Path | None = None) -> Recipe:
    """``recipe`` on another store or with another folder for its runs."""
    changes = {name: str(value) for name, value in (("store", store), ("out", out)) if value is not None}
    return dataclasses.replace(recipe, **changes)  # type: ignore[arg-type]
