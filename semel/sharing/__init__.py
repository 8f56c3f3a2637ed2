"""Compute once: the request side of a model, once per request. Usable alone, with any PyTorch ranker.

``share`` rewrites a model exactly; ``isolate`` makes another one, whose request side never sees a candidate.
"""

from semel.sharing.errors import SharingError
from semel.sharing.isolate import IsolatedModel, isolate
from semel.sharing.package import load
from semel.sharing.shared import RequestState, SharedModel, share

__all__ = ["IsolatedModel", "RequestState", "SharedModel", "SharingError", "isolate", "load", "share"]
