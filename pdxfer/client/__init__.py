"""Typed client of the management API."""
