"""What a run leaves: records, metrics, series, an event log, a report."""
