"""Logs of model calls, as frameworks and gateways write them, read as traces."""
