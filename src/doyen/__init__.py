"""Leader election for Python."""
