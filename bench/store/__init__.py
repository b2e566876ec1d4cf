"""The block store's benchmark."""
