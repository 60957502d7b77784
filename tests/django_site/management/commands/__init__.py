"""The commands of the project."""
