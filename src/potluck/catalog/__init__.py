"""GPUs, node types, models and prices as data files, each figure with its source and date.

`gpus`, `nodes`, `models`, `prices` answer by name; `huggingface` reads a `config.json`. The files lie in
`data/`. Everything is read once per process and only when asked for, since short commands start often.
"""
