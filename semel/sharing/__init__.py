"""Compute once: the request side of a model, once per request. Usable alone, with any PyTorch ranker.

``share`` rewrites a model exactly; ``isolate`` makes another one, whose request side never sees a candidate.
"""

from semel.sharing.errors import SharingError
from semel.sharing.isolated import IsolatedModel, isolate
from semel.sharing.package import LoadedModel, load
from semel.sharing.shared import RequestState, SharedModel, share

__all__ = ["IsolatedModel", "LoadedModel", "RequestState", "SharedModel", "SharingError", "isolate", "load", "share"]
