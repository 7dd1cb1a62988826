"""Where machines get a model's weights from: `hf://ORG/NAME`, or a place that SkyPilot mounts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.core.errors import InputError

HUB = "hf://"
STORES = ("s3://", "gs://", "r2://", "oci://", "https://")
"""What SkyPilot mounts beside folders of the machine that launches."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?\Z")
DONE = ".complete"
"""A file beside the weights once all of them are there."""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    source: str

    @property
    def hub(self) -> str:
        """ORG/NAME on the hub; empty: they lie elsewhere."""
        return self.source.removeprefix(HUB).partition("@")[0] if self.source.startswith(HUB) else ""

    @property
    def revision(self) -> str:
        return self.source.partition("@")[2] if self.hub else ""


def weights_from(given: Mapping[str, str], mounts: bool) -> dict[str, WeightsSource]:
    """Model to where its weights come from; `mounts`: also stores and folders, which SkyPilot can mount."""
    result = {}
    for model, source in given.items():
        if source.startswith(HUB):
            if not _HUB_NAME.match(source.removeprefix(HUB)):
                raise InputError(
                    "--weights", f"{source!r} is not like hf://ORG/NAME or hf://ORG/NAME@REVISION"
                )
        elif not mounts:
            where = "lie on each machine or in a volume (--models, --volume)"
            raise InputError("--weights", f"{source!r}: only hf://ORG/NAME is pulled; other weights {where}")
        elif "://" in source and not source.startswith(STORES):
            raise InputError(
                "--weights", f"{source!r} must begin with hf://, {', '.join(STORES)} or be a folder"
            )
        result[model] = WeightsSource(source)
    return result


def pull_words(weights: WeightsSource, folder: str, tokenizer: bool = False) -> list[str]:
    """The hub's own command, for all of a model or for what a gateway reads of it: tokenizer and chat template.

    What is there already is not fetched again; $HF_TOKEN opens what is closed.
    """
    revision = ("--revision", weights.revision) if weights.revision else ()
    texts = ("--include", "*.j*") if tokenizer else ()
    return ["hf", "download", weights.hub, *revision, *texts, "--local-dir", folder]


def tokenizers_of(weights: Mapping[str, WeightsSource], folders: Mapping[str, str]) -> list[list[str]]:
    """How the gateway's machine gets what it reads of models that are pulled."""
    return [pull_words(item, folders[model], tokenizer=True) for model, item in weights.items() if item.hub]


def disk_bytes(weight_bytes: Sequence[float]) -> float:
    """Room for models with such weights, and half as much again for what lies beside them."""
    return 1.5 * sum(weight_bytes)
