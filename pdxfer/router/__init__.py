"""The control plane: who is there, who is paired with whom, and for how long. Sees messages only, never KV bytes."""
