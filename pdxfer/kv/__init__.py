"""From token ids and block ids to bytes: chunk grid, KV layout, runs. Knows tensors, not networks."""
