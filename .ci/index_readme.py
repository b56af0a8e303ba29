"""Make the links of a README absolute, as the package index needs them.

    python .ci/index_readme.py FOLDER    # writes FOLDER/README.md

In the repository they are relative, so that they stay right in a fork and on a branch. Their
beginning is the repository that pyproject.toml names, at the tag of its version.
"""

from __future__ import annotations

import re
import sys
import tomllib
from functools import partial
from pathlib import Path

_LINK = re.compile(
    r"""(?P<before>\]\(|(?:href|src|srcset)=")(?!\w+:|\#)(?P<path>[^)\s"\#]+)""",
)
_PICTURES = (".png", ".svg", ".jpg", ".gif")


def absolute(readme: str, repository: str, tag: str, folder: Path) -> str:
    """Return the text of a README whose relative links lead to a tag of its repository.

    Raises:
        LookupError: a link leads to no file of the folder.
    """
    return _LINK.sub(partial(_absolute, repository, tag, folder), readme)


def _absolute(repository: str, tag: str, folder: Path, link: re.Match[str]) -> str:
    path = link["path"]
    if not (folder / path).exists():
        raise LookupError(f"the README links to {path}, which does not exist")
    kind = "raw" if path.endswith(_PICTURES) else "tree" if (folder / path).is_dir() else "blob"
    return f"{link['before']}{repository}/{kind}/{tag}/{path}"


def main(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    readme = folder / "README.md"
    tag = f"v{project['version']}"
    readme.write_text(absolute(readme.read_text(), project["urls"]["Repository"], tag, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
