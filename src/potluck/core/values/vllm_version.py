"""The release of vLLM that Potluck works with: the connector and the adapter use its internals.

docs/contributing/upgrading-vllm.md lists what a new release needs; tests/export/test_vllm_version.py compares this
constant with the pins that cannot import it.
"""

from __future__ import annotations

from typing import Final

VLLM_VERSION: Final = "0.32.0"
