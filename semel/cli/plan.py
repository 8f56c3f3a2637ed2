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
    from semel.planning.emit import runnable
    from semel.planning.explain import explain

    for option, path in (("--html", html), ("--trace", trace)):
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"{option} {path}: there is no folder {path.parent}")
    place, work, options = load_cluster(cluster), load_job(job), load_search(search)
    if emit is not None:
        options = runnable(emit, work, options)
    with output.progress_bar() as bar:
        found = explain(place, work, options, compare=compare, flip_map=html is not None,
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
        from semel.planning.trace import write_chrome_trace

        write_chrome_trace(winner.trace(), trace)
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
    named = {str(number): each for number, each in enumerate(found.plans, start=1)}
    named |= {name: each for name, each in found.baselines.items() if each is not None}
    _table(console, title, named)
    for line in found.words:
        console.print(line, markup=False, soft_wrap=True)


COLUMNS = ("", "step", "MFU", "$ a step", "GB", "bubble", "exposed")


def _table(console: Any, title: str | None, plans: dict[str, Plan]) -> None:
    """The numbers of some plans, and below, what each is and which communication a device waits for."""
    from semel.cli import output

    console.print(output.table(title, COLUMNS, [_row(name, each) for name, each in plans.items()]))
    width = max(map(len, plans))
    for name, each in plans.items():
        console.print(f"{name:<{width}}  {each.title}" + ("" if each.exact else " (changes the optimization)"),
                      markup=False, soft_wrap=True)
        console.print(f"{'':<{width}}  exposed communication: {_exposed(each)}", markup=False, soft_wrap=True)


def _row(name: str, each: Plan) -> list[str]:
    from semel.planning.explain import duration

    exposed = sum(seconds for levels in each.exposed.values() for seconds in levels.values())
    bubble = max(0.0, sum(seconds for cause, seconds in each.bubble.items() if cause != "exposed communication"))
    return [name, duration(each.seconds), f"{each.mfu:.1%}", f"{each.cost:.4g}",
            f"{each.peak_memory / 1e9:.0f} of {each.limit / 1e9:.0f}", f"{bubble / each.seconds:.1%}",
            f"{exposed / each.seconds:.1%}"]


def _exposed(each: Plan) -> str:
    """Axis by axis and level by level, the most first: "tp at host 4.9%, dp at rack 1.2%"; what is below 0.1 % is left
    out."""
    found = {f"{axis} at {level}": seconds / each.seconds for axis, levels in each.exposed.items()
             for level, seconds in levels.items() if seconds > 0.001 * each.seconds}
    return ", ".join(f"{where} {share:.1%}" for where, share in sorted(
        found.items(), key=lambda item: -item[1])) or "none"


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
    _table(console, None, {"now": found.before, **({"then, same plan": found.kept} if found.kept else {}),
                           "then, best plan": found.after})
    for line in found.words:
        console.print(line, markup=False, soft_wrap=True)


@plan.command("validate")
def validate(
    only: Annotated[list[str] | None, typer.Argument(
        help="Measurement files, or ready ones by name.", show_default="all ready ones")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict published step times, and print the error of each row and of each device."""
    from dataclasses import asdict

    from semel.cli import output
    from semel.planning.explain import duration
    from semel.planning.units import text
    from semel.planning.validate import validate as check

    found = check(only or None)
    if as_json:
        output.print_json({
            "rows": [{"name": row.measurement.name, "device": row.measurement.device, "source": row.measurement.source,
                      "measured": row.measurement.seconds, "predicted": row.seconds, "error": row.error,
                      "mfu": row.mfu, "counted": row.measurement.counted, "fitted": row.measurement.fitted,
                      "memory": row.memory, "memory_limit": row.limit,
                      "assumed": row.measurement.assumed, "note": row.measurement.note} for row in found.rows],
            "devices": [asdict(each) for each in found.summary], "by_dtype": [asdict(each) for each in found.by_dtype]})
        return
    console = output.results()
    few = {each.device for each in found.summary if not each.counted}
    rows = [[row.measurement.name, row.measurement.device, duration(row.measurement.seconds), duration(row.seconds),
             f"{row.error:+.1%}", f"{row.memory / 2**30:.0f}",
             "shown only" if row.measurement.device in few or not row.measurement.counted
             else "fitted" if row.measurement.fitted else ""]
            for row in found.rows]
    console.print(output.table("published step times", ["", "device", "measured", "predicted", "error", "GiB", ""],
                               rows))
    rows = [[f"{each.device} {each.dtype}", str(each.rows), *(f"{share:.1%}" if each.rows else "-" for share in (
        each.mean, each.worst, each.plain_mean, each.plain_worst)), "" if each.counted else "too few rows to count"]
            for each in (*found.summary, *found.by_dtype)]
    console.print(output.table("by device, over rows that nothing was fitted on",
                               ["", "rows", "mean error", "worst", "unfitted mean", "unfitted worst", ""], rows))
    for row in found.refused:
        console.print(f"{row.measurement.name} ran, but would be refused: over by "
                      f"{text(row.memory - row.limit, 'size')} of {text(row.limit, 'size')}", markup=False,
                      soft_wrap=True)
    for row in found.rows:
        if row.measurement.note:
            console.print(f"{row.measurement.name}: {row.measurement.note}", markup=False, soft_wrap=True)


@plan.command("calibrate")
def calibrate(
    measured: Annotated[Path, typer.Argument(
        help="A CSV of measured operations, or a torch profiler trace (.json, .json.gz).")],
    device: Annotated[str | None, typer.Option(help="The ready device, or TOML file, to start from.")] = None,
    link: Annotated[str | None, typer.Option(
        help='In place of a device: the bandwidth that collectives were measured over ("400 Gbit/s").')] = None,
    out: Annotated[Path | None, typer.Option(help="Write the file here.", show_default="print it")] = None,
) -> None:
    """Fit efficiency curves to measured operations: a device file, or the line `messages` for a level of a cluster."""
    from semel.planning.calibrate import calibrated, device_toml, level_toml, read_table, read_trace
    from semel.planning.load import load_device
    from semel.planning.units import parse

    if (device is None) == (link is None):
        raise ValueError("give --device, to fit a device's curves, or --link, to fit a level's")
    if out is not None and not out.parent.is_dir():
        raise FileNotFoundError(f"--out {out}: there is no folder {out.parent}")
    samples = read_trace(measured) if measured.name.endswith((".json", ".json.gz")) else read_table(measured)
    source = f"{len(samples)} operations of {measured.name}"
    if link is not None:
        bandwidth = parse(link, "bandwidth", "--link")
        if not bandwidth > 0:
            raise ValueError(f"--link {link}: must be above 0")
        text = level_toml(samples, bandwidth, source)
    else:
        assert device is not None
        start = load_device(device)
        text = device_toml(calibrated(start, samples), source, start)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        typer.echo(str(out))
