"""The tiered store: places that keep frames by chunk key, behind one contract (base.py)."""
