"""The HTTP API of Potluck's engines before one stock vLLM, so that a gateway drives it as any engine."""
