"""Build the site: PYTHONPATH=tools:src python -m docsite [--out site]. A link or word that leads nowhere fails it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from docsite.assemble import ROOT, assemble


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "site")
    parser.add_argument("--pages", type=Path, default=ROOT / "build" / "docs", help="where pages are made")
    chosen = parser.parse_args()
    assemble(chosen.pages)
    command = [sys.executable, "-m", "sphinx", "--builder", "html", "--quiet", "--fail-on-warning"]
    command += ["--keep-going", "--conf-dir", str(Path(__file__).parent), "--fresh-env"]
    command += ["--doctree-dir", str(chosen.pages / ".doctrees"), str(chosen.pages), str(chosen.out)]
    done = subprocess.run(command, env={**os.environ, "POTLUCK_DOCS": str(chosen.pages)}, check=False)
    if done.returncode == 0:
        print(f"{chosen.out / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
