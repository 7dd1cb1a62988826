"""The page: the whole system as somebody sees it who looks at it for a minute. docs/page.md has its stream."""
