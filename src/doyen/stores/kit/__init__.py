"""What store adapters share. Adapters build on this and never import one another."""
