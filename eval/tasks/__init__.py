"""One module a data set: source, licence, an example, and `load(source) -> TaskData`."""
