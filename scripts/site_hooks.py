"""Inputs of the site from outside docs/: results, pages of the root, the command line's help."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "index.md": ROOT / "README.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
}
"""By page of the site: the file of the repository's root, where people look for it."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root, and the JSON files that tables are drawn from; return `files`."""
    results = {f"results/{path.name}": path for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    for page, path in (FROM_ROOT | results).items():
        files.append(File.generated(config, page, content=path.read_text().replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links into the repository into links of the site; fill in the command line's help."""
    markdown = markdown.replace("](../benchmarks/results/", "](results/")
    markdown = re.sub(
        r"\]\((?:\.\./)?(CHANGELOG|CONTRIBUTING)\.md", lambda m: f"]({m[1].lower()}.md", markdown
    )
    return markdown.replace("<!-- help of every command -->", help_of_every_command())


def help_of_every_command() -> str:
    """Return the output of `--help`, command by command."""
    from cogvideox_torchax import cli

    os.environ["COLUMNS"] = "90"
    # `_actions`, because argparse has no public list of a parser's commands.
    (commands,) = (action.choices for action in cli.parser()._actions if action.choices)
    return "\n\n".join(
        f"### {name}\n\n```text\n{command.format_help().rstrip()}\n```" for name, command in commands.items()
    )
