"""The blocks of a cache and the tokens that they hold. Ids and counts only: no tensor, no torch."""
