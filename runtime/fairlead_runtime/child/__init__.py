"""Programs of ours that run in processes of their own and answer questions over their standard
input and output.
"""
