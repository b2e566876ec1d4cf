"""The soak: thousands of requests of every kind while processes are killed, and nothing may grow, leak or be wrong."""
