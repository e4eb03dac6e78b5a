#!/usr/bin/env python3
"""Pictures of the page, light and dark, wide and narrow, to be looked at: screenshots.py FOLDER."""
import os
import sys

from browser import Browser, find_chromium
from scripted_server import EIGHT, FORESTS, start

folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)
root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
with open(os.path.join(root, "server", "page", "index.html"), encoding="utf-8") as file:
    server = start(file.read())
browser = Browser(find_chromium())
try:
    url = f"http://127.0.0.1:{server.server_port}/"
    for width, height in ((1280, 800), (390, 844)):
        for dark in (False, True):
            name = f"{'dark' if dark else 'light'}-{width}"
            browser.show(width, height, dark)
            server.script.forest = FORESTS["empty"]
            browser.go(url)
            browser.wait_for("document.getElementById('model').textContent.startsWith('SmolLM2')")
            browser.screenshot(f"{folder}/{name}-start.png", whole=width < 800)
            server.script.forest = EIGHT
            browser.evaluate("document.getElementById('ask').click()")
            browser.wait_for("document.getElementById('status').textContent === 'Done.'")
            browser.wait_for("document.querySelectorAll('#drawing .once').length === 1")
            browser.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
            size = browser.evaluate("document.documentElement.scrollHeight")
            browser.show(width, size if width < 800 else height, dark)
            browser.screenshot(f"{folder}/{name}-eight.png")
            browser.show(width, height, dark)
            for kind in ("nested", "wide"):
                server.script.forest = FORESTS[kind]
                browser.evaluate("poll()")
                browser.wait_for(f"latest.num_requests === {FORESTS[kind]['num_requests']}")
                browser.screenshot(f"{folder}/{name}-{kind}.png")
finally:
    print("\n".join(browser.errors))
    browser.close()
