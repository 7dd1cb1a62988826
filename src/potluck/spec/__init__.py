"""The file a person writes, `potluck.yaml`, and the frozen `Spec` it becomes.

    text -> marks (YAML with line numbers) -> schema (shapes and ranges) -> resolve (names, prices,
    lengths) -> values.Spec

Every complaint carries file, line and field, and all of them are reported together. This package may
import `core` and `catalog` only.
"""
