"""Routing policy; pure: no clock, socket or tensor."""
