"""Adapters of the Store port, one module or package each. They never import one another."""
