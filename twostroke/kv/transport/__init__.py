"""Ways to move block bytes."""
