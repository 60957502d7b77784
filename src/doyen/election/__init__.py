"""Elections: campaign options, a candidate from joining the line to letting go, and handover."""
