"""``semel plan``: search how to lay a training job over racks, buildings and regions, and explain the result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from semel.planning.explain import Explained
    from semel.planning.options import Options
    from semel.planning.plan import Plan

plan = typer.Typer(no_args_is_help=True, help="Plan once: placement, schedule and network of a training job, "
                   "searched together.")

Cluster = Annotated[str, typer.Option(help="A TOML file, or a ready cluster (semel plan list).")]
Job = Annotated[str, typer.Option(help="A TOML file, or a ready job.")]
Search = Annotated[str | None, typer.Option(help="A TOML file, or a ready search.", show_default="everything, for "
                                                                                                 "time")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@plan.command("list")
def list_ready(as_json: AsJson = False) -> None:
    """The ready clusters, jobs, searches, devices, technologies and measurements."""
    from semel.cli import output
    from semel.planning.files import KINDS, ready

    found = {kind: ready(kind) for kind in KINDS}
    if as_json:
        output.print_json({kind: [{"name": name, "description": text} for name, text in files]
                           for kind, files in found.items()})
        return
    console = output.results()
    for kind, files in found.items():
        table = output.table(kind, ["name", "what it is"], [[name, text] for name, text in files])
        table.columns[1].justify = "left"
        console.print(table)


@plan.command("search")
def search(
    cluster: Cluster,
    job: Job,
    search: Search = None,
    compare: Annotated[bool, typer.Option(help="Run the baselines beside it.")] = True,
    html: Annotated[Path | None, typer.Option(help="Write an interactive page.")] = None,
    trace: Annotated[Path | None,
                     typer.Option(help="Write the winner's step as a Chrome trace (Perfetto opens it).")] = None,
    emit: Annotated[str | None, typer.Option(
        metavar="SYSTEM", help="Write the winner's launch files: torchtitan, megatron, torchrec or semel.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for --emit.")] = Path("launch"),
    as_json: AsJson = False,
) -> None:
    """Search for the best plan and say why it wins, and where it would not."""
    from semel.cli import output
    from semel.planning import load_cluster, load_job, load_search
    from semel.planning.emit import SYSTEMS
    from semel.planning.explain import explain

    if emit is not None and emit not in SYSTEMS:
        raise ValueError(f"--emit {emit}: unknown system; there are: {', '.join(SYSTEMS)}")
    for option, path in (("--html", html), ("--trace", trace)):
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"{option} {path}: there is no folder {path.parent}")
    options = load_search(search)
    with output.progress_bar() as bar:
        found = explain(load_cluster(cluster), load_job(job), options, compare=compare, flip_map=html is not None,
                        progress=output.Steps(bar))
    written = _written(found, html, trace, emit, out)
    if as_json:
        output.print_json({**found.to_json(), "files": [str(path) for path in written]})
        return
    show(found, options)
    for path in written:
        output.results().print(str(path), soft_wrap=True)


def _written(found: Explained, html: Path | None, trace: Path | None, emit: str | None, out: Path) -> list[Path]:
    winner, written = found.plans[0], []
    if emit is not None:
        from semel.planning.emit import emit as launch

        written += launch(winner, emit, out)
    if trace is not None:
        from semel.planning.trace import write_trace

        write_trace(winner.trace(), trace)
        written.append(trace)
    if html is not None:
        from semel.planning.report import write_report

        written.append(write_report(found, html))
    return written


def show(found: Explained, options: Options) -> None:
    """The ranked table and the words, for people."""
    from semel.cli import output

    console = output.results()
    outcome, best = found.outcome, found.plans[0]
    title = (f"{best.job.name} on {best.cluster.name}: {best.layout.devices:,} devices, "
             f"{outcome.nodes:,} layouts estimated, {outcome.simulated} simulated")
    rows = [_row(str(number), each) for number, each in enumerate(found.plans, start=1)]
    rows += [_row(name, each) for name, each in found.baselines.items() if each is not None]
    table = output.table(title, ["", "step", "MFU", "$ a step", "memory", "bubble", "exposed", "plan"], rows)
    table.columns[-1].justify = "left"
    console.print(table)
    for line in found.words:
        console.print(line, markup=False, soft_wrap=True)


def _row(name: str, each: Plan) -> list[str]:
    from semel.planning.explain import duration

    exposed = ", ".join(f"{axis}@{level} {duration(seconds)}" for axis, levels in each.exposed.items()
                        for level, seconds in levels.items() if seconds > 0.005 * each.seconds)
    bubble = sum(seconds for cause, seconds in each.bubble.items() if cause != "exposed communication")
    return [name, duration(each.seconds), f"{each.mfu:.1%}", f"{each.cost:.4g}",
            f"{each.peak_memory / 1e9:.0f} of {each.limit / 1e9:.0f} GB", f"{bubble / each.seconds:.1%}", exposed
            or "-",
            each.title + ("" if each.exact else " (changes the optimization)")]


@plan.command("what-if")
def what_if(
    cluster: Cluster,
    job: Job,
    to_cluster: Annotated[str | None, typer.Option(help="The other cluster.", show_default="the same")] = None,
    to_job: Annotated[str | None, typer.Option(help="The other job.", show_default="the same")] = None,
    search: Search = None,
    as_json: AsJson = False,
) -> None:
    """Compare two clusters or two jobs: the best plan of each, the first one's plan kept on the second, and why."""
    from semel.cli import output
    from semel.planning import load_cluster, load_job, load_search
    from semel.planning.explain import what_if as compare

    if to_cluster is None and to_job is None:
        raise ValueError("nothing differs: give --to-cluster, --to-job, or both")
    options = load_search(search)
    with output.progress_bar() as bar:
        found = compare(load_cluster(cluster), load_job(job), load_cluster(to_cluster or cluster), load_job(to_job
                                                                                                            or job),
                        options, progress=output.Steps(bar))
    if as_json:
        output.print_json(found.to_json())
        return
    console = output.results()
    rows = [_row("now", found.before), *([_row("then, same plan", found.kept)] if found.kept else []),
            _row("then, best plan", found.after)]
    table = output.table(None, ["", "step", "MFU", "$ a step", "memory", "bubble", "exposed", "plan"], rows)
    table.columns[-1].justify = "left"
    console.print(table)
    for line in found.words:
        console.print(line, markup=False, soft_wrap=True)


@plan.command("validate")
def validate(as_json: AsJson = False) -> None:
    """Check the simulator against published measurements: the error of each row, and of each device."""
    from semel.cli import output
    from semel.planning.validate import report

    found = report()
    if as_json:
        output.print_json(found.to_json())
    else:
        output.results().print(found.text(), markup=False, soft_wrap=True, highlight=False)
    if not found.passed:
        raise typer.Exit(1)


@plan.command("calibrate")
def calibrate(
    measured: Annotated[Path, typer.Argument(help="A table of measured times (TOML or CSV), or a torch profiler trace "
                                                  "(JSON).")],
    device: Annotated[str, typer.Option(help="The ready device or TOML file to start from.")],
    out: Annotated[Path | None, typer.Option(help="Write the calibrated device here.", show_default="print it")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit a device's efficiency curves to measurements."""
    from semel.cli import output
    from semel.planning.calibrate import calibrate as fit

    found: Any = fit(measured, device)
    if out is not None:
        out.write_text(found.toml, encoding="utf-8")
    if as_json:
        output.print_json(found.to_json())
    elif out is None:
        output.results().print(found.toml, markup=False, soft_wrap=True)
    else:
        output.results().print(str(out), soft_wrap=True)
