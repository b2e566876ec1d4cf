"""Keys, formats and clients of the KV block store."""
