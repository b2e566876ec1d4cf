"""Who may ask, and for what: API keys as a file names them and as a header carries them."""
