"""The lookout, which Redis uses too, is `doyen.lookout`."""

from doyen.lookout import LeaseRow, Lookout, Survey

__all__ = ["LeaseRow", "Lookout", "Survey"]
