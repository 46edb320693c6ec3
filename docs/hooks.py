"""What mkdocs does with our pages before it renders them.

The pages are written to be read in the repository too. There, a link may lead out of ``docs`` to an
example or a recipe: the site carries a copy of that file. The changelog and the contribution guide
are pages of the site, taken from where they are. The marks that the tests read become captions.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
#: Pages of the repository's root that are the site's own under another name.
SAME = {**{there: here for here, there in PAGES.items()}, "README.md": "index.md"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
#: The list of a page's own headings: the site has it in the margin.
CONTENTS = re.compile(r"^(?:- \[[^\]]*\]\(#[^)]*\)\n){3,}\n?", re.MULTILINE)
OUTPUT = re.compile(r"^<!-- output -->\n```(\w*)\n", re.MULTILINE)


def on_files(files, config):
    """The root's pages, and what pages link to outside of ``docs``."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for page in list(files.documentation_pages()):
        for match in LINK.finditer(page.content_string):
            name = _outside(page.src_uri, match[2])
            if name and name not in SAME and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown, page, config, files):
    def link(match):
        name = _outside(page.file.src_uri, match[2])
        if name is None:
            return match[0]
        here = posixpath.dirname(page.file.src_uri) or "."
        target = posixpath.relpath(SAME.get(name, name), here)
        return match[1] + target + (match[3] or "") + match[4]

    markdown = CONTENTS.sub("", markdown)
    markdown = OUTPUT.sub(r'```\1 title="Output"\n', LINK.sub(link, markdown))
    return markdown.replace("<!-- no-run -->\n", "")


def _outside(page, target):
    """The path from the repository's root, for a link to a file that is not below ``docs``."""
    if "://" in target or target.startswith(("/", "mailto:")):
        return None
    folder = "" if page in PAGES else posixpath.join("docs", posixpath.dirname(page))
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith("docs/"):
        # From a page of the root, the way into docs is a way out of nothing.
        return posixpath.relpath(path, "docs") if page in PAGES else None
    return path if (ROOT / path).is_file() else None
