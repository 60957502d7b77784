"""What a leader is for: members, published lists, configuration, shards, semaphores, barriers."""
