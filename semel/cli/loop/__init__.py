"""``semel loop``: requests, joined outcomes, training and fresh weights as a system that runs, seen from a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from semel.loop import Loop

RECIPES = {None: "site_rank", "ml-1m": "ml1m_rank"}


def loop(
    recipe: Annotated[str | None, typer.Argument(
        help="A ranking recipe by name.", show_default="site_rank, ml1m_rank for ml-1m")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="The users of a simulated site, whose best reachable NE "
                                                              "is known.")] = False,
    data: Annotated[str | None, typer.Option(help="Replay the events of this data set by time: a name (ml-1m), or a "
                                                  "folder or file as semel ingest takes it.")] = None,
    folder: Annotated[Path, typer.Option("--dir", help="The loop's folder; one that is there is gone on with.")] = Path(
        "semel-loop"),
    speedup: Annotated[float, typer.Option(help="Seconds of the site's time in one second.")] = 600.0,
    rate: Annotated[float, typer.Option(help="Requests a second of the simulated site.")] = 20.0,
    users: Annotated[int, typer.Option(help="Users of the simulated site.")] = 600,
    window: Annotated[float, typer.Option(help="Seconds in which an outcome counts.")] = 15.0,
    retention: Annotated[str, typer.Option(help="For how long what was served can be computed again (24h, 7d); what is "
                                                "older and needed no more is removed. 0: nothing is.")] = "24h",
    seed: Annotated[int, typer.Option(help="Of the simulated site.")] = 0,
    assign: Annotated[list[str] | None, typer.Option(
        "--set", metavar="FIELD=VALUE", help="Override one field of the recipe; may be repeated.")] = None,
    duration: Annotated[float | None, typer.Option(
        help="Seconds to run, from the first answered request on.", show_default="until Ctrl-C")] = None,
    chaos: Annotated[float | None, typer.Option(
        help="Kill one process after the other, one in so many seconds.", show_default="never")] = None,
    port: Annotated[int, typer.Option(help="Of the server; 0 takes a free one.")] = 0,
    metrics_port: Annotated[int, typer.Option(help="Of the loop's own /metrics; 0 takes a free one.")] = 0,
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="At the end, look for what was lost and replay "
                                                                     "all that was served.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Run the whole loop live, until Ctrl-C: serve, join, train, and serve what was learnt."""
    from semel.cli import output
    from semel.cli.loop import closing
    from semel.cli.loop.dashboard import Dashboard
    from semel.cli.train import assignment
    from semel.history.durations import microseconds
    from semel.loop import Loop, LoopConfig

    if simulate == (data is not None):
        raise ValueError("say whose requests to send: --simulate, or --data ml-1m (one of them)")
    if recipe is None and data not in RECIPES:
        raise ValueError(f"name a recipe that fits {data}: semel loop RECIPE --data {data}")
    config = LoopConfig(recipe=recipe or RECIPES[data], data=data, speedup=speedup, rate=rate, users=users,
                        window=window, seed=seed,
                        retention=0.0 if retention == "0" else microseconds(retention, "--retention") / 1e6,
                        assign=tuple(assignment(text) for text in assign or []))
    with Dashboard(output.remarks(), config) as dashboard:
        live = Loop(config, folder, port=port, metrics_port=metrics_port, chaos=chaos, say=dashboard.say)
        last = _run(live, duration, dashboard)
    result = closing.result(live, last, check)
    if as_json:
        output.print_json(result)
    else:
        closing.show(live, result)
    if check and last and not result["verification"]["good"]:
        output.remarks().print("[red]something was lost, done twice, or cannot be computed again[/red]")
        raise typer.Exit(1)


def _run(live: Loop, duration: float | None, dashboard: Any) -> dict[str, Any]:
    import sys

    try:
        return live.run(duration, dashboard)
    except RuntimeError as error:  # a process that cannot be kept up: not the input's fault, and no bug to trace
        dashboard.stop()
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
