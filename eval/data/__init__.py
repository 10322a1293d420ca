"""Readers of data sets, from files or the hub, which the tasks share."""
