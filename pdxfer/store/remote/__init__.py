"""Tiers on other machines; tier.py is what they share, session.py what each protocol implements."""
