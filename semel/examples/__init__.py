"""Requests that hold pointers: sessions, splits, exposures and their join, and the loader that materializes late."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "EXPOSURE_SCHEMA": "exposures", "OUTCOME_SCHEMA": "exposures", "SHOWN": "exposures",
    "exposure_schema": "exposures", "outcome_schema": "exposures",
    "ExposureLog": "logs", "OutcomeLog": "logs",
    "ExampleSet": "build", "build_examples": "build", "open_examples": "build",
    "JoinReport": "outcome_join", "exposure_rows": "outcome_join", "join": "outcome_join",
    "Label": "sessionize", "RATING_LABELS": "sessionize", "sessions": "sessionize",
    "FatRowColumns": "fat_rows", "FatTable": "fat_rows", "open_fat_rows": "fat_rows",
    "RecoveryReport": "recovery", "ingest_fat_rows": "recovery", "recover": "recovery",
    "ShadowReport": "shadow", "compare_fat_rows": "shadow",
    "RequestLoader": "loader", "WithheldHistory": "loader",
    "Histories": "shared_reads", "ReadCounters": "shared_reads", "read_histories": "shared_reads",
    "SequenceSet": "sequences", "leave_one_out": "sequences", "sequences_before": "sequences",
    "take_events": "sequences",
    "concat_rows": "rows", "read_rows": "rows", "rows_from_table": "rows", "rows_to_table": "rows",
    "context_columns": "context", "context_value": "context",
    "history_checksum": "checksum",
    "history_tensors": "materialization", "materialize": "materialization", "read_ahead": "materialization",
    "time_split": "splits",
}

__all__ = [
    "EXPOSURE_SCHEMA", "OUTCOME_SCHEMA", "RATING_LABELS", "SHOWN", "ExampleSet", "ExposureLog", "FatRowColumns",
    "FatTable", "Histories", "JoinReport", "Label", "OutcomeLog", "ReadCounters", "RecoveryReport", "RequestLoader",
    "SequenceSet", "ShadowReport", "WithheldHistory", "build_examples", "compare_fat_rows", "concat_rows",
    "context_columns", "context_value", "exposure_rows", "exposure_schema", "history_checksum", "history_tensors",
    "ingest_fat_rows", "join", "leave_one_out", "materialize", "open_examples", "open_fat_rows", "outcome_schema",
    "read_ahead", "read_histories", "read_rows", "recover", "rows_from_table", "rows_to_table", "sequences_before",
    "sessions", "take_events", "time_split",
]

if TYPE_CHECKING:
    from semel.examples.build import ExampleSet, build_examples, open_examples
    from semel.examples.checksum import history_checksum
    from semel.examples.context import context_columns, context_value
    from semel.examples.exposures import EXPOSURE_SCHEMA, OUTCOME_SCHEMA, SHOWN, exposure_schema, outcome_schema
    from semel.examples.fat_rows import FatRowColumns, FatTable, open_fat_rows
    from semel.examples.loader import RequestLoader, WithheldHistory
    from semel.examples.logs import ExposureLog, OutcomeLog
    from semel.examples.materialization import history_tensors, materialize, read_ahead
    from semel.examples.outcome_join import JoinReport, exposure_rows, join
    from semel.examples.recovery import RecoveryReport, ingest_fat_rows, recover
    from semel.examples.rows import concat_rows, read_rows, rows_from_table, rows_to_table
    from semel.examples.sequences import SequenceSet, leave_one_out, sequences_before, take_events
    from semel.examples.sessionize import RATING_LABELS, Label, sessions
    from semel.examples.shadow import ShadowReport, compare_fat_rows
    from semel.examples.shared_reads import Histories, ReadCounters, read_histories
    from semel.examples.splits import time_split


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'semel.examples' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"semel.examples.{_HOME[name]}"), name)
    globals()[name] = value
    return value
