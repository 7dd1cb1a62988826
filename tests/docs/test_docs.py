"""Docs: links, commands, references, glossary and quotes agree with the code."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml
from docsite import commands, glossary, sample, spec_fields, values
from docsite.assemble import COVERS, ROOT, assemble, broken_links, sections, unlinked, written
from docsite.shown import Call, calls, trouble
from docsite.text import anchors, blocks, outside_code, phrases, slug

from potluck.cli.main import COMMANDS, run
from potluck.gateway.admin.families import FAMILIES
from potluck.gateway.page.stream import FORMAT as PAGE_FORMAT
from potluck.gateway.page.stream import VERSION as PAGE_VERSION
from potluck.sim.world.faults import FaultKind, parse_faults

PLACES = re.compile(r"(?:[\w-]+/)+[\w.-]+\.(?:py|md|yaml|csv|jsonl|svg|png|html)\Z")
"""Code that names a file; others have no folder before them."""
DATED = ("CHANGELOG.md", "docs/decisions/", "lab/")
"""Pages that tell of a time."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("docs")
    assemble(into)
    return into


def read(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def test_every_link_in_the_repository_resolves() -> None:
    assert list(broken_links(ROOT, written())) == []


def test_every_link_in_the_site_resolves(pages: Path) -> None:
    result = [path.relative_to(pages).as_posix() for path in pages.rglob("*.md")]
    assert list(broken_links(pages, result)) == []


def test_broken_links_are_detected(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One\n\n[x](b.md) [y](#one) [z](#two)\n\n```\n[code](c.md)\n```\n")
    result = list(broken_links(tmp_path, ["a.md"]))
    assert [item.split(": ")[1] for item in result] == ["b.md", "#two"]


def test_every_page_is_in_one_section() -> None:
    assert unlinked() == set()
    seen = Counter(page for cover in COVERS for _, inside in sections(cover) for page in inside)
    assert [page for page, often in seen.items() if often > 1] == []


def named_places() -> Iterator[tuple[str, str]]:
    for page in written():
        if page.startswith(DATED):
            continue
        for line, phrase in phrases(read(page)):
            if PLACES.match(phrase):
                yield f"{page}:{line}", phrase


def test_files_named_in_pages_exist() -> None:
    """From the root, or from the package that the page is about."""
    missed = []
    for where, name in named_places():
        homes = (ROOT, ROOT / "src/potluck", *(ROOT / "src/potluck").iterdir())
        if not any((home / name).exists() for home in homes):
            missed.append(f"{where}: {name}")
    assert missed == []


def test_page_glossary_equals_the_docs_glossary() -> None:
    text = glossary.PAGE_FILE.read_text("utf-8")
    assert text == glossary.page_words(), "PYTHONPATH=src:tools python -m docsite.glossary writes it anew"


def test_glossary_has_each_word_once() -> None:
    result = glossary.entries(read("docs/glossary.md"))
    words = Counter(word.lower() for entry in result for word in entry.words)
    assert [word for word, often in words.items() if often > 1] == []
    assert all(entry.meaning for entry in result)
    assert set(glossary.linked_words().values()) <= {word for entry in result for word in entry.words}
    assert "| word | meaning |" not in read("ARCHITECTURE.md"), "words go to docs/glossary.md"


def test_glossary_words_are_linked_once_in_prose() -> None:
    text = "# KV\n\n`KV` and [KV](x.md) and KV-like, KV then KV\n\n    KV\n\n"
    text += "| KVs | replicas |\n|---|---|\n| a replica | |"
    got = glossary.linked(text, {"KV": "KV", "replica": "replica", "replicas": "replica"})
    assert got.count("{term}") == 2
    assert "and KV-like, {term}`KV <KV>` then KV" in got
    assert "| KVs | {term}`replicas <replica>` |" in got


def test_documented_spec_fields_equal_the_schema() -> None:
    assert set(spec_fields.words()) == spec_fields.all_sections()
    for kind in spec_fields.sections():
        word = spec_fields.words()[kind.__name__]["fields"]
        assert set(word) == set(spec_fields.field_names(kind)), kind.__name__
        assert all(row.says and row.kind for row in spec_fields.rows(kind))


@pytest.mark.parametrize("kind", spec_fields.sections(), ids=lambda kind: kind.__name__)
def test_every_spec_field_example_is_accepted(kind: type) -> None:
    word = spec_fields.words()[kind.__name__]["fields"]
    names = spec_fields.field_names(kind)  # type: ignore[arg-type]
    needed = {
        field: word[field]["example"][field]
        for field, name in names.items()
        if kind.model_fields[name].is_required()  # type: ignore[attr-defined]
    }
    for field, entry in word.items():
        assert field in entry["example"]
        kind.model_validate(needed | entry["example"])  # type: ignore[attr-defined]


def test_every_command_and_option_is_in_the_reference() -> None:
    result = commands.pages()
    assert {f"commands/{name}.md" for name in COMMANDS} < set(result)
    for words, command, _ in commands.tree():
        page = result[f"commands/{words[0]}.md"]
        assert f"# potluck {' '.join(words)}\n" in page
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert f"`{option.opts[0]}" in page, (words, option.opts)


def test_heading_anchors_equal_those_of_github() -> None:
    assert (
        slug("From here to there (`core/scaling/reconcile.py`)".replace("`", ""))
        == "from-here-to-there-corescalingreconcilepy"
    )
    assert anchors("# A b\n\n## A b\n\n```\n# no\n```\n") == {"a-b", "a-b-1"}
    assert outside_code("x\n\n    code\n\nx\n```\nx\n```", str.upper) == "X\n\n    code\n\nX\n```\nx\n```"


def test_documented_format_versions_equal_the_code() -> None:
    page = read("docs/formats.md")
    result = dict(re.findall(r"^\| `(potluck[.\w-]+)` \| (\d+) \|", page, flags=re.MULTILINE))
    assert {name: int(number) for name, number in result.items()} == {
        **values.FORMATS,
        PAGE_FORMAT: PAGE_VERSION,
    }


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("check", ["examples/one-node.yaml"]),
        ("estimate", ["--model", "Llama-3.1-8B", "--node", "2xL40S", "--input", "64", "--output", "8"]),
        ("trace stats", ["examples/traces/chat.csv"]),
        ("catalog gpus", []),
    ],
)
def test_commands_print_the_keys_listed_in_the_formats_page(
    command: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    row = next(line for line in read("docs/formats.md").splitlines() if line.startswith(f"| `{command}` |"))
    matches = set(re.findall(r"`(\w+)`", row.split("|")[2]))
    assert run([*command.split(), *arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert matches <= set(printed[0] if isinstance(printed, list) else printed)


def test_documented_fault_file_is_parsed() -> None:
    shown = next(block.text for block in blocks(read("docs/formats.md")) if "kind: replica" in block.text)
    result = parse_faults(shown, "docs/formats.md")
    assert {fault.kind for fault in result.faults} == set(get_args(FaultKind)), "every kind is shown"


def test_every_plan_column_is_explained() -> None:
    columns = {name for table in sample.heads(sample.in_page()) for name in table}
    assert len(columns) > 15
    message = read("docs/planning.md").replace(sample.in_page(), "")
    assert [name for name in columns if name not in message] == []


def commands_of(pages: dict[str, str]) -> tuple[int, list[str]]:
    """How many commands pages show, and which of them could not be run."""
    result = [(page, call) for page, text in pages.items() for call in calls(text)]
    wrong = [
        f"{page}:{call.line}: {' '.join(call.words)}: {why}"
        for page, call in result
        if (why := trouble(call, ROOT))
    ]
    return len(result), wrong


def test_documented_commands_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    count, wrong = commands_of({page: read(page) for page in written() if not page.startswith(DATED[:2])})
    assert count > 150
    assert wrong == []
    count, wrong = commands_of(commands.pages())
    assert count > 50
    assert [line for line in wrong if "[" not in line] == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("plna potluck.yaml", "no potluck plna"),
        ("plan potluck.yaml --out-file x", "--out-file"),
        ("bench --rate fast", "fast"),
        ("check examples/nowhere.yaml", "there is no examples/nowhere.yaml"),
        ("keys revoke", "NAME"),
    ],
)
def test_commands_that_cannot_be_run_are_detected(line: str, why: str) -> None:
    assert why in (trouble(Call(1, tuple(line.split()), True), ROOT) or "")


def test_command_lines_are_found_in_pages() -> None:
    page = "x `potluck top` y\n\n    potluck plan a.yaml  --out b   # so\n    $ potluck check 'a b' | less\n"
    assert [" ".join(call.words) for call in calls(page)] == ["plan a.yaml", "check a b", "top"]


def test_tests_named_in_the_terms_page_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", read("docs/terms.md")))
    assert len(named) > 15
    files = (ROOT / "tests").rglob("test_*.py")
    assert named <= {
        name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text("utf-8"), re.M)
    }


def test_alert_rules_name_exported_metrics() -> None:
    rules = next(block.text for block in blocks(read("docs/alerts.md")) if "groups:" in block.text)
    named = set(re.findall(r"\b(?:potluck_|vllm:)\w+", rules))
    assert len(named) > 5
    exported = {f"{name}{end}" for name in FAMILIES for end in ("", "_total", "_bucket")}
    assert named - exported == set()
    alerts = {rule["alert"] for group in yaml.safe_load(rules)["groups"] for rule in group["rules"]}
    assert alerts == set(re.findall(r"^\| `(Potluck\w+)` \|", read("docs/alerts.md"), re.M))


def test_messages_quoted_in_troubleshooting_exist() -> None:
    rows = [line for line in read("docs/troubleshooting.md").splitlines() if line[:2] == "| "]
    quoted = {words for row in rows for words in re.findall(r"\*([^*]+)\*", row.split(" | ")[0])} - {"pace"}
    assert len(quoted) > 5
    files = [ROOT / "Makefile", *(ROOT / "src").rglob("*.py")]
    text = re.sub(
        r'"\s*\n\s*f?"', "", "\n".join(file.read_text("utf-8") for file in files)
    )  # strings over lines
    assert [words for words in sorted(quoted) if words not in text] == []


HOUSE = "steward lobby nursery workshop strand parcel shipment freight pretend pretended ride rides wish desk twin"
OLD_WORDS = (*HOUSE.split(), "herald", "pail", "kits", "yard", "roster", "recast")


def test_pages_use_no_retired_words() -> None:
    """Names that the code once had of its own; code may show them."""
    pattern = re.compile(rf"\b({'|'.join(OLD_WORDS)})\b")
    result = []
    for page in written():
        if page != "CHANGELOG.md":
            plain = re.sub(r"`[^`\n]*`|^    .*$", "", read(page), flags=re.M).lower()
            result += [f"{page}: {word}" for word in pattern.findall(plain)]
    assert result == []
