"""Metrics: one catalogue of every metric, the objects made from it, and the arithmetic of the TTFT stages."""
