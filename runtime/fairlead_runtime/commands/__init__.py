"""One module per subcommand of `fairlead`; each has `main(argv) -> exit code` and imports heavy
libraries lazily.
"""
