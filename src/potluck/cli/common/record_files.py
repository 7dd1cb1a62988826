"""Per-request records as files: JSON lines or Parquet, one row per request, codes written out as words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck.core.errors import InputError
from potluck.sim.results.records import OUTCOMES, REASONS, ROUTES, SimResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS = 65536


def require_kind(path: Path) -> None:
    """Say before a long run that its records could not be written."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise InputError("--records", f"{path.name} must end in .jsonl or .parquet")
    if path.suffix == ".parquet":
        _pyarrow()


def write_records(path: Path, result: SimResult) -> None:
    require_kind(path)
    if path.suffix == ".jsonl":
        _write_lines(path, result)
    else:
        _write_parquet(path, result)


def _words(result: SimResult) -> dict[str, list[str | None]]:
    """Coded columns and the words of their codes; replica -1 is nobody."""
    replicas: list[str | None] = [*(replica.id for replica in result.replicas), None]
    labels = result.records.labels
    who: dict[str, list[str | None]] = {}
    if labels is not None:
        who = {"tenant": [*labels.tenants], "request_class": [*labels.classes]}
    return who | {
        "model": list(result.records.models),
        "outcome": list(OUTCOMES),
        "reason": [reason or None for reason in REASONS],
        "route": list(ROUTES),
        "prefill_replica": replicas,
        "decode_replica": replicas,
    }


def _write_lines(path: Path, result: SimResult) -> None:
    words = _words(result)
    columns = result.records.columns()
    with path.open("w", encoding="utf-8") as out:
        for start in range(0, len(result.records), ROWS):
            part = {name: _plain(column[start : start + ROWS]) for name, column in columns.items()}
            for name, known in words.items():
                part[name] = [known[code] for code in part[name]]
            for row in zip(*part.values(), strict=True):
                out.write(json.dumps(dict(zip(part, row, strict=True)), ensure_ascii=False) + "\n")


def _plain(column: NDArray[np.generic]) -> list[Any]:
    values: list[Any] = column.tolist()
    if column.dtype.kind == "f":
        return [None if value != value else value for value in values]
    return values


def _write_parquet(path: Path, result: SimResult) -> None:
    pa = _pyarrow()
    import pyarrow.parquet as pq

    words = _words(result)
    arrays = {}
    for name, column in result.records.columns().items():
        if name in words:
            known = words[name]
            codes = column.astype(np.int32)
            nobody = np.array([word is None for word in known])[codes]
            keys = pa.array(np.where(nobody, 0, codes), pa.int32(), mask=nobody)
            arrays[name] = pa.DictionaryArray.from_arrays(keys, pa.array([word or "" for word in known]))
        else:
            arrays[name] = pa.array(column, from_pandas=True)  # nan becomes null
    pq.write_table(pa.table(arrays), path)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise InputError("--records", "Parquet needs pyarrow: pip install 'potluck[measure]'") from error
    return pyarrow
