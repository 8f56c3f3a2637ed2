"""``semel models`` and ``semel rollback``: which versions of a model there are, which serves, and the one before."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from semel.serving.calls import Models

Token = Annotated[str | None, typer.Option(help="What the server wants as a bearer token.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def models(
    target: Annotated[str, typer.Argument(help="The URL of a server, or the folder of a run.")],
    serve: Annotated[str | None, typer.Option(help="Have the server serve this version, or 'latest': what the run "
                                              "saves last, and next.")] = None,
    run: Annotated[str | None, typer.Option(help="Have the server serve this run, which lies beside its own.")] = None,
    stage: Annotated[str, typer.Option(help="Of which stage: retrieve, prerank or rank.")] = "rank",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """List the versions of a server's models, or of a run; or have the server serve another one."""
    if not _is_url(target):
        if serve is not None or run is not None:
            raise ValueError(f"{target} is a folder: --serve and --run are for servers; give a server's URL, or use "
                             "semel rollback")
        _list_run(Path(target), as_json)
        return
    found = _ask(target, token, stage, serve, run)
    _show(found, as_json)


def rollback(
    target: Annotated[str, typer.Argument(help="The URL of a server, or the folder of a run.")],
    to: Annotated[str | None, typer.Option(help="This version, instead of the one before.")] = None,
    stage: Annotated[str, typer.Option(help="Of which stage: retrieve, prerank or rank.")] = "rank",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Go back to the model that served before. Of a server: at once, and it stays, also through a restart, until
    'semel models URL --serve latest'. Of a run: its older version becomes the latest, for whoever follows it."""
    if _is_url(target):
        _show(_ask(target, token, stage, to or "previous", None), as_json)
        return
    from semel.models import restore_version

    _check_run(Path(target))
    restore_version(target, to)
    _list_run(Path(target), as_json)


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _ask(url: str, token: str | None, stage: str, version: str | None, run: str | None) -> Models:
    import httpx

    from semel.serving import Client, ServerError

    try:
        with Client(url, token, timeout=60.0) as client:
            if version is None and run is None:
                return client.models()
            return client.serve(version, run=run, stage=stage)
    except ServerError as error:
        raise ValueError(f"{url}: {error}") from None
    except httpx.TransportError as error:
        raise OSError(str(error)) from None
    except httpx.InvalidURL as error:
        raise ValueError(f"{url}: {error}; name a server's address or a run's folder") from None


def _show(found: Models, as_json: bool) -> None:
    from semel.cli import output

    if as_json:
        output.print_json(found.to_json())
        return
    console = output.results()
    rows = []
    for stage, served in found.stages.items():
        how = "pinned" if served.pinned else "follows its run"
        rows.append([stage, served.current.version, served.current.run, _when(served.current.since), how])
        rows += [["", one.version, one.run, _when(one.since), "before"] for one in reversed(served.before[-3:])]
    console.print(output.table("served", ["stage", "version", "run", "since", ""], rows))
    console.print(output.table("available", ["version", "run", "kind", "saved"],
                               [[one.version, one.run, one.kind, _when(one.saved_at)] for one in found.available]))


def _check_run(run: Path) -> None:
    if not (run / "model.json").exists():
        raise FileNotFoundError(f"{run} is neither a run with a model nor a URL (http://...)")


def _list_run(run: Path, as_json: bool) -> None:
    from semel.cli import output
    from semel.models import current_version, model_versions

    _check_run(run)
    current, kept = current_version(run), model_versions(run)
    if as_json:
        output.print_json({"current": current, "versions": [
            {"version": one.version, "number": one.number, "saved_at": one.saved_at} for one in kept]})
        return
    rows = [[one.version, f"{one.number}", _when(one.saved_at), "latest" if one.version == current else ""]
            for one in kept]
    output.results().print(output.table(f"versions of {run}", ["version", "number", "saved", ""], rows))


def _when(microseconds: int) -> str:
    if not microseconds:
        return ""
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
