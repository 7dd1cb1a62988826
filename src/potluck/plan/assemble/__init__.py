"""Between templates, the program and a plan: columns, rows of terms, codecs, priorities, even shares."""
