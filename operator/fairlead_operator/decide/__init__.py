"""The operator's decisions, as pure functions: no I/O and no clock."""
