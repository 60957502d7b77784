"""ZooKeeper's protocol: fast leader election, and Zab.

    messages    what servers send, and what each keeps on disk
    election    fast leader election: how a server chooses the one to follow, perhaps itself
    broadcast   discovery, synchronisation and broadcast: how the chosen server comes to lead

Safety rests on `broadcast` alone. The election only picks a server that is likely to succeed there;
a server that does not looks again, with a longer timeout each time.

A zxid is (epoch, index). The index counts on through all epochs, so it never rolls over. The core's
`generation` is the accepted epoch. A server *follows* or *leads* only in the broadcast phase.
"""

from doyen.quorum.consensus.zab.broadcast import Zab
from doyen.quorum.consensus.zab.election import Phase, ZabVote
from doyen.quorum.consensus.zab.messages import MESSAGES, STATE

__all__ = ["MESSAGES", "STATE", "Phase", "Zab", "ZabVote"]
