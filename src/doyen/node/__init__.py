"""A node: one server of an embedded quorum."""
