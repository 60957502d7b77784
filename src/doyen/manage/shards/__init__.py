"""Shards: a fixed number of pieces of work, each with exactly one owner at a time.

spec      what operators ask for, a document that every client of the store may change
plan      what the controller has decided, a document written under the controller's token
planner   which member should own which shard, as a pure function
steps     the next plan, as a pure function of what is asked for, planned and observed
controller  an elected leader that reads, takes a step and writes the plan
owner     a member: claims the shards that are planned for it, and runs their bodies
routing   from a key to its shard and to the address of the owner

Safety rests on elections alone: each shard is one, and its owner holds the leader record. A plan
that is out of date delays an owner and cannot make two.
"""
