"""The fault kit: real services as processes, struck at each message of a handoff, and held to the same invariants."""
