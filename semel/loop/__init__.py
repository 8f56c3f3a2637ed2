"""The live loop: a server, a joiner, a trainer and a driver as processes of their own, and who watches over them.

    Loop(LoopConfig(recipe="site_rank", ...), "semel-loop").run(duration=60)

``docs/loop.md`` draws the processes and the files between them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {"Loop": "supervisor", "LoopConfig": "config", "LoopFolder": "config", "Verification": "verification",
         "verify": "verification"}

__all__ = ["Loop", "LoopConfig", "LoopFolder", "Verification", "verify"]

if TYPE_CHECKING:
    from semel.loop.config import LoopConfig, LoopFolder
    from semel.loop.supervisor import Loop
    from semel.loop.verification import Verification, verify


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'semel.loop' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"semel.loop.{_HOME[name]}"), name)
    globals()[name] = value
    return value
