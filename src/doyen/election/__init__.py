"""Elections: campaigns as scopes and as callbacks, their options, a candidate from joining the line
to letting go, and handover."""
