"""How much memory a model takes and how many cache blocks fit. Without torch, for the operator."""
