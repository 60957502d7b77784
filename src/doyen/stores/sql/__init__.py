"""`postgresql://` and `mysql://`: the relational store, a leader row under a primary key.

The scheme is the old one, every candidate inserts the same primary key and one of them succeeds,
with what it lacked: leases that end, a token, an order among candidates, and notification. Two
engines share all of it, so they are one package:

    link        a connection: calls take turns, and one that is in doubt is dropped
    store       the tables, and what may be done with them
    postgresql  LISTEN and NOTIFY, schema, errors of PostgreSQL
    mysql       the same for MySQL and MariaDB, which are asked at short intervals
    diagnosis   what a server's settings mean

Invariants:

- *One message, one transaction.* Whatever changes something is sent as one message that begins and
  commits. A client that freezes, dies or is cancelled therefore never holds a lock in the database,
  and nothing rests on the state of a connection: a transaction pooler may stand in between.
- *One counter.* Every change of an entry first advances the counter in `meta` and so holds that row
  until it has committed. Changes happen one after another, in the order of their numbers, and what
  a transaction reads after it has its number is what stands there. Hence revisions grow with every
  creation of a key, and nobody can lock two things in the wrong order. Renewals take no number and
  wait for nobody.
- *A lease has ended when its row is gone*, and not before; its entries go in the same transaction.
  It is removed by its holder, or by somebody who has seen its renewal counter unchanged for a whole
  ttl on a clock of their own, when the database's clock agrees, and only if the counter is still
  that one. A stepped database clock thus ends nothing early, and what has ended cannot be renewed.
"""
