"""OpenAI's Responses API on the same engine and templates as chats; nothing is stored."""
