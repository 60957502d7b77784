"""Leases: the clock they are counted on, their timing, keeping them alive, and the watchdog."""
