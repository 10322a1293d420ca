"""A model of time: what each step of a moved request costs, by bytes, operations and launches."""
