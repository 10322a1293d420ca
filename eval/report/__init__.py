"""Pages and charts of records: `python -m eval report`."""
