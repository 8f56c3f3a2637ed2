"""Exchange between processes: transports with async handles, process groups, jagged rows.

``semel.comm.transport.transport(name)`` picks a transport.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "Handle": "interface", "PeerLost": "interface", "Transport": "interface", "exchange_counts": "interface",
    "Alone": "transport", "Collective": "transport", "CopyEngine": "transport", "Staged": "transport",
    "Throttled": "transport", "own_group": "transport", "Threads": "threads", "run_threads": "threads",
    "ProcessDied": "processes", "World": "processes", "join": "processes", "leave": "processes", "spawn": "processes",
}

__all__ = ["Alone", "Collective", "CopyEngine", "Handle", "PeerLost", "ProcessDied", "Staged", "Threads", "Throttled",
           "Transport", "World", "exchange_counts", "join", "leave", "own_group", "run_threads", "spawn"]

if TYPE_CHECKING:
    from semel.comm.interface import Handle, PeerLost, Transport, exchange_counts
    from semel.comm.processes import ProcessDied, World, join, leave, spawn
    from semel.comm.threads import Threads, run_threads
    from semel.comm.transport import Alone, Collective, CopyEngine, Staged, Throttled, own_group


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'semel.comm' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"semel.comm.{_HOME[name]}"), name)
    globals()[name] = value
    return value
