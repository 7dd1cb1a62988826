"""From templates to the integer program and back to a plan: columns, rows of terms, codecs, priorities, balancing."""
