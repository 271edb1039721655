"""The operator's subcommands of `fairlead`; each has `main(args) -> exit code` and imports heavy
modules lazily.
"""
