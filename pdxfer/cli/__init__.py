"""The `pdxfer` command: one file a command. Data on stdout, progress and logs on stderr."""
