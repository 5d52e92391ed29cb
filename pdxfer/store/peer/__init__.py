"""Other nodes' own tiers: served to peers (service.py), read as a tier (tier.py), taken from by command (pull.py)."""
