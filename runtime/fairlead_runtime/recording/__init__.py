"""Record a run of the scheduler to a file, replay it and show it."""
