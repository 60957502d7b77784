"""One Raft server: events in, effects out.

The rules for safety, and where each is implemented:

- A server votes once per generation, and the vote is on disk before it is sent (`_save`, `after`).
  This includes its own vote: a candidate asks for votes, and counts its own, only when that is
  written. The log it advertises is then on disk too, since writes are in order.
- A vote goes only to a candidate whose log is at least as long (`_up_to_date`), so a leader has
  everything that was ever committed.
- An entry is committed when a majority of voters has it on disk and it is of the leader's own
  generation (`_commit_point`); everything before it is committed with it. Every leader therefore
  begins with an empty entry. The leader counts itself only for what is on its own disk.
- A follower cuts its log only where it contradicts the leader's (`_merge`), never because a message
  is short, and never below what is committed.
- The membership in force is the latest in the log. It changes by one server at a time, only when
  the last change and an entry of this generation are committed (`_change_refusal`): two successive
  majorities then always overlap. A change that the connected servers could not commit is refused
  (`_stranded`).
- A read is answered when a majority has answered a round that began after the read was requested,
  and the leader's first entry is committed (`_serve_reads`).

The rules for progress:

- A campaign follows a successful pre-vote, which changes no generation (`_begin_pre_vote`). A
  server that hears a leader ignores both (`_hears_leader`), unless that leader transfers its
  leadership. A leader that hears no majority for an election timeout steps down.
- Messages of an earlier generation are answered in the receiver's own, never dropped: otherwise a
  server that is ahead of a leader could neither be reached by it nor depose it.
- When the leader's connection ends, its followers have no leader, stay in the generation, and run a
  pre-vote after a short random wait. A majority has to agree, so one broken connection deposes no
  leader.

Rounds are numbers: every heartbeat begins a new one, every message to a follower carries the
latest, every answer echoes it. The answer to a later round also answers all before.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from math import inf

from msgspec import structs

from doyen.quorum.consensus.core import (
    Accepted,
    ChangeAsked,
    Committed,
    Compacted,
    Connected,
    Disconnected,
    Elapsed,
    EntryKind,
    Install,
    LogEntry,
    Membership,
    Persist,
    Persisted,
    Position,
    ProposalRefused,
    Propose,
    ReadAsked,
    ReadReady,
    ReadRefused,
    Send,
    SendSnapshot,
    Snapshot,
    SnapshotReceived,
    SnapshotSent,
    TransferAsked,
    TransferFailed,
    TransferRefused,
)
from doyen.quorum.consensus.invariants import IllegalEvent, InvariantBroken
from doyen.quorum.consensus.raft.elector import FOLLOWING, LEADING, Elector
from doyen.quorum.consensus.raft.log import encode_membership
from doyen.quorum.consensus.raft.messages import (
    Append,
    AppendReply,
    Heartbeat,
    HeartbeatReply,
    TimeoutNow,
)
from doyen.quorum.consensus.raft.progress import PROBING, SNAPSHOT, STREAMING, Progress

__all__ = ["Raft"]

_NOWHERE = Position()


class Raft(Elector):
    """A `Core` for Raft."""

    def _set_up(self) -> None:
        self._patience = self.settings.election_timeout_s
        self._peers: dict[str, Progress] = {}
        self._first_index = 0
        self._round = 0
        self._reads: deque[tuple[int, int, int]] = deque()
        self._successor: str | None = None
        self._beat_at = self._check_at = self._transfer_until = inf
        self._made = Append(0, 0, 0, (), 0, 0)
        self._on = {
            Elapsed: self._elapsed,
            Persisted: self._persisted,
            Connected: self._connected,
            Disconnected: self._disconnected,
            Propose: self._proposed,
            ReadAsked: self._read_asked,
            TransferAsked: self._transfer_asked,
            ChangeAsked: self._change_asked,
            Compacted: self._compacted,
            SnapshotSent: self._snapshot_sent,
            SnapshotReceived: self._snapshot_received,
        }
        self._hear |= {
            Append: self._append,
            AppendReply: self._append_reply,
            Heartbeat: self._heartbeat,
            HeartbeatReply: self._heartbeat_reply,
        }

    def check(self) -> None:
        """Check the invariants of this server alone."""
        log, name = self.log, self.id
        log.check(name)
        if not log.base <= self.commit <= log.last:
            raise InvariantBroken(f"{name}: commit {self.commit} in {log.base} to {log.last}")
        if self.membership is not log.membership:
            raise InvariantBroken(f"{name}: the membership in force is not the latest of the log")
        if log.last_generation > self.generation:
            raise InvariantBroken(f"{name}: an entry of a generation not begun")
        if self.role is not LEADING:
            if self._peers or self._reads or self._successor is not None:
                raise InvariantBroken(f"{name} does not lead and has the state of a leader")
            return
        if self._campaign is not None:
            raise InvariantBroken(f"{name} leads and campaigns")
        for peer, progress in self._peers.items():
            if not progress.match < progress.next <= log.last + 1 or progress.match > log.last:
                raise InvariantBroken(
                    f"{name}: {peer} has {progress.match}, next {progress.next}, of {log.last}"
                )

    def _elapsed(self, event: Elapsed) -> None:
        if self._now < self.next_deadline:
            return
        if self.role is LEADING:
            self._lead_on()
        elif self._may_campaign():
            self._begin_pre_vote()
        else:
            self._look()

    def _persisted(self, event: Persisted) -> None:
        token = event.token
        if not self._written <= token <= self._token:
            raise IllegalEvent(
                f"{self.id}: token {token} cannot be on disk now: {self._written} was, "
                f"{self._token} is the last there is"
            )
        self._written = token
        campaign = self._campaign
        if campaign is not None and not campaign.pre_vote and token >= campaign.token:
            self._count(self.id)
        if self.log.persisted(token) and self.role is LEADING:
            self._advance()

    def _connected(self, event: Connected) -> None:
        peer = event.peer
        if self._campaign is not None and peer in self.membership.voters:
            self._solicit(peer, self._campaign)
        progress = self._peers.get(peer)
        if progress is not None and progress.pace is not SNAPSHOT:
            progress.resume()
            self._replicate(peer, progress)

    def _disconnected(self, event: Disconnected) -> None:
        peer = event.peer
        if self.leader == peer or (
            self.vote == peer and self.leader is None and self._campaign is None
        ):
            # The leader, or the candidate that was about to lead, may be dead.
            self._hurry()
        progress = self._peers.get(peer)
        if progress is not None:
            progress.active = progress.lately = False
            progress.resume(paused=True)
            if self._successor == peer:
                self._keep_leading(f"the connection to {peer} has ended")

    # Writing.

    def _write(self, entries: tuple[LogEntry, ...]) -> None:
        """Append to the log."""
        self._token += 1
        log = self.log
        self._out.append(Persist(self._token, None, log.last + 1, entries))
        if log.append(entries, self._token):
            self.membership = log.membership
            if self.role is LEADING:
                # Removed servers are served until that is committed, so that they learn of it.
                for peer in self.membership.everyone:
                    if peer != self.id and peer not in self._peers:
                        self._peers[peer] = Progress(log.last)

    def _commit_to(self, index: int) -> None:
        first, base = self.commit + 1, self.log.base
        self.commit = index
        self._out.append(Committed(first, self.log.entries[first - base - 1 : index - base]))

    # Following.

    def _follow(self, peer: str, generation: int) -> None:
        """The peer leads in this generation, which is not below this server's."""
        if generation > self.generation:
            self._adopt(generation)
        if self.leader != peer:
            if self.leader is not None:
                raise InvariantBroken(
                    f"{self.id}: {peer} and {self.leader} both lead generation {generation}"
                )
            self.role = FOLLOWING
            self.leader = peer
            self._campaign = None
            self._haste = 0.0
            self._patience = self._draw()
        self._heard = self._now
        self.next_deadline = self._now + self._patience

    def _heartbeat(self, peer: str, message: Heartbeat) -> None:
        if message.generation < self.generation:
            self._out.append(Send(peer, HeartbeatReply(self.generation, 0)))
            return
        self._follow(peer, message.generation)
        if message.commit > self.commit:
            if message.commit > self.log.last:
                raise InvariantBroken(
                    f"{self.id} acknowledged up to {message.commit} and has only {self.log.last}: "
                    "its disk has lost what it had written, or its data directory is an older copy."
                    " Remove it from the cluster, empty the directory and add it again"
                )
            self._commit_to(message.commit)
        self._witness(peer, message.durable)
        if message.round:
            self._out.append(Send(peer, HeartbeatReply(self.generation, message.round)))

    def _append(self, peer: str, message: Append) -> None:
        if message.generation < self.generation:
            self._out.append(Send(peer, AppendReply(self.generation, 0, rejected=True)))
            return
        self._follow(peer, message.generation)
        log = self.log
        previous = message.previous_index
        if previous >= self.commit and log.generation_at(previous) != message.previous_generation:
            hint = log.meeting_point(previous, message.previous_generation)
            reply = AppendReply(
                self.generation, previous, True, hint, log.generation_at(hint), message.round
            )
            self._out.append(Send(peer, reply))
            return
        matched = self._merge(previous, message.entries)
        if message.commit > self.commit:
            self._learn_commit(message.commit, matched)
        self._witness(peer, message.durable)
        # The leader has everything that is committed here: it need not be found out entry by entry.
        reply = AppendReply(self.generation, max(matched, self.commit), round=message.round)
        self._out.append(Send(peer, reply, self._token))

    def _witness(self, leader: str, durable: int) -> None:
        """Remember what the leader says to have on its own disk, as far as it is committed: it must
        still have that much whenever it comes back. What it sends may not be on its disk yet, and a
        majority may do without it."""
        index = min(durable, self.commit)
        mark = self.witnessed.get(leader, _NOWHERE)
        if index > mark.last_index or self.generation > mark.generation:
            last = max(
                (mark.last_generation, mark.last_index), (self.log.generation_at(index), index)
            )
            self.witnessed[leader] = Position(self.generation, *last)

    def _merge(self, previous: int, entries: tuple[LogEntry, ...]) -> int:
        """Append what follows `previous`, where the logs agree. Returns the index up to which they
        agree then."""
        log = self.log
        matched = previous + len(entries)
        if previous == log.last:
            if entries:
                self._write(entries)
            return matched
        for place, entry in enumerate(entries):
            index = previous + 1 + place
            if log.generation_at(index) == entry.generation or index <= log.base:
                continue
            if index <= self.commit:
                raise InvariantBroken(
                    f"{self.id}: entry {index} is committed in generation "
                    f"{log.generation_at(index)}, and the leader has it in {entry.generation}"
                )
            if index <= log.last:
                log.cut(index - 1)
                self.membership = log.membership
            self._write(entries[place:])
            break
        return matched

    def _learn_commit(self, commit: int, matched: int) -> None:
        """The leader has committed this much; beyond `matched`, this log may differ."""
        if commit > matched:
            commit = matched
        if commit > self.commit:
            self._commit_to(commit)

    def _snapshot_received(self, event: SnapshotReceived) -> None:
        if event.generation < self.generation:
            return
        self._follow(event.peer, event.generation)
        snapshot = event.snapshot
        if self._wants(snapshot):
            self._token += 1
            self.log.replace(snapshot, self._token)
            self.membership = self.log.membership
            self.commit = snapshot.index
            self._out.append(Install(snapshot, self._token))
        elif snapshot.index > self.commit:
            self._commit_to(snapshot.index)
        reply = AppendReply(self.generation, self.commit)
        self._out.append(Send(event.peer, reply, self._token))

    def _wants(self, snapshot: Snapshot) -> bool:
        """Whether to install a snapshot: not if all that it stands for is in the log."""
        return (
            snapshot.index > self.commit
            and self.log.generation_at(snapshot.index) != snapshot.generation
        )

    def _compacted(self, event: Compacted) -> None:
        index = event.snapshot.index
        if index > self.commit:
            raise IllegalEvent(
                f"{self.id}: a snapshot up to {index}, but only {self.commit} is committed"
            )
        if index > self.log.base:
            self.log.compact(index, self.settings)

    # Leading.

    def _lead(self) -> None:
        """Begin to lead. The empty entry commits everything that is left of earlier generations."""
        self.role = LEADING
        self.leader = self.id
        self._campaign = None
        self._haste = 0.0
        following = self.log.last + 1
        self._peers = {
            peer: Progress(following) for peer in self.membership.everyone if peer != self.id
        }
        self._first_index = following
        self._beat_at = self._now + self.settings.heartbeat_s
        self._check_at = self._now + self.settings.election_timeout_s
        self._arm()
        self._add(EntryKind.NOTHING, b"")

    def _resign(self) -> None:
        """This server no longer leads, for whatever reason."""
        self._out.extend(ReadRefused(token) for _, _, token in self._reads)
        self._reads.clear()
        self._peers = {}
        self._successor = None
        self._transfer_until = inf

    def _arm(self) -> None:
        self.next_deadline = min(self._beat_at, self._check_at, self._transfer_until)

    def _lead_on(self) -> None:
        """A deadline of the leader has come."""
        now = self._now
        if now >= self._check_at:
            if not self._hears_majority():
                self._look()
                return
            for progress in self._peers.values():
                progress.lately, progress.active = progress.active, False
            self._check_at = now + self.settings.election_timeout_s
        if now >= self._transfer_until:
            self._keep_leading(f"{self._successor} did not take over in time")
        if now >= self._beat_at:
            self._beat_at = now + self.settings.heartbeat_s
            self._begin_round(self._peers)
        self._arm()

    def _hears_majority(self) -> bool:
        peers = self._peers
        heard = sum(voter == self.id or peers[voter].active for voter in self.membership.voters)
        return heard >= self.membership.majority

    def _proposed(self, event: Propose) -> None:
        if self.role is not LEADING:
            self._out.append(ProposalRefused("this server does not lead"))
        elif self._successor is not None:
            self._out.append(
                ProposalRefused(f"leadership is being transferred to {self._successor}")
            )
        else:
            self._out.append(Accepted(self.log.last + 1, self.generation))
            self._add(EntryKind.COMMANDS, event.data)

    def _add(self, kind: EntryKind, data: bytes) -> None:
        """Append an entry. It is sent to the peers while this server's own disk still writes it."""
        self._write((LogEntry(self.generation, kind, data),))
        for peer, progress in self._peers.items():
            self._replicate(peer, progress)

    def _replicate(self, peer: str, progress: Progress) -> None:
        """Send everything that may be sent now: up to the window or, while probing, one message."""
        log, flying = self.log, progress.flying
        while progress.next <= log.last:
            if progress.pace is STREAMING:
                if flying and (
                    len(flying) >= self.settings.window_messages
                    or progress.flying_bytes >= self.settings.window_bytes
                ):
                    return
            elif progress.pace is SNAPSHOT or progress.paused:
                return
            if progress.next <= log.base:
                progress.await_snapshot()
                self._out.append(SendSnapshot(peer, self.generation))
                return
            message, size = self._message(progress.next)
            last = message.previous_index + len(message.entries)
            if progress.pace is STREAMING:
                progress.next = last + 1
                flying.append((last, size))
                progress.flying_bytes += size
            else:
                progress.paused = True
            progress.commit_sent = max(progress.commit_sent, min(self.commit, last))
            self._out.append(Send(peer, message))

    def _message(self, following: int) -> tuple[Append, int]:
        """The entries from here on, and their size; the same object for all peers that need only
        the last entry."""
        log, made, previous = self.log, self._made, following - 1
        if (
            following == log.last
            and made.previous_index == previous
            and made.commit == self.commit
            and made.round == self._round
            and made.generation == self.generation
        ):
            return made, len(made.entries[0].data)
        entries, size = log.batch(following, self.settings)
        before = log.generation_at(previous)
        self._made = made = Append(
            self.generation, previous, before, entries, self.commit, self._round, log.durable
        )
        return made, size

    def _nudge(self, peer: str, progress: Progress) -> None:
        """Send an append without entries: if something before it was lost, the answer shows it."""
        if progress.pace is SNAPSHOT:
            return
        log, previous = self.log, progress.next - 1
        if previous < log.base:
            # The connection has ended; everything in the window may be lost.
            progress.resume()
            self._replicate(peer, progress)
        else:
            before = log.generation_at(previous)
            message = Append(
                self.generation, previous, before, (), self.commit, self._round, log.durable
            )
            progress.commit_sent = max(progress.commit_sent, min(self.commit, previous))
            self._out.append(Send(peer, message))

    def _append_reply(self, peer: str, message: AppendReply) -> None:
        progress = self._answerer(peer, message)
        if progress is None:
            return
        if message.rejected:
            self._back_off(peer, progress, message)
            return
        if message.index > self.log.last:
            raise InvariantBroken(
                f"{peer} has {message.index} entries of {self.id}'s, which has {self.log.last}"
            )
        ahead = message.index > progress.match
        progress.matched(message.index)
        if progress.pace is PROBING or (
            progress.pace is SNAPSHOT and progress.match >= self.log.base
        ):
            progress.stream()
        if ahead:
            reached = self.log.generation_at(message.index)
            if reached >= 0:
                self.witnessed[peer] = Position(self.generation, reached, message.index)
            if message.index > self.commit:
                self._advance()
                if self.role is not LEADING:
                    return
            if peer == self._successor:
                self._hand_over(peer)
        if progress.next <= self.log.last:
            self._replicate(peer, progress)
        if progress.commit_sent < self.commit:
            self._tell_commit(peer, progress)

    def _back_off(self, peer: str, progress: Progress, message: AppendReply) -> None:
        """The peer lacks the entry before those it was sent: go back to where the logs may
        agree."""
        if message.index <= progress.match or progress.pace is SNAPSHOT:
            return
        if progress.pace is PROBING and message.index != progress.next - 1:
            return
        meeting = self.log.meeting_point(message.hint_index, message.hint_generation)
        progress.probe(min(message.index, meeting + 1))
        self._replicate(peer, progress)

    def _heartbeat_reply(self, peer: str, message: HeartbeatReply) -> None:
        progress = self._answerer(peer, message)
        if progress is None:
            return
        if progress.match < self.log.last:
            # What was sent may have been lost, or is still being written there.
            self._nudge(peer, progress)
        elif self._successor == peer:
            self._hand_over(peer)

    def _answerer(self, peer: str, message: AppendReply | HeartbeatReply) -> Progress | None:
        """The peer that answers this leader in this generation, if it is still one."""
        if message.generation != self.generation or self.role is not LEADING:
            if message.generation > self.generation:
                self._adopt(message.generation)
            return None
        progress = self._peers.get(peer)
        if progress is not None:
            progress.active = True
            if message.round > progress.round:
                progress.round = message.round
                if self._reads:
                    self._serve_reads()
        return progress

    def _snapshot_sent(self, event: SnapshotSent) -> None:
        progress = self._peers.get(event.peer)
        if progress is None or progress.pace is not SNAPSHOT:
            return
        if event.ok:
            # Only its own answer counts as a match: it may decline to install the snapshot.
            progress.probe(event.snapshot.index + 1)
            self._replicate(event.peer, progress)
        else:
            progress.resume(paused=True)

    # Committing.

    def _advance(self) -> None:
        """Commit what can be committed, and send the commit index to all peers."""
        point = self._commit_point()
        if point <= self.commit:
            return
        settled = self.commit < self.log.membership_index <= point
        self._commit_to(point)
        for peer, progress in self._peers.items():
            if progress.commit_sent < progress.match:
                self._tell_commit(peer, progress)
        if self._reads:
            self._serve_reads()
        if settled:
            self._settle()

    def _commit_point(self) -> int:
        """The index up to which a majority has everything on disk, if the entry there is of this
        generation; otherwise the current commit index."""
        marks: list[int] = []
        for voter in self.membership.voters:
            insort(marks, self.log.durable if voter == self.id else self._peers[voter].match)
        point = marks[(len(marks) - 1) // 2]  # at least `membership.majority` marks reach this one
        if point > self.commit and self.log.generation_at(point) == self.generation:
            return point
        return self.commit

    def _tell_commit(self, peer: str, progress: Progress) -> None:
        commit = min(self.commit, progress.match)
        if commit > progress.commit_sent:
            progress.commit_sent = commit
            self._out.append(Send(peer, Heartbeat(self.generation, commit, 0, self.log.durable)))

    def _settle(self) -> None:
        """The membership in force is committed: drop the peers that it does not name."""
        everyone = self.membership.everyone
        for peer in [peer for peer in self._peers if peer not in everyone]:
            del self._peers[peer]
        if self.id not in self.membership.voters:
            successor = self._furthest()
            if successor is not None and self._peers[successor].match == self.log.last:
                self._out.append(Send(successor, TimeoutNow(self.generation)))
            self._look()

    # Reading.

    def _read_asked(self, event: ReadAsked) -> None:
        if self.role is not LEADING:
            self._out.append(ReadRefused(event.token))
            return
        idle = self._confirmed() >= self._round
        # A round that has begun may have been answered before this read was requested.
        self._reads.append((self._round + 1, max(self.commit, self._first_index), event.token))
        if idle:
            self._begin_round(self.membership.voters)
            self._serve_reads()

    def _begin_round(self, peers: Iterable[str]) -> None:
        self._round += 1
        beat = Heartbeat(self.generation, self.commit, self._round, self.log.durable)
        for peer in peers:
            progress = self._peers.get(peer)
            if progress is not None:
                behind = progress.match < self.commit
                mine = structs.replace(beat, commit=progress.match) if behind else beat
                self._out.append(Send(peer, mine))

    def _confirmed(self) -> int:
        """The latest round that a majority has answered."""
        rounds = sorted(
            self._round if voter == self.id else self._peers[voter].round
            for voter in self.membership.voters
        )
        return rounds[-self.membership.majority]

    def _serve_reads(self) -> None:
        """Answer the reads whose round is confirmed, and begin the round that the next ones
        need."""
        confirmed = self._confirmed()
        reads = self._reads
        if self.commit >= self._first_index:
            while reads and reads[0][0] <= confirmed:
                _, index, token = reads.popleft()
                self._out.append(ReadReady(token, index))
        if reads and reads[-1][0] > self._round and confirmed >= self._round:
            self._begin_round(self.membership.voters)

    # Transferring leadership.

    def _transfer_asked(self, event: TransferAsked) -> None:
        successor = event.to or self._furthest(event.avoid)
        reason = self._transfer_refusal(successor, event.change)
        if reason is not None:
            self._out.append(TransferRefused(event.token, reason))
        elif successor is not None and successor != self._successor:
            self._successor = successor
            self._transfer_until = self._now + self.settings.election_timeout_s
            self._arm()
            self._hand_over(successor)

    def _transfer_refusal(self, successor: str | None, change: Membership | None) -> str | None:
        if self.role is not LEADING:
            return "this server does not lead"
        if change is not None and (stranded := self._stranded(change)) is not None:
            return stranded
        if successor is None:
            return "no other voter is connected that could lead"
        if successor == self.id:
            return "this server leads already"
        return None if successor in self.membership.voters else f"{successor} is not a voter"

    def _furthest(self, avoid: tuple[str, ...] = ()) -> str | None:
        """The other voter with the longest log, among those that have answered this leader and are
        not avoided. Just after a check of the quorum none is `active`, so those that were before it
        count as well."""
        heard = {
            voter: (progress.match, progress.active)
            for voter in self.membership.voters
            if (progress := self._peers.get(voter)) is not None
            and progress.heard
            and (progress.active or progress.lately)
            and voter not in avoid
        }
        return max(heard, key=heard.__getitem__, default=None)

    def _hand_over(self, successor: str) -> None:
        """The successor may campaign as soon as it has the whole log."""
        if self._peers[successor].match == self.log.last:
            self._out.append(Send(successor, TimeoutNow(self.generation)))

    def _keep_leading(self, reason: str) -> None:
        self._successor = None
        self._transfer_until = inf
        self._out.append(TransferFailed(reason))

    # Changing the membership.

    def _change_asked(self, event: ChangeAsked) -> None:
        reason = self._change_refusal(event.membership)
        if reason is not None:
            self._out.append(ProposalRefused(reason))
            return
        self._out.append(Accepted(self.log.last + 1, self.generation))
        self._add(EntryKind.MEMBERSHIP, encode_membership(event.membership))
        # Fewer voters may need fewer acknowledgements.
        self._advance()

    def _change_refusal(self, wanted: Membership) -> str | None:
        if self.role is not LEADING:
            return "this server does not lead"
        if self._successor is not None:
            return f"leadership is being transferred to {self._successor}"
        if not self._may_change():
            return "the last change is not committed yet; ask again in a moment"
        return _unlike(self.membership, wanted) or self._behind(wanted) or self._stranded(wanted)

    def _may_change(self) -> bool:
        """Without a committed entry of this generation, a change left over from an earlier one
        could still be committed, by a majority that does not overlap this one."""
        return self.log.membership_index <= self.commit and self.commit >= self._first_index

    def _behind(self, wanted: Membership) -> str | None:
        """A learner may become a voter when it has everything but what is in flight."""
        for peer in wanted.voters:
            if peer in self.membership.learners:
                progress = self._peers[peer]
                missing = self.log.last - progress.match
                if progress.match == 0 or missing > self.settings.message_entries:
                    return f"{peer} is {missing} entries behind; ask again when it has caught up"
        return None

    def _stranded(self, wanted: Membership) -> str | None:
        """Refuse a change that the connected servers could not commit: it could not be undone
        either. A server that was down when this one was elected has not answered it."""
        there = {
            peer
            for peer, known in self._peers.items()
            if known.heard and (known.active or known.lately)
        }
        silent = [voter for voter in wanted.voters if voter not in there and voter != self.id]
        if len(wanted.voters) - len(silent) >= wanted.majority:
            return None
        does, them = ("does", "it") if len(silent) == 1 else ("do", "them")
        return (
            f"without {', '.join(silent)}, which {does} not answer, that would be no majority:"
            f" start {them}, or remove {them} first"
        )


def _unlike(old: Membership, new: Membership) -> str | None:
    """Why the one membership may not follow the other."""
    if not new.voters:
        return "there must be a voter"
    if len(set(new.everyone)) != len(new.everyone):
        return "a server is named twice"
    before = {**dict.fromkeys(old.learners, "learner"), **dict.fromkeys(old.voters, "voter")}
    after = {**dict.fromkeys(new.learners, "learner"), **dict.fromkeys(new.voters, "voter")}
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if len(changed) > 1:
        return f"only one server can change at a time, not {', '.join(changed)}"
    if not changed and (old.addresses, old.members, old.cluster) == (
        new.addresses,
        new.members,
        new.cluster,
    ):
        return "that is the membership in force"
    return None
