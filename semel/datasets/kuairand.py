"""KuaiRand (Pure, 1K, 27K): every impression of a short-video app, with what the user then did.

Every row of a log is one event (an impression that may have been clicked) and keeps its labels as columns; logs are
read in order of their dates, the randomly exposed one last. ``video_features_statistic_*`` is left out on purpose: it
sums over the whole period, so it would tell a model the future.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from semel.datasets.dataset import Tables, build_events, build_features
from semel.datasets.delimited import microseconds, missing_column, read_delimited, read_header
from semel.datasets.impressions import group_impressions

FLAGS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter",
         "is_rand")
AMOUNTS = ("play_time_ms", "duration_ms", "profile_stay_time", "comment_stay_time")
LABELS = {"click": "is_click", "like": "is_like", "follow": "is_follow", "comment": "is_comment",
          "forward": "is_forward", "hate": "is_hate", "long_view": "long_view", "random": "is_rand"}

_BEIJING_US = 8 * 3600 * 1_000_000  # dates in the files are local ones


def read_kuairand(folder: Path) -> Tables:
    """The logs in ``folder``, and ``user_features_*``, ``video_features_basic_*`` where they are there."""
    paths = sorted(folder.glob("log_standard_*.csv")) + sorted(folder.glob("log_random_*.csv"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no log_standard_*.csv or log_random_*.csv in it")
    events = pa.concat_tables([_log(path) for path in paths])
    items = _videos(sorted(folder.glob("video_features_basic_*.csv")))
    users = _users(sorted(folder.glob("user_features_*.csv")))
    notes = ("video_features_statistic_* is not read: it sums over the whole period and would leak the future",)
    return Tables(events, items, users, group_impressions(events, "tab", LABELS), notes)


def _log(path: Path) -> pa.Table:
    types = {"user_id": pa.int64(), "video_id": pa.int64(), "time_ms": pa.int64(),
             **dict.fromkeys(FLAGS, pa.int8()), **dict.fromkeys(AMOUNTS, pa.float32()), "tab": pa.int8()}
    raw = read_delimited(path, types, quoted=False)
    columns = {"user_id": raw["user_id"], "item_id": raw["video_id"],
               "event_time": microseconds(raw["time_ms"], "ms", str(path), 2)}
    columns.update({name: raw[name] for name in (*FLAGS, *AMOUNTS, "tab")})
    return build_events(columns, str(path), 2)


def _videos(paths: list[Path]) -> pa.Table | None:
    if not paths:
        return None
    text, number = pa.string(), pa.float32()
    types = {"video_id": pa.int64(), "author_id": pa.int64(), "video_type": text, "upload_dt": text,
             "upload_type": text, "visible_status": text, "video_duration": number, "server_width": number,
             "server_height": number, "music_id": text, "music_type": text, "tag": text}
    optional = [name for name in types if name != "video_id"]
    parts = [read_delimited(path, types, optional=optional) for path in paths]
    raw = pa.concat_tables(parts, promote_options="default")
    columns = {"item_id": raw["video_id"]}
    if "upload_dt" in raw.column_names:
        columns["event_time"] = _day(raw["upload_dt"])
    for name in raw.column_names:
        if name == "tag":
            columns["tags"] = pc.replace_substring(raw["tag"], ",", "|")
        elif name not in ("video_id", "upload_dt"):
            columns[name] = raw[name]
    return build_features("item_id", columns, str(paths[0]), 2)


def _day(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """``2022-04-08`` (Beijing) -> microseconds; 0 where there is no date, so that the item is visible to all."""
    days = pc.strptime(column, format="%Y-%m-%d", unit="us", error_is_null=True).cast(pa.int64())
    return pc.max_element_wise(pc.fill_null(pc.subtract(days, _BEIJING_US), 0), 0)


def _user_table(path: Path) -> pa.Table:
    """Some thirty columns, numbers and words, whose types are what they look like."""
    header = read_header(path)
    if "user_id" not in header:
        raise ValueError(missing_column(str(path), "user_id", header))
    try:
        return csv.read_csv(path, convert_options=csv.ConvertOptions(column_types={"user_id": pa.int64()}))
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None


def _users(paths: list[Path]) -> pa.Table | None:
    if not paths:
        return None
    raw = pa.concat_tables([_user_table(path) for path in paths], promote_options="permissive")
    columns = {}
    for name in raw.column_names:
        kind = raw.schema.field(name).type
        to = pa.float32() if pa.types.is_floating(kind) else pa.string() if pa.types.is_null(kind) else kind
        columns[name] = raw[name].cast(to)
    return build_features("user_id", columns, str(paths[0]), 2)
