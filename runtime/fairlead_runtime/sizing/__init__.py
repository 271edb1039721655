"""How much memory a model takes and how many cache blocks fit. No torch; the operator uses it too."""
