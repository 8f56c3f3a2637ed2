"""The trainer: one plain loop over an objective's batches, with curves, checkpoints and early stopping."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semel.models import save_model
from semel.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from semel.training.objectives import Objective, make_objective
from semel.training.pieces import Workers
from semel.training.recipe import OptimizerConfig, Recipe
from semel.training.run import Run

LOG_EVERY = 20


@dataclass(frozen=True)
class Progress:
    """Told to ``Trainer(on_progress=...)`` every LOG_EVERY steps and at the end of an epoch.

    ``step`` of ``steps``, ``epoch`` of ``epochs`` (from 0);
    ``samples_per_s``: labelled candidates (ranking) or events (next item) since the last report; ``wait_s``: time the
    loop has waited for data so far; ``validation``: the latest figures, empty before the first."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    samples_per_s: float
    wait_s: float
    validation: dict[str, float]


class Interrupted(RuntimeError):
    """Training was told to stop (SIGTERM, or ``Trainer.stop``) and saved a checkpoint to resume from."""


class Trainer:
    """``Trainer(recipe).fit() -> Run``. The same recipe, data and number of threads give the same losses.

    ``on_progress`` is called now and then with a ``Progress``, in the training thread.
    """

    def __init__(self, recipe: Recipe, on_progress: Callable[[Progress], None] | None = None) -> None:
        self.recipe = recipe
        self.on_progress = on_progress
        self._stop = threading.Event()

    def stop(self) -> None:
        """Save after the current step and leave ``fit`` with ``Interrupted``. Safe from a signal handler or thread."""
        self._stop.set()

    def fit(self, resume: str | Path | None = None) -> Run:
        """Train, in a new folder ``OUT/NAME-TIME`` or from the last checkpoint of the run ``resume``.

        A resumed run goes through the same losses as one that was never interrupted. Raises FileNotFoundError or
        ValueError for missing or unfit data, ``FloatingPointError`` for a loss that is not finite (naming the step and
        its requests), ``Interrupted`` after ``stop`` or SIGTERM.
        """
        recipe = self.recipe
        self._stop.clear()
        if resume is not None:
            run = Run.open(resume)
            different = [name for name, value in run.recipe.to_json().items()
                         if name not in ("out", "epochs", "store") and value != recipe.to_json()[name]]
            if different:
                raise ValueError(f"{resume} was trained with another {different[0]!r}; resume it with its own recipe")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            objective = make_objective(recipe)
            try:
                model = objective.make_model()
                if resume is None:
                    run = Run(_new_folder(recipe), recipe)
                    (run.path / "recipe.json").write_text(json.dumps(recipe.to_json(), indent=1))
                with _OnSigterm(self.stop):
                    _Loop(self, run, objective, model).go(resume is not None)
            finally:
                objective.close()
        return run


