"""The command line: one file per command, shared flags as data, errors as one line."""
