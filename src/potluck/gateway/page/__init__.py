"""The page: the whole system as somebody sees it who looks at it for a minute. docs/page.md has its stream.

sight.py       the fleet at one moment, as tables of rows
notices.py     what to know before trusting it
waterfall.py   requests as the desk hears of them: queue, segments, transfers, decode
hour.py        the last hour: figures, the fleet, bounded
show.py        one stream for all who watch: a whole, then what changed, made once a tick
routes.py      its paths at the operators' port;  files.py: what a browser loads;  chat.py: the way to a model
data/          HTML, CSS and modules, as they are served
"""
