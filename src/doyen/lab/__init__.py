"""Simulated clusters: the same cores and drivers that run on real machines, from one seed.

    plan             a run as data: who takes part, the weather, what goes wrong; drawn from a seed
    world            bare cores: one heap of events, virtual time
      host           a core, its disk, its clock; what a driver does, and every way to be stopped
      network, disk  links and journals, and what they do to those who trust them
      faults         what each kind of fault does, and how it is undone
      load           clients, and the registers they swap
    quorum           whole nodes and candidates, on simulated machines
      residents      what runs there
      machines       processes, clocks and TCP on one virtual loop
    checkers         what must hold after every event
    linearizability  what clients saw, explained or not
    shrink, story    a failing run made small, and told
    runner           run, hunt, compare, save, replay
    protocols        what the lab knows of each protocol
    scale            what an election costs, however many stand or are held
    plot             results to look at
    scenarios        what the documents teach, acted out

Nothing here is needed by what users run; it imports msgspec, of the extra `doyen[quorum]`.
"""
