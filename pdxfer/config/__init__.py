"""The one configuration of all processes: typed sections (schema), read from files, environment and flags (load)."""
