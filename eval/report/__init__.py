"""Pages and pictures of records: `python -m eval report`."""
