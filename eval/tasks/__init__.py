"""One module per data set: source, licence, an example, and `load(source) -> TaskData`."""
