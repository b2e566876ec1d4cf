"""What prefill and decode workers share: settings, assembly, identity, loading blocks."""
