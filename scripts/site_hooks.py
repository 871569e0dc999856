"""Inputs of the site from outside docs/: results, pages of the root, the command line's help."""

import io
import os
import re
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""By page of the site: the file of the repository's root, where people look for it."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root, and the JSON files that tables are drawn from; return `files`."""
    for page, source in FROM_ROOT.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        files.append(File.generated(config, f"results/{path.name}", content=path.read_text()))
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
    parts = []
    for name in cli.COMMANDS:
        printed = io.StringIO()
        with redirect_stdout(printed), suppress(SystemExit):
            cli.main([name, "--help"])
        parts.append(f"## {name}\n\n```text\n{printed.getvalue().rstrip()}\n```")
    return "\n\n".join(parts)
