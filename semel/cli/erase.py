"""``semel erase``: remove every trace of users from a store and the files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def erase(
    store: Annotated[Path, typer.Argument(help="The folder of the store.")],
    users: Annotated[list[str] | None, typer.Argument(help="User ids.")] = None,
    users_file: Annotated[Path | None, typer.Option("--users", help="A text file with a user id a line.")] = None,
    also: Annotated[list[Path] | None, typer.Option(
        help="A folder or file elsewhere that names users (examples, exposures). May be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Erase users: their events, older generations and logs, rows of examples, exposures and outcomes, and what a
    running server keeps of them. Every byte is searched afterwards. There is no way back."""
    from semel.cli import output
    from semel.history import HistoryStore
    from semel.history.erasure import check_places

    ids = list(users or [])
    if users_file is not None:
        try:
            ids += [line.strip() for line in users_file.read_text("utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError:
            raise ValueError(f"{users_file} is no UTF-8 text with a user id a line") from None
    if not ids:
        raise ValueError(f"{users_file} names no users" if users_file is not None else
                         "name the users to erase, or a file of them (--users FILE)")
    with HistoryStore.open(store) as handle:  # what the ids are, before anything is changed
        known = ids if handle.schema.string_keys else [_integer(text) for text in ids]
    places = check_places(also or ())
    report = _by_server(store, known, places) or _by_hand(store, known, places)
    if as_json:
        output.print_json(report)
    else:
        rows = "".join(f"\n{path}: {output.count(count, 'row')} removed" for path, count in report["rows"].items())
        output.results().print(f"erased {output.count(report['users'])} of {output.count(len(set(known)), 'user')}; "
                               f"generation {report['generation']} is all there is{rows}", soft_wrap=True)
    if report["traces"]:
        raise ValueError("a search of all bytes still finds these users, or ids that theirs are a part of, in "
                         + ", ".join(report["traces"]))


def _by_server(store: Path, users: list[Any], places: list[Path]) -> dict[str, Any] | None:
    """By the server that writes the store, which also has its processes let go of what they keep; None if none runs."""
    from semel.history.server.asking import MessageClient, Unanswered
    from semel.serving.runtime import writer_of

    socket = writer_of(store)
    if socket is None:
        return None
    try:
        with MessageClient(socket, timeout=24 * 3600, reconnect=0.0) as server:
            also = [str(path.resolve()) for path in places]
            return server.ask({"kind": "erase", "users": users, "also": also}, again=False)
    except Unanswered as error:
        if error.perhaps:
            raise OSError(f"the server of {store} ended before it had answered; erase again") from None
        return None


def _by_hand(store: Path, users: list[Any], places: list[Path]) -> dict[str, Any]:
    import numpy as np

    from semel.history import HistoryStore
    from semel.history.erasure import traces

    with HistoryStore.open(store, mode="a") as handle:
        found = len(set(users) & set(handle.keys().tolist()))
        report = {"users": found, **handle.erase(users, places)}
        ids = np.array(users, object if handle.schema.string_keys else np.int64)
        return {**report, "traces": traces([store, *places], handle.schema.key, ids)}


def _integer(text: str) -> int:
    try:
        if -(1 << 63) <= int(text) < 1 << 63:
            return int(text)
    except ValueError:
        pass
    raise ValueError(f"user {text!r}: the store's users are 64-bit integers")
