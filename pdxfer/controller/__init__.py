"""The management API: what the router sees, and what operators may change. Lives in the router's process."""
