#!/usr/bin/env python3
"""Prints passages of this project's prose, drawn at random, for a reader who checks that each is clear at first reading.

    python3 setup/passages.py [--count 30] [--seed 1]

A passage is a paragraph of a document, a run of comment lines, or a string of at least four words in the sources (a message, a help
text). All passages in all documents and sources that git tracks are equally likely to be drawn.
"""
import argparse
import random
import re
import subprocess
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
COMMENT = {".rs": r"\s*//[/!]?\s?", ".cpp": r"\s*//+\s?", ".h": r"\s*//+\s?", ".cu": r"\s*//+\s?", ".py": r"\s*#\s", ".toml": r"\s*#\s"}
STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
WORDS_MIN = 4


def is_prose(text):
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= WORDS_MIN


def in_document(lines):
    """Yields the line number and the text of each paragraph, list item and table row outside fenced code."""
    start, passage, fenced = 0, [], False
    for number, line in enumerate(lines + [""], 1):
        fence = line.lstrip().startswith("```")
        begins = fence or fenced or not line.strip() or re.match(r"\s*([-*|>#]|\d+\.) ?", line)
        if begins and passage:
            yield start, " ".join(passage)
            passage = []
        fenced ^= fence
        if line.strip() and not fence and not fenced:
            start, passage = (number if not passage else start), passage + [line.strip()]


def in_source(lines, comment):
    """Yields the line number and the text of each block of comment lines and of each string."""
    start, passage, unfinished = 0, [], ""
    for number, line in enumerate(lines + [""], 1):
        line, unfinished = unfinished + (line.lstrip() if unfinished else line), ""
        mark = re.match(comment, line)
        text = line[mark.end():].strip() if mark else ""
        if text:
            start, passage = (number if not passage else start), passage + [text]
            continue
        if passage:
            yield start, " ".join(passage)
            passage = []
        if not mark and line.endswith("\\"):
            unfinished = line[:-1]  # The string goes on in the next line.
        elif not mark:
            yield from ((number, '"%s"' % found) for found in STRING.findall(line) if " " in found)


def passages():
    tracked = subprocess.run(["git", "ls-files"], cwd=PROJECT, stdout=subprocess.PIPE, check=True, text=True).stdout
    for name in tracked.splitlines():
        path = PROJECT / name
        if not path.is_file() or (path.suffix != ".md" and path.suffix not in COMMENT):
            continue
        lines = path.read_text(errors="replace").splitlines()
        found = in_document(lines) if path.suffix == ".md" else in_source(lines, COMMENT[path.suffix])
        yield from ((name, line, text) for line, text in found if is_prose(text))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--count", type=int, default=30)
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    everything = list(passages())
    for name, line, text in random.Random(options.seed).sample(everything, options.count):
        print("%s:%d\n    %s\n" % (name, line, text))
    print("%d of %d passages" % (options.count, len(everything)))


if __name__ == "__main__":
    main()
