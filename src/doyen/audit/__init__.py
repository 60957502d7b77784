"""The audit log, and its verification.

`AuditLog` is a telemetry sink. It appends one JSON object per event to a file, each with a single
`write` in append mode, so that many processes may share a file on a local disk without mixing their
lines. The file survives the death of any process. It is not fsynced: a power failure may lose its
end. A thread of its own writes it; events that could not be written in time are replaced by a
`gap`, which counts them.

`verify` reads the logs of all processes of a store and checks that

- no two valid terms of an election overlapped in time;
- tokens strictly increase in the order in which terms began, and no token was used twice;
- no process led outside its term: no lease was declared dead or expired while its holder still took
  it for valid, and no work was running during another's term.

A term is valid from its `elected` to the *earliest* of: its own `resigned` or `lost`, its lease's
`leaselost`, the last confirmed deadline of its lease, and another process's proof that its holder
died. So the log of a killed process needs no closing line. A term whose validity ended before its
`elected` was written (its process was paused in between) was never valid and is not compared.

Times are compared on the boot-time clock where they share a boot id, and otherwise on the wall
clocks, with a tolerance of `tolerance_s`. Verify the logs of *one* store together: two stores may
each have an election of the same name.

The verdict is "incomplete" if the logs have a gap, a term that ends without beginning, or a line
that cannot be read, except an unfinished last line, which a killed process leaves behind. What the
missing events could explain is not reported as a violation.
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
