"""The command line: each command is a parser and one library call with the same arguments.

Nothing here imports torch before a command runs, so that `--help` and `--version` are quick.
"""
