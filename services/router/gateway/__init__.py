"""The HTTP door: the OpenAI API in front of the same dispatch that the gRPC door leads to."""
