"""One small function an operator, in one registry (``semel.sharing.interpret.rule``): a reader can add one."""

from semel.sharing.rules import lookups, norms, pointwise, products, reductions, rowwise, views

__all__ = ["lookups", "norms", "pointwise", "products", "reductions", "rowwise", "views"]
