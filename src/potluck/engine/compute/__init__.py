"""One step of a batch: laid out, computed, and a token drawn for each sequence that wants one."""
