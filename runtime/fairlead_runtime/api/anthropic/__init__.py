"""Anthropic's Messages API on the same engine and templates as chats; nothing is stored."""
