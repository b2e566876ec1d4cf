"""gRPC plumbing: server, channel, interceptors."""
