"""Looks at the built site in a real browser: `make docs-look`.

Chromium draws each page at the width of a laptop and of a phone, in the light and in the dark
theme, into build/docs-look. It also measures how wide each page is on a phone: one that is wider
than the screen scrolls sideways as a whole, which is an error. Tables and pictures may scroll by
themselves.
"""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SITE, PICTURES = Path("site"), Path("build/docs-look")

LAPTOP, PHONE = 1280, 400

THEMES = {
    "light": ["--blink-settings=preferredColorScheme=1"],
    "dark": ["--blink-settings=preferredColorScheme=0"],
}

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")

QUIET = (
    "--headless",
    "--no-sandbox",  # Containers, where documentation is built, often run as root.
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)

# Loads every page in a frame as wide as a phone, one after another, and notes what is too wide.
MEASURE = """<!doctype html><title>wait</title><iframe width=%d height=800></iframe><script>
const pages = %s, wide = {}, frame = document.querySelector("iframe");
const next = () => { if (pages.length) frame.src = pages.pop(); else document.body.innerText =
  "measured" + JSON.stringify(wide) };
frame.onload = () => {
  const root = frame.contentDocument.documentElement;
  if (root.scrollWidth > root.clientWidth) wide[frame.contentWindow.location.pathname] =
    root.scrollWidth;
  if (frame.src) next();
};
next();
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and says nothing about it."""

    def log_message(self, *_: object) -> None:
        pass


def main() -> int:
    """Draw and measure every page; the exit status says whether all fit a phone."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        print("No Chromium was found; on Debian, `apt install chromium` brings it.")
        return 2
    pages = sorted(path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html"))
    PICTURES.mkdir(parents=True, exist_ok=True)
    measure = SITE / "measure.html"
    measure.write_text(MEASURE % (PHONE, json.dumps([f"/{page}/index.html" for page in pages])))
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(SITE))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        with tempfile.TemporaryDirectory() as profile:
            chromium = [browser, *QUIET, f"--user-data-dir={profile}"]
            wide = measured(chromium, f"{address}/measure.html")
            for number, page in enumerate(pages, start=1):
                print(f"\r{number} of {len(pages)} pages", end="", flush=True)
                for theme, options in THEMES.items():
                    for width in (LAPTOP, PHONE):
                        picture = f"{page.replace('/', '-').strip('.') or 'home'}-{theme}-{width}"
                        draw(chromium + options, f"{address}/{page}/", width, picture)
    finally:
        measure.unlink()
        server.shutdown()
    print(f"\rPictures of {len(pages)} pages are in {PICTURES}.")
    for page, width in wide.items():
        print(f"{page} is {width} pixels wide on a phone of {PHONE}.")
    return 1 if wide else 0


def measured(chromium: list[str], address: str) -> dict[str, int]:
    """The pages that are wider than a phone, with their widths."""
    result = subprocess.run(
        [*chromium, "--virtual-time-budget=600000", "--dump-dom", address],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = re.search(r"measured(\{.*?\})<", result.stdout)
    if found is None:
        raise RuntimeError(f"The pages could not be measured:\n{result.stdout}")
    return json.loads(found[1])


def draw(chromium: list[str], address: str, width: int, name: str) -> None:
    """Draw the first screens of a page."""
    options = [f"--window-size={width},2400", "--virtual-time-budget=3000"]
    picture = f"--screenshot={PICTURES / name}.png"
    subprocess.run(
        [*chromium, *options, picture, address], check=True, capture_output=True, timeout=120
    )


if __name__ == "__main__":
    sys.exit(main())
