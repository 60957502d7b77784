"""The protocol between nodes of a quorum and their clients."""
