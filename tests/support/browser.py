"""Loads a page in a browser without a window, and runs a script in it after the page's own scripts."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def look(text, script, width, folder):
    """Returns the object ``report`` that ``script`` (JavaScript) builds. Skips the test without a browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} in PATH")
    shown = (
        'const box = document.createElement("pre"); box.id = "report"; box.textContent = JSON.stringify(report);'
        "document.body.replaceChildren(box);"
    )
    path = folder / "page.html"
    path.write_text(text.replace("</body>", f"<script>{script}\n{shown}</script></body>"))
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},900",
        "--dump-dom",
    ]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120)
    match = re.search(r"<pre id=\"report\">(.*?)</pre>", done.stdout)
    assert match, done.stderr[-2000:]
    return json.loads(html.unescape(match[1]))


def check_needs_no_network(text):
    """Checks that a page requests nothing from the network, and that every placeholder of its template was filled."""
    parser = _Links()
    parser.feed(text)
    assert parser.found == [] and not re.search(r"(?<!xmlns=\")https?:|@import|url\(", text)
    assert not re.search(r"@[A-Z]+@", text)


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href")]