class _Loop:
    """The state of one ``fit``."""

    def __init__(self, trainer: Trainer, run: Run, objective: Objective, model: Any) -> None:
        self.trainer, self.recipe, self.run, self.objective, self.model = trainer, trainer.recipe, run, objective, model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        config = self.recipe.optimizer
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.learning_rate,
                                           betas=(config.beta1, config.beta2), weight_decay=config.weight_decay)
        self.step = 0
        self.epoch = 0
        self.best: float | None = None
        self.since_best = 0
        self.validation: dict[str, float] = {}
        self.version = ""
        self.seconds = 0.0

    def go(self, resume: bool) -> None:
        if resume:
            self._restore()
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self.run.path / "tensorboard"))
        with open(self.run.path / "metrics.jsonl", "a") as self.log:
            self.writer = writer
            try:
                stopped_early = self.since_best >= self.recipe.patience
                while self.epoch < self.recipe.epochs and not stopped_early:
                    self._train_epoch()
                    last = self.epoch == self.recipe.epochs
                    if self.epoch % self.recipe.validate_every == 0 or last:
                        stopped_early = self._validate()
                    self._save()
            finally:
                writer.close()
        (self.run.path / "run.json").write_text(json.dumps({
            "model_version": self.version, "epochs": self.epoch, "steps": self.step, "seconds": self.seconds,
            "stopped_early": stopped_early, "best": {self.objective.score: self.best},
            "wait_seconds": self.objective.loader.wait_seconds, "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }, indent=1))

    def _train_epoch(self) -> None:
        loader, recipe = self.objective.loader, self.recipe
        loader.set_epoch(self.epoch)
        self.model.train()
        steps = len(loader)
        total = steps * recipe.epochs
        window: list[Tensor] = []
        samples, since = 0, time.perf_counter()
        with Workers(recipe.pieces, recipe.seed) as workers:
            for batch in loader:
                window.append(self._step(workers, batch, total))
                samples += self.objective.samples(batch)
                if self.step % LOG_EVERY == 0 or self.step % steps == 0:
                    now = time.perf_counter()
                    mean = float(torch.stack(window).mean())
                    rate = samples / (now - since)
                    self.seconds += now - since
                    self._record({"kind": "train", "step": self.step, "epoch": self.epoch, "loss": mean,
                                  "samples_per_s": rate, "wait_s": loader.wait_seconds})
                    if self.trainer.on_progress is not None:
                        self.trainer.on_progress(Progress(self.step, total, self.epoch, recipe.epochs, mean, rate,
                                                          loader.wait_seconds, dict(self.validation)))
                    window, samples, since = [], 0, now
                if self.trainer._stop.is_set() or self.step % recipe.checkpoint_steps == 0:
                    self._save()
                if self.trainer._stop.is_set():
                    raise Interrupted(f"stopped at step {self.step}; resume {self.run.path} to go on")
        self.epoch += 1

    def _step(self, workers: Workers, batch: Any, total: int) -> Tensor:
        config = self.recipe.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * rate_at(config, self.step, total)
        pieces = self.objective.split(batch, self.recipe.pieces)
        loss = workers.gradients(self.parameters, pieces, self.step,
                                 lambda piece, source: self.objective.loss(self.model, piece, source))
        if not torch.isfinite(loss):
            requests = getattr(batch, "request_id", None)
            some = "" if requests is None else f"; its requests: {', '.join(map(str, requests[:5]))} ..."
            raise FloatingPointError(f"the loss is {float(loss)} at step {self.step}{some}; lower "
                                     f"optimizer.learning_rate or look at these requests' features")
        if config.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.parameters, config.clip_norm)
        self.optimizer.step()
        self.step += 1
        return loss

    def _validate(self) -> bool:
        """Judge the model; keep it if it is the best so far, or if nothing judges it. True if patience is at its
        end."""
        self.model.eval()
        with torch.inference_mode():
            self.validation = dict(self.objective.validate(self.model))
        score = self.validation.get(self.objective.score)
        if score is not None:
            self._record({"kind": "validation", "step": self.step, "epoch": self.epoch, **self.validation})
        if score is None or self.best is None or (score < self.best if self.objective.smaller else score > self.best):
            self.best, self.since_best = score, 0
            self.version = save_model(self.run.path, self.model, self.recipe.model, self.recipe.features,
                                      self.recipe.name)
        else:
            self.since_best += 1
        return self.since_best >= self.recipe.patience

    def _record(self, line: dict[str, Any]) -> None:
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()
        for name, value in line.items():
            if name not in ("kind", "step", "epoch"):
                self.writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])

    def _save(self) -> None:
        generators = {"torch": torch.get_rng_state()}
        state = {"epoch": self.epoch, "loader": self.objective.loader.state_dict(), "best": self.best,
                 "since_best": self.since_best, "validation": self.validation, "version": self.version,
                 "seconds": self.seconds}
        save_checkpoint(self.run.path / "checkpoints", self.step, self.model, self.optimizer, generators, state)

    def _restore(self) -> None:
        path = latest_checkpoint(self.run.path / "checkpoints")
        if path is None:
            raise FileNotFoundError(f"{self.run.path} has no checkpoint to resume from; train it anew")
        generators, state = load_checkpoint(path, self.model, self.optimizer)
        torch.set_rng_state(generators["torch"])
        self.objective.loader.load_state_dict(state["loader"])
        self.step, self.epoch = state["step"], state["epoch"]
        self.best, self.since_best = state["best"], state["since_best"]
        self.validation, self.version, self.seconds = state["validation"], state["version"], state["seconds"]
        # Lines written after the checkpoint belong to steps that are taken again.
        kept = [line for line in self.run.metrics if line["step"] <= self.step]
        (self.run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))


def rate_at(config: OptimizerConfig, step: int, total: int) -> float:
    """The share of the learning rate at a step (from 0) of ``total``: warm-up, then constant or linear to zero."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "linear":
        return warm * max(0.0, 1.0 - step / max(total, 1))
    return warm


def _new_folder(recipe: Recipe) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    for attempt in range(1000):
        path = Path(recipe.out) / (f"{recipe.name}-{stamp}" + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise FileExistsError(f"{recipe.out} is full of runs of {recipe.name} of this second")


class _OnSigterm:
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
