"""A load generator for any server that speaks OpenAI's API: requests timed token by token, and what came of them."""
