"""Simulated clusters: the cores, nodes and sessions that run on real machines, from one seed.

    plan               a run as data: participants, latencies, faults; drawn from a seed
    world              bare cores: one queue of events in virtual time
      event_queue      the queue
      server           a core, its disk and its clock, and the process that runs the core
      network, disk    links and journals, and their failures
      faults           what each kind of fault does, and how it ends
      workload         clients, and the registers that they swap
      checkers         what must hold after every event
    quorum             whole nodes, candidates and clients on simulated machines
      quorum_plan      plans for this world
      machines         nodes and candidates; `clients`: of the keyspace
      processes        processes, clocks and TCP on one virtual loop; `files`: their disks
      node_faults      what each kind of fault does; `administrator`: changes of the membership
      quorum_checkers  terms, the log, service, recovery
      client_checker   what clients of the keyspace see; `reference`: the expected state
      registers        what proposers see
    linearizability    whether an order explains what clients saw
    outcome            violations and figures of a run
    observer           what can be observed of a world
    recorder, phrases  what happened, so that it can be drawn; what messages say, in words
    pages              runs as pages for a browser
    narration, shrink  a run as text; a failing run made small
    runner             run, hunt, compare, save, replay
    protocols          the protocols, and what the lab needs to know of each
    scale              the cost of an election, for many candidates or many elections
    chart              results as charts
    scenarios          lessons of documents, as runs with a transcript

Nothing that users run needs it. It imports msgspec, of the extra `doyen[quorum]`. Bare cores need
only `quorum.consensus`; whole nodes and scenarios also import nodes, sessions and stores.
"""
