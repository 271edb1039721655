"""Bodies of answers: choices, messages, log-probabilities, what is shown of a prompt."""
