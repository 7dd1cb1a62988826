"""OpenAI's API for clients: keys and quotas, requests read and validated, answers written."""
