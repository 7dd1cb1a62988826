"""OpenAI's API without sockets: text to tokens and back, chat templates, stop strings."""
