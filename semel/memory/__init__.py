"""Embed once: a memory of item embeddings in the model, written by training, read at serving."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "Changes": "table", "ItemMemory": "table", "Rows": "table",
    "MemoryLayer": "layer", "pool": "layer",
    "FoldedMemory": "folded",
    "QuantizedMemory": "quantized",
    "ShardedMemory": "sharded",
    "CorruptDelta": "delta",
    "DeltaPublisher": "publisher", "Fenced": "publisher",
    "DeltaGap": "subscriber", "DeltaSubscriber": "subscriber", "MemoryHistory": "subscriber",
    "Model": "subscriber", "Position": "subscriber", "memory_at": "subscriber",
}

__all__ = ["Changes", "CorruptDelta", "DeltaGap", "DeltaPublisher", "DeltaSubscriber", "Fenced", "FoldedMemory",
           "ItemMemory", "MemoryHistory", "MemoryLayer", "Model", "Position", "QuantizedMemory", "Rows",
           "ShardedMemory", "memory_at", "pool"]

if TYPE_CHECKING:
    from semel.memory.delta import CorruptDelta
    from semel.memory.folded import FoldedMemory
    from semel.memory.layer import MemoryLayer, pool
    from semel.memory.publisher import DeltaPublisher, Fenced
    from semel.memory.quantized import QuantizedMemory
    from semel.memory.sharded import ShardedMemory
    from semel.memory.subscriber import DeltaGap, DeltaSubscriber, MemoryHistory, Model, Position, memory_at
    from semel.memory.table import Changes, ItemMemory, Rows


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'semel.memory' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"semel.memory.{_HOME[name]}"), name)
    globals()[name] = value
    return value
