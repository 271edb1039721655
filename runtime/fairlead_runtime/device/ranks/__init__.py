"""What several processes need that compute one model: its shards, and the messages of a step."""
