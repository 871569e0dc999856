"""The code blocks of a Markdown page, and how each is run on a small model."""

import itertools
import re
import shlex
from dataclasses import dataclass

from tests.processes import ROOT

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w+)\n(?P<text>(?s:.*?))^```$"
    r"|(?P<indented>^ {4}\S.*\n(?:^ {4}.*\n|\n(?= {4}))*)",
    re.MULTILINE,
)
COMMANDS = ("cogvideox-torchax", "python", "pip", "make", "git", "cd", "ln", "pre-commit")
"""First words of a line of a shell block, settings of the environment aside."""


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page, line: where it is.
        language: "python", "bash", ...; "text" of an indented block, and "commands" where it begins with one.
        text: what it holds.
        reason: why it is not run, or None.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def commands(self) -> list[list[str]]:
        """The command lines of a shell block, without comments, settings of variables, redirections."""
        lines = [
            line for line in self.text.replace("\\\n", " ").splitlines() if not re.match(r"\w+=\$\(", line)
        ]
        words = [shlex.split(line, comments=True) for line in lines]
        words = [line[: line.index(">")] if ">" in line else line for line in words]
        bare = [[word for i, word in enumerate(line) if i or "=" not in word] for line in words]
        parts = (itertools.groupby(line, "&&".__eq__) for line in bare)
        return [list(words) for line in parts for is_and, words in line if not is_and]


def blocks(page: str) -> list[Block]:
    """Return every code block of a page, in order."""
    text = (ROOT / page).read_text()
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["indented"] is None:
            found.append(Block(page, line, match["language"], match["text"], match["reason"]))
        else:
            body = re.sub(r"^ {4}", "", match["indented"], flags=re.MULTILINE)
            first = body.split()[1] if "=" in body.split()[0] else body.split()[0]
            found.append(Block(page, line, "commands" if first in COMMANDS else "text", body, "indented"))
    return found
