"""``semel erase``: remove every trace of users from a store and the files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def erase(
    store: Annotated[Path, typer.Argument(help="The folder of the store.")],
    users: Annotated[list[str] | None, typer.Argument(help="User ids.")] = None,
    users_file: Annotated[Path | None, typer.Option("--users", help="A text file with a user id a line.")] = None,
    also: Annotated[list[Path] | None, typer.Option(
        help="A folder or file elsewhere that names users (examples, exposures). May be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Erase users: their events, older generations and logs, rows of examples and exposures. There is no way back."""
    from semel.cli import output
    from semel.history import HistoryStore

    ids = list(users or [])
    if users_file is not None:
        try:
            ids += [line.strip() for line in users_file.read_text("utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError:
            raise ValueError(f"{users_file} is no UTF-8 text with a user id a line") from None
    if not ids:
        raise ValueError(f"{users_file} names no users" if users_file is not None else
                         "name the users to erase, or a file of them (--users FILE)")
    with HistoryStore.open(store, mode="a") as handle:
        known = ids if handle.schema.string_keys else [_integer(text) for text in ids]
        found = len(set(known) & set(handle.keys().tolist()))
        report = {"users": found, **handle.erase(known, also or ())}
    if as_json:
        output.print_json(report)
        return
    rows = "".join(f"\n{path}: {output.count(count, 'row')} removed" for path, count in report["rows"].items())
    output.results().print(f"erased {output.count(found)} of {output.count(len(set(known)), 'user')}; generation "
                           f"{report['generation']} is all there is{rows}", soft_wrap=True)


def _integer(text: str) -> int:
    try:
        if -(1 << 63) <= int(text) < 1 << 63:
            return int(text)
    except ValueError:
        pass
    raise ValueError(f"user {text!r}: the store's users are 64-bit integers")
