"""What a start measures before it serves: memory by term, and how decodes run. Nothing here runs in
a step.
"""
