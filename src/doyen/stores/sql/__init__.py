"""`postgresql://` and `mysql://`: the relational store, a leader row under a primary key.

Every candidate inserts a row with the same primary key, and one of them succeeds. To this known
scheme doyen adds leases that expire, tokens, an order among candidates and notifications. Two
engines share all of it, so they are one package:

    connection      one connection at a time to the server that is the primary
    store           the tables, and the statements on them
    postgresql      LISTEN and NOTIFY, the schema
    psycopg_engine  PostgreSQL through psycopg
    mysql           the same for MySQL and MariaDB, which are polled for changes
    diagnosis       what a server's settings mean

Invariants:

- *One message is one transaction.* Each change is sent as one message that begins and commits. A
  client that freezes, dies or is cancelled therefore never holds a lock in the database, and no
  call depends on the state of a connection: a transaction pooler may be used.
- *One counter.* Every change of an entry first advances the counter in `meta`, and so locks that
  row until it has committed. Changes therefore happen one after another, in the order of their
  numbers, and what a transaction reads after it has its number is the present state. Hence
  revisions grow with every creation of a key, and no two transactions lock rows in opposite orders.
  Renewals take no number and wait for no other transaction.
- *A lease has ended when its row is gone*, and not before. Its entries go in the same transaction.
  It is removed by its holder, or by a client that has seen its renewal counter unchanged for a
  whole ttl on its own clock, when the database's clock agrees, and only if the counter is still the
  same. A stepped database clock therefore ends no lease early, and a lease that has ended cannot be
  renewed.
"""
