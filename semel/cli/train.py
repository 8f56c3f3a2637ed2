"""``semel train``: a recipe on a store gives a run. Also ``torchrun ... -m semel.cli.train`` on several hosts."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from semel.training import Followed, Follower, Progress, Recipe, Run, Trainer

LINE_EVERY_S = 30.0
"""Between two lines of progress where there is no terminal."""


def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe by name; with --resume it may be left out.")] = None,
    store: Annotated[Path | None, typer.Option(help="The folder of the store.", show_default="./store")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder in which runs are made.", show_default="./runs")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file that overrides fields of the recipe.")] = None,
    assign: Annotated[list[str] | None, typer.Option(
        "--set", metavar="FIELD=VALUE", help="Override one field (epochs=3); may be repeated.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run from its last checkpoint.")] = None,
    nproc: Annotated[int, typer.Option(min=1, help="How many processes on this machine train together.")] = 1,
    follow: Annotated[Path | None, typer.Option(
        help="Train once on each file of request rows in this folder, and wait for more.")] = None,
    start: Annotated[Path | None, typer.Option(
        "--from", help="With --follow: the run whose model is trained on.")] = None,
    until_idle: Annotated[float | None, typer.Option(
        min=0, help="With --follow: end when no file has come for so many seconds.", show_default="never")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a model. Ctrl-C saves a checkpoint to resume from."""
    from semel.cli import output
    from semel.comm.processes import join
    from semel.training import Run

    if follow is None and (start is not None or until_idle is not None):
        raise ValueError("--from and --until-idle belong to --follow FOLDER; leave them out, or name the folder")
    if resume is not None and start is not None:
        raise ValueError("--resume goes on with a run, --from begins a new one from its model; give one of them")
    chosen = choose(recipe, resume or start, store, out, config, assign or [])
    job = Job(chosen, resume, follow, start, until_idle)
    if nproc > 1 and "RANK" in os.environ:
        raise ValueError("torchrun decides how many processes there are (--nproc-per-node); leave --nproc out")
    if nproc > 1:
        run = Run.open(_together(nproc, job))
    elif join().rank:
        _one(job)
        return
    else:
        run = Run.open(_one(job))
    facts = outcome(run) if follow is None else {"run": str(run.path), "recipe": run.recipe.name, **run.summary}
    if as_json:
        output.print_json(facts)
        return
    if follow is not None:
        seen = facts["prequential"]
        quality = ", ".join(f"{name} {seen[name]:.4f}" for name in ("ne", "auc") if seen[name] is not None)
        output.results().print(
            f"{run.path}: {output.count(facts['files'], 'file')}, {output.count(facts['rows'], 'row')}, "
            f"{output.count(facts['steps'], 'step')}; prequential: {quality or 'no labels'}", soft_wrap=True)
        return
    output.results().print(
        f"{run.path}: {output.count(facts['epochs'], 'epoch')}, {output.count(facts['steps'], 'step')} in "
        f"{facts['seconds']:.0f} s; {kept(facts)}", soft_wrap=True)


@dataclass(frozen=True)
class Job:
    """What one process is asked to train."""

    recipe: Recipe
    resume: Path | None
    follow: Path | None
    start: Path | None
    until_idle: float | None


def _one(job: Job) -> str:
    """Train in this process, which may be one of several; the path of the run."""
    from semel.cli import output
    from semel.comm.interface import PeerLost
    from semel.comm.processes import join, leave
    from semel.training import Follower, Trainer

    world = join()
    trainer: Trainer | Follower
    with output.progress_bar() as bar:
        if job.follow is not None:
            trainer = Follower(job.recipe, job.follow, start=job.start,
                               on_progress=ShownFollowing(bar) if world.rank == 0 else None)
        else:
            trainer = Trainer(job.recipe, on_progress=Shown(bar) if world.rank == 0 else None)
        try:
            with _save_on_interrupt(trainer.stop):
                return str(fit(trainer, job.resume, job.until_idle).path)
        except PeerLost as error:
            if "TORCHELASTIC_RUN_ID" not in os.environ:
                raise
            print(f"error: {error}", file=sys.stderr)  # torchrun says which one has ended, and ends the rest
            leave(1)
            raise


def _together(nproc: int, job: Job) -> str:
    """Train in ``nproc`` new processes."""
    from semel.comm.interface import PeerLost
    from semel.comm.processes import ProcessDied, spawn

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # which is handed on

    try:
        with _save_on_interrupt(stop):
            return str(spawn(_one, nproc, job)[0])
    except (ProcessDied, PeerLost) as error:
        where = job.resume or f"RUN of those in {job.recipe.out}"
        print(f"error: {error}; go on from its last checkpoint: semel train --resume {where}",
              file=sys.stderr)
        raise typer.Exit(1) from None


def kept(facts: dict[str, Any]) -> str:
    """Which weights a run kept, in words."""
    figures = ", ".join(f"{name} {value:.4f}" for name, value in facts["validation"].items())
    return f"best on validation: {figures}" if figures else "the last weights are kept, nothing validated them"


