"""Leases: the clock they are counted on, their timing, keeping them alive, the watchdog, and their
release when a process ends."""
