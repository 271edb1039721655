"""The engine's loop and what surrounds a step: inbox, isolation of failures, observers,
progress.
"""
