"""Which node holds which blocks, told to each other through Redis, which may be away."""
