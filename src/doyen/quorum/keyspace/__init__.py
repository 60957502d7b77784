"""The replicated keyspace of a quorum: its state machine, history and versions."""
