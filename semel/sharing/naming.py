"""Parameters and buffers by the names that ``state_dict`` has for them."""

from __future__ import annotations

from torch import Tensor, nn


def tensor_named(root: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of ``root`` called ``name``. Not by attribute: a class may have the name for itself."""
    module = root
    *path, last = name.split(".")
    for part in path:
        module = module._modules[part]  # type: ignore[assignment]
    found = module._parameters.get(last)
    return module._buffers[last] if found is None else found  # type: ignore[return-value]
