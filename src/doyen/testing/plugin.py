"""The pytest plugin, loaded in every pytest run where doyen is installed: so it does nothing yet
and imports nothing."""
