"""Programs of ours in processes of their own: their start, their end and the messages to them."""
