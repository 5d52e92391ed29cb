"""Transforms of a chunk's KV bytes, and the frame that makes every stored or staged value describe itself."""
