"""What the operator decides, as pure functions: no I/O and no clock."""
