"""Which block holds which tokens. Ids and counts only: no tensor, no torch."""
