"""Further tables of model families: rows of those that the self-test judges, and makers."""
