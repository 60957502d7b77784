"""The audit log, and the proof that it holds.

`AuditLog` is a telemetry sink: one JSON object a line, one `write` on an append-only descriptor
an event. Many processes may share a file on a local disk and no line is ever interleaved with
another. It survives the death of any process; it is not fsynced, so a power cut may take its tail.
It is written by a thread of its own, and what could not be written in time is a `gap`.

`verify` reads the logs of any number of processes and either proves, from what is written there,
or shows where it does not hold, that

- no two valid terms of one election overlapped in time;
- tokens strictly increase in the order in which terms began, and none was used twice;
- nobody led outside its term: no lease was declared dead or expired while its holder still
  counted on it, and no body was at work in another's term.

A term is valid from its `elected` to the *earliest* of: its own `resigned` or `lost`, its lease's
`leaselost`, the last deadline its lease was confirmed for, and another process's proof that its
holder had died. So a killed process needs no last words. A term that was over before it was
announced (its holder was paused in between) never was valid and takes part in no comparison.

Instants compare on the boot-time clock where they share a boot id, and otherwise on the wall
clocks, whose disagreement `tolerance_s` allows for. Logs of *one* store belong together: two
stores may each have an election of the same name.

Where the logs have a gap nothing is proved (`Report.verdict` is "incomplete"), and what the missing
events could explain is not called a violation. Nor is anything proved by logs with lines that
cannot be read, since each may have been an event; but for a torn last line, which a killed process
leaves behind.

Reading is streaming, and the order of files and lines does not matter.
"""

from doyen.audit.evidence import Ignored, LogLine, Where
from doyen.audit.log import AuditLog
from doyen.audit.verdict import AuditViolation, Report, TermEvidence, verify, verify_lines

__all__ = [
    "AuditLog",
    "AuditViolation",
    "Ignored",
    "LogLine",
    "Report",
    "TermEvidence",
    "Where",
    "verify",
    "verify_lines",
]
