"""Generated from protos/twostroke/v1 by `make protos`; do not edit."""
