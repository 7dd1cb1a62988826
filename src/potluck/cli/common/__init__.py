"""What several commands share: problems and workloads made from options, tables, bars, record files."""
