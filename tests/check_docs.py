#!/usr/bin/env python3
"""Checks links, paths, test names, decision numbers and commands in the documents, and type names and phrases in the sources."""
import re
import subprocess
import unittest
from collections import defaultdict
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
# Types that are defined twice: once for builds with a feature, and once for builds without it.
DEFINED_TWICE = {"S3Options"}
# Phrases that readers had to read twice.
BANNED = re.compile(r"\b(what is no|that is none|is said\b|of before\b|is what it was|in vain\b|[Ww]hoever\b|speaks\b|as it was\b)")


def tracked(*suffixes):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, check=True, text=True).stdout
    paths = [PROJECT / name for name in sorted(set(listed.splitlines()))]
    return [path for path in paths if path.suffix in suffixes and path.is_file()]


def without_code(text):
    return re.sub(r"```.*?```", "", text, flags=re.S)


def anchors(text):
    """The anchors that GitHub makes for the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", without_code(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


class Documents(unittest.TestCase):
    def test_relative_links_lead_somewhere(self):
        for page in tracked(".md"):
            for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
                if re.match(r"[a-z]+:", link):
                    continue
                name, _, anchor = link.partition("#")
                target = (page.parent / name).resolve() if name else page
                self.assertTrue(target.exists(), "%s links to a missing file: %s" % (page, link))
                if anchor and target.suffix == ".md":
                    self.assertIn(anchor, anchors(target.read_text()), "%s links to a missing heading: %s" % (page, link))

    def test_paths_of_sources_exist(self):
        for page in tracked(".md"):
            if page.name == "CHANGELOG.md" or "decisions" in page.parts or "experiments" in page.parts:
                continue  # These pages describe older versions.
            for path in re.findall(r"`((?:core|launcher|src|tests|setup|docs|configs)/[\w./-]*)`", page.read_text()):
                if not re.search(r"[A-Z]{4}\.", path):  # `verbs/NAME.rs` stands for any name.
                    self.assertTrue((PROJECT / path).exists(), "%s names a missing path: %s" % (page, path))

    def test_named_tests_exist(self):
        sources = "\n".join(path.read_text() for path in tracked(".rs", ".py"))
        text = (PROJECT / "docs" / "ARCHITECTURE.md").read_text()
        invariants = text[text.index("## Invariants"):]
        names = re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+){2,})`", invariants)
        self.assertGreater(len(names), 15)
        for name in names:
            self.assertTrue(re.search(r"fn %s\b" % name, sources), "docs/ARCHITECTURE.md names a test that does not exist: %s" % name)

    def test_decisions_have_the_number_of_their_file(self):
        for page in (PROJECT / "docs" / "decisions").glob("0*.md"):
            first = page.read_text().splitlines()[0]
            self.assertTrue(first.startswith("# %d. " % int(page.name[:4])), "%s has the wrong number in its title: %s" % (page, first))

    def test_no_command_is_cut(self):
        for block in re.findall(r"```.*?```|`[^`\n]+`", (PROJECT / "docs" / "BENCHMARKS.md").read_text(), flags=re.S):
            if "locdiff-launch" in block or "cargo " in block or "python3 " in block:
                self.assertNotIn("...", block)


class Words(unittest.TestCase):
    def test_a_type_name_means_one_thing(self):
        places = defaultdict(list)
        for path in tracked(".rs"):
            name = path.relative_to(PROJECT).as_posix()
            if name.startswith(("core/src/", "launcher/src/", "src/")):
                pattern = r"^(?:pub(?:\([a-z ]+\))? )?(?:struct|enum|trait|type|union) (\w+)"
                for found in re.findall(pattern, path.read_text(), flags=re.M):
                    places[found].append(name)
        twice = {name: where for name, where in places.items() if len(where) > 1 and name not in DEFINED_TWICE}
        self.assertEqual(twice, {})

    def test_no_phrase_needs_a_second_reading(self):
        for path in tracked(".rs", ".md", ".py", ".toml", ".cpp", ".h", ".cu"):
            if path != Path(__file__).resolve():
                found = BANNED.search(path.read_text(errors="replace"))
                self.assertIsNone(found, "%s uses a banned phrase: %s" % (path, found and found.group()))


if __name__ == "__main__":
    unittest.main()
