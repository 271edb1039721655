"""What a model's text means beyond text: calls of the request's tools, and reasoning.

Small state machines that read an answer's text as it comes, character by character: any split of
the text into pieces gives the same parts. They import no HTTP.
"""
