"""Elections: campaigns as scopes and as callbacks, their options, a candidate from joining the line
to leaving it, and handover."""
