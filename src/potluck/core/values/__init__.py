"""The nouns: hardware, models, layouts, templates, plans, requests and routes."""
