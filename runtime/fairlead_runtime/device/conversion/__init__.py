"""What a start makes of a loaded model: layers are recognized, proven and fused, ends and products
replaced. Nothing here runs in a step.
"""
