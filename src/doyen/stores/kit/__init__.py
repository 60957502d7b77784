"""What store adapters share.

    url, durations
               hosts, credentials and options of a store's URL
    lifecycle  stores that are closed or were opened before a fork; handles of watches
    failover   requests to one server after another, each with a deadline
    batches    requests that arrive together, sent as one call
    diagnosis  findings that several engines share
    expiry, observer, polling
               leases whose end clients must find out, since the engine does not (SQL, Redis, NATS)

Adapters build on these modules and never import one another.
"""
