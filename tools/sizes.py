"""Prints the size of each part of the project: Python files, lines that are not blank, words of documentation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def parts(root: Path) -> list[tuple[str, Path]]:
    """Each package of the source, then every other folder that holds Python."""
    packages = [path for path in sorted((root / "src" / "potluck").iterdir()) if path.is_dir()]
    others = [root / name for name in ("tests", "benchmarks", "lab", "tools")]
    return [(path.relative_to(root).as_posix(), path) for path in (*packages, *others)]


def python_size(paths: Iterable[Path]) -> tuple[int, int]:
    """How many files there are, and how many of their lines are not blank."""
    texts = [path.read_text("utf-8") for path in paths]
    return len(texts), sum(bool(line.strip()) for text in texts for line in text.splitlines())


def words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text("utf-8").split()) for path in paths)


def main() -> None:
    print(f"{'part':<24}{'files':>8}{'lines':>10}")
    total_files = total_lines = 0
    for name, folder in parts(ROOT):
        files, lines = python_size(folder.rglob("*.py"))
        if not files:
            continue
        print(f"{name:<24}{files:>8,}{lines:>10,}")
        if name.startswith("src/"):
            total_files, total_lines = total_files + files, total_lines + lines
    print(f"{'src in all':<24}{total_files:>8,}{total_lines:>10,}")
    for name in ("docs", "lab"):
        print(f"{name:<24}{words((ROOT / name).rglob('*.md')):>18,} words")
    print(f"{'CHANGELOG.md':<24}{words([ROOT / 'CHANGELOG.md']):>18,} words")


if __name__ == "__main__":
    main()
