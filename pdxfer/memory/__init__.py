"""Memory that channels and tiers may touch: registered regions (and, later, the store's arena)."""
