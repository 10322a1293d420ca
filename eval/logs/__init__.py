"""Logs of model calls, as frameworks and gateways write them, as traces: `python -m eval replay --log`."""
