"""The ``semel`` command: one file a verb. Verbs import what they need when they run, so that ``--help`` is instant."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from semel.cli import (
    compact,
    demo,
    erase,
    evaluate,
    export,
    info,
    ingest,
    models,
    replay,
    report,
    serve,
    shadow,
    skew,
    train,
)
from semel.cli.errors import Verbs

# ``torchrun -m semel.cli.train``: that the package knows the module already is no news to anybody.
warnings.filterwarnings("ignore", "'semel.cli.train' found in sys.modules", RuntimeWarning)

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Sequence recommenders from event to score, in which each thing is done once. Start with: semel demo",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from semel import __version__

        typer.echo(f"semel {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option(help="Show where an error was raised, not only its line.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    context.find_root().meta["traceback"] = traceback


app.command("demo")(demo.demo)
app.command("ingest")(ingest.ingest)
app.command("compact")(compact.compact)
app.command("erase")(erase.erase)
app.command("export")(export.export)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("shadow")(shadow.shadow)
app.command("serve")(serve.serve)
app.command("models")(models.models)
app.command("rollback")(models.rollback)
app.command("replay")(replay.replay)
app.command("skew")(skew.skew)
app.command("report")(report.report)
app.command("info")(info.info)


def main() -> None:
    """The entry point of the installed command."""
    app(prog_name="semel")
