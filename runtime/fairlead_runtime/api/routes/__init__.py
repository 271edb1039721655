"""Routes of the public port: completions, chats, tokenization."""
