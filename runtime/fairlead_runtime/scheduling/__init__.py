"""Who runs in the next step: plan (pure), commit, update. No torch, no clock, no randomness in here."""