def choose(name: str | None, resume: Path | None, store: Path | None, out: Path | None, config: Path | None,
           assign: list[str]) -> Recipe:
    """The recipe that is asked for, with a file's and then the command line's overrides. ValueError for bad ones."""
    from semel import recipes
    from semel.training import Run, override, read_overrides, with_paths

    if resume is not None:
        recipe = Run.open(resume).recipe
        if name not in (None, recipe.name):
            raise ValueError(f"{resume} is a run of {recipe.name}, not of {name}; leave the name out")
    elif name is None:
        raise ValueError(f"name a recipe: {', '.join(recipes.names())}")
    else:
        recipe = recipes.get(name)
    if config is not None:
        recipe = override(recipe, read_overrides(config))
    recipe = override(recipe, dict(assignment(text) for text in assign))
    return with_paths(recipe, store, out)


def fit(trainer: Trainer | Follower, resume: Path | None = None, until_idle: float | None = None) -> Run:
    """``trainer.fit``, where a loss that is not finite is the fault of the settings."""
    from semel.training import Follower

    try:
        return trainer.fit(resume, until_idle) if isinstance(trainer, Follower) else trainer.fit(resume)
    except FloatingPointError as error:
        raise ValueError(str(error)) from error


def outcome(run: Run) -> dict[str, Any]:
    """What ``semel train --json`` prints: where the run is, how it went, and the figures of the weights it kept."""
    summary = run.summary
    score, best = next(iter(summary["best"].items()))
    validations = [line for line in run.metrics if line["kind"] == "validation"]
    last: dict[str, Any] = validations[-1] if validations else {"epoch": summary["epochs"]}
    chosen = next((line for line in validations if line[score] == best), last)
    figures = {name: value for name, value in chosen.items() if name not in ("kind", "step", "epoch")}
    return {"run": str(run.path), "recipe": run.recipe.name, **summary, "kept_epoch": chosen["epoch"],
            "validation": figures}


class Lines:
    """Progress in plain lines, where there is no terminal to draw a bar on: the first that is said, and then the next
    one after ``LINE_EVERY_S``. On a terminal nothing."""

    def __init__(self, bar: Bar, indent: str = "") -> None:
        self._bar, self._indent = bar, indent
        self._said: float | None = None

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._bar.disable and (self._said is None or now - self._said >= LINE_EVERY_S):
            self._bar.console.print(self._indent + text, style="dim", markup=False, soft_wrap=True)
            self._said = now


class Shown:
    """Shows a trainer's progress: a bar where there is a terminal, a line now and then where there is none, and one for
    each validation anywhere."""

    def __init__(self, bar: Bar, indent: str = "") -> None:
        self._bar, self._indent, self._say = bar, indent, Lines(bar, indent)
        self._task = bar.add_task("train", total=None, detail="")
        self._validation: dict[str, float] = {}

    def __call__(self, now: Progress) -> None:
        from semel.training.timeline import short

        self._bar.update(
            self._task, completed=now.step, total=now.steps, description=f"epoch {now.epoch + 1} of {now.epochs}",
            detail=f"loss {now.loss:.4f}  {now.samples_per_s:,.0f} samples/s  {short(now.seconds)}")
        if now.validation and now.validation != self._validation:
            figures = ", ".join(f"{name} {value:.4f}" for name, value in now.validation.items())
            text = f"{self._indent}after epoch {now.epoch}: loss {now.loss:.4f}, {figures}"
            self._bar.console.print(text, style="dim", soft_wrap=True)
            self._validation = dict(now.validation)
        self._say(f"epoch {now.epoch + 1} of {now.epochs}, step {now.step:,} of {now.steps:,}: loss {now.loss:.4f}, "
                  f"{now.samples_per_s:,.0f} samples/s")


class ShownFollowing:
    """The same for a follower: how good the model was at what it had not seen."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._say = bar, Lines(bar)
        self._task = bar.add_task("follow", total=None, detail="")

    def __call__(self, now: Followed) -> None:
        from semel.training.timeline import short

        self._bar.update(
            self._task, completed=now.step, description=now.file,
            detail=f"NE {now.window_ne:.4f} (so far {now.ne:.4f})  AUC {now.window_auc:.4f}  {now.rows:,} rows  "
                   f"{now.waiting} files wait  {short(now.seconds)}")
        self._say(f"{now.file}, step {now.step:,}: loss {now.loss:.4f}, NE {now.window_ne:.4f} (so far {now.ne:.4f}), "
                  f"{now.samples_per_s:,.0f} samples/s, {now.waiting} files wait")


def assignment(text: str) -> tuple[str, str]:
    """A field and its value, of ``--set FIELD=VALUE``."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"--set {text!r}: say FIELD=VALUE, as in --set epochs=3")
    return name.strip(), value.strip()


@contextmanager
def _save_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Within the block the first Ctrl-C calls ``stop``, which lets a trainer save; a second one ends at once."""
    from semel.cli import output
    from semel.cli.errors import INTERRUPTED
    from semel.training import Interrupted

    before = signal.getsignal(signal.SIGINT)

    def save(*_: Any) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    signal.signal(signal.SIGINT, save)
    try:
        yield
    except Interrupted as error:
        output.remark(str(error))
        raise typer.Exit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    from semel.cli import app

    app(["train", *sys.argv[1:]], prog_name="semel")
