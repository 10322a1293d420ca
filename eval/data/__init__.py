"""Reading data sets, from files or the hub; what the tasks have in common."""
