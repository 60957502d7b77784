"""What store adapters share. Adapters build on it and never import one another.

url        hosts, credentials and options of a store's URL
lifecycle  stores that are closed or were opened before a fork; handles of watches
failover   requests to one server after another, each with a deadline
silence    leases whose end clients must find out, since the engine does not (SQL, Redis, NATS)
"""
