"""Channels: moving the bytes of units between nodes. One file a kind; the contract is in base.py."""
