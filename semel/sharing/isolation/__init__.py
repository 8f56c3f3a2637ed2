"""How ``semel.isolate`` rewrites a graph so that request units never depend on the candidate."""
