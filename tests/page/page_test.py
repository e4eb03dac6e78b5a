#!/usr/bin/env python3
"""The page in headless Chromium, against a scripted server with the real server's policy.

Exit 77: no Chromium here, nothing was tested. Every check prints its name when it has passed.
"""
import os
import sys
import time

from browser import Browser, find_chromium
from scripted_server import EIGHT, EMPTY, EVIL, NESTED, WIDE, start

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TEXT = "document.getElementById('{}').textContent"


def text(browser, name):
    return browser.evaluate(TEXT.format(name))


def equal(got, expected, what):
    assert got == expected, f"{what}: expected {expected!r}, got {got!r}"


def fresh(browser, server, forest=EMPTY, **changes):
    """The page anew, with a script anew."""
    server.script.__init__()
    server.script.forest = forest
    for name, value in changes.items():
        setattr(server.script, name, value)
    browser.errors.clear()
    browser.go(f"http://127.0.0.1:{server.server_port}/")
    if server.script.key is None:
        browser.wait_for(TEXT.format("model") + ".startsWith('SmolLM2')")


def fill(browser, name, value):
    browser.evaluate(f"{{ const f = document.getElementById('{name}'); f.focus(); f.select(); }}")
    browser.write(value)


def test_by_keyboard_alone(browser, server):
    fresh(browser, server, EIGHT)
    order = []
    for _ in range(6):
        browser.key("Tab", 9)
        order.append(browser.evaluate("document.activeElement.id"))
        outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        equal(outline, "solid", f"outline of the focused {order[-1]}")
    equal(order, ["document", "questions", "samples", "tokens", "temperature", "ask"], "order of focus")
    fill(browser, "document", "a document of six words here")
    fill(browser, "questions", "first question\n\n  second  ")
    fill(browser, "samples", "2")
    browser.key("Enter", 13, modifiers=2)
    browser.wait_for("document.querySelectorAll('#answers article').length === 4")
    browser.wait_for(TEXT.format("status") + " === 'Done.'")
    body = server.script.completions[0]
    equal(len(server.script.completions), 1, "requests for all answers")
    equal((len(body["prompt"]), body["n"], body["stream"], body["max_tokens"]), (2, 2, True, 96), "prompts, n, stream, max_tokens")
    equal(server.script.tokenized[0]["messages"], [{"role": "system", "content": "a document of six words here"}, {"role": "user", "content": "first question"}], "messages")
    equal(browser.evaluate("[...document.querySelectorAll('#answers h3')].map((h) => h.textContent)"),
          ["first question (1)", "first question (2)", "second (1)", "second (2)"], "titles")
    for answer in browser.evaluate("[...document.querySelectorAll('#answers p')].map((p) => p.textContent)"):
        equal(answer, server.script.answer, "answer")
    feet = browser.evaluate("[...document.querySelectorAll('#answers footer')].map((f) => f.textContent)")
    assert feet[0].endswith("finished") and feet[1].endswith("cut at the limit"), feet
    summary = text(browser, "summary")
    assert "2,496 of 2,560 prompt tokens were in the cache" in summary, summary
    equal(browser.evaluate("document.querySelectorAll('[aria-busy=true]').length"), 0, "busy answers")


def test_nothing_is_run_as_markup(browser, server):
    forest = dict(EIGHT, path=EVIL, cascade=EVIL)
    fresh(browser, server, forest, answer=EVIL + " done")
    fill(browser, "document", EVIL)
    fill(browser, "questions", EVIL)
    browser.evaluate("document.getElementById('ask').click()")
    browser.wait_for(TEXT.format("status") + " === 'Done.'")
    equal(text(browser, "answers").count(EVIL), 2, "the markup as text")
    server.script.refuse = EVIL
    browser.evaluate("document.getElementById('ask').click()")
    browser.wait_for("document.getElementById('status').className === 'error'")
    equal(text(browser, "status"), EVIL, "the server's message as text")
    browser.wait_for(TEXT.format("facts") + ".includes('onerror')")
    equal(browser.evaluate("document.images.length + document.querySelectorAll('script').length"), 1, "images and scripts")
    equal(browser.evaluate("window.hacked"), None, "what the markup would have set")
    browser.errors[:] = [e for e in browser.errors if "status of 400" not in e]


def test_policy_refuses_what_the_page_does_not_need(browser, server):
    """A negative control: the policy is in force in this browser."""
    fresh(browser, server)
    browser.evaluate("{ const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s); }")
    browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<p id=evil onclick=\"window.hacked = 1\">x</p>'); document.getElementById('evil').click()")
    browser.evaluate("fetch('http://127.0.0.1:9/').catch(() => 0)")
    equal(browser.evaluate("window.hacked"), None, "what a script without nonce would have set")
    assert len(browser.errors) >= 3, browser.errors
    assert all("Content Security Policy" in e for e in browser.errors), browser.errors
    browser.errors.clear()


def shapes(browser, kind):
    return browser.evaluate(f"[...document.querySelectorAll('#drawing .{kind}')].map((r) => ['x', 'y', 'width', 'height'].map((a) => Number(r.getAttribute(a))))")


def test_shared_spans_are_drawn_once(browser, server):
    fresh(browser, server, NESTED)
    browser.wait_for("document.querySelectorAll('#drawing .once').length > 0")
    once, each, own, answer = (shapes(browser, kind) for kind in ("once", "each", "own", "answer"))
    equal((len(once), len(each), len(own), len(answer)), (4, 1, 12, 12), "spans, own prompts, answers")
    width = browser.evaluate("document.getElementById('drawing').clientWidth") - 2
    longest = max(r["tokens"] for r in NESTED["requests"])
    first, second = once[0], once[1]
    assert abs(first[2] - width * 1024 / longest) < 0.01, (first, width, longest)
    assert abs(second[0] - (first[0] + first[2])) < 0.01, "a span begins where the one around it ends"
    assert 7.5 < first[3] / (answer[1][1] - answer[0][1]) <= 8, "eight lanes high"
    assert abs(own[0][0] - (second[0] + second[2])) < 0.01, "own tokens begin where the deepest span ends"
    rights = [round((b[0] + b[2] - 1) * longest / width) for b in answer]
    equal(rights, [r["tokens"] for r in NESTED["requests"]], "widths of lanes in tokens")
    label = browser.evaluate("document.getElementById('drawing').getAttribute('aria-label')")
    assert label.startswith("12 requests, up to 1,385 tokens. 1,024 tokens shared by 8, read once; 272"), label
    read, flat = NESTED["kv_bytes_read"], NESTED["kv_bytes_flat"]
    equal(text(browser, "path"), f"cascade: {flat / read:.1f}× less read", "ratio")
    equal((text(browser, "read"), text(browser, "flat")), ("94.0 MB", "335 MB"), "bytes")
    assert abs(browser.evaluate("parseFloat(document.getElementById('read-bar').style.width)") - 100 * read / flat) < 0.01, "bar"


def test_at_most_64_lanes_and_none(browser, server):
    fresh(browser, server, WIDE)
    browser.wait_for("document.querySelectorAll('#drawing .answer').length === 64")
    assert "64 of 80 lanes drawn" in text(browser, "facts"), text(browser, "facts")
    server.script.forest = dict(EIGHT, running=0, path="flat", spans=[])
    browser.wait_for("document.getElementById('drawing').classList.contains('still')")
    equal(text(browser, "path"), "flat", "path")
    assert "Nothing is shared" in browser.evaluate("document.getElementById('drawing').getAttribute('aria-label')")


def test_a_step_without_requests_leaves_the_drawing(browser, server):
    fresh(browser, server, EIGHT)
    browser.wait_for("document.querySelectorAll('#drawing .answer').length === 8")
    server.script.forest = dict(EMPTY, step=EIGHT["step"] + 1, pages={"total": 728, "used": 0, "cached": 203, "free": 525})
    browser.wait_for(TEXT.format("facts") + ".includes('0 pages used')")
    equal(browser.evaluate("document.querySelectorAll('#drawing .answer').length"), 8, "lanes")
    equal(browser.evaluate("document.getElementById('drawing').classList.contains('still')"), True, "drawn as past")
    # A server that was started again begins anew.
    server.script.forest = EMPTY
    browser.wait_for(TEXT.format("drawing") + " === 'Nothing has run yet. Ask something.'")


def test_key(browser, server):
    fresh(browser, server, EIGHT, key="secret")
    browser.wait_for("!document.getElementById('key-row').hidden")
    fill(browser, "key", "secret")
    browser.key("Tab", 9)
    browser.wait_for("document.querySelectorAll('#drawing .once').length === 1")
    browser.evaluate("document.getElementById('ask').click()")
    browser.wait_for(TEXT.format("status") + " === 'Done.'")
    assert browser.evaluate("localStorage.length + sessionStorage.length") == 0, "the key is kept nowhere"
    browser.errors[:] = [e for e in browser.errors if "status of 401" not in e]


def test_stop_and_errors(browser, server):
    fresh(browser, server, EIGHT, gap=0.2)
    browser.evaluate("document.getElementById('ask').click()")
    browser.wait_for("document.querySelector('#answers p') && document.querySelector('#answers p').textContent.length > 3")
    browser.key("Escape", 27)
    browser.wait_for(TEXT.format("status") + " === 'Stopped.'")
    assert server.script.gone.wait(10), "the server sees that the client went away"
    equal(browser.evaluate("document.querySelectorAll('[aria-busy=true]').length"), 0, "busy answers")
    fill(browser, "samples", "9")
    browser.evaluate("document.getElementById('ask').click()")
    browser.wait_for(TEXT.format("status") + ".startsWith('At most 64 answers')")
    fill(browser, "samples", "0")
    browser.key("Enter", 13, modifiers=2)
    browser.wait_for(TEXT.format("status") + ".startsWith('Answers each:')")
    fill(browser, "samples", "1")
    fill(browser, "questions", " ")
    browser.key("Enter", 13, modifiers=2)
    browser.wait_for(TEXT.format("status") + " === 'Write at least one question.'")
    equal(len(server.script.completions), 1, "requests of refused input")


def test_model_without_chat_template(browser, server):
    fresh(browser, server, EIGHT, chat_template=False)
    fill(browser, "questions", "why")
    browser.evaluate("document.getElementById('ask').click()")
    browser.wait_for(TEXT.format("status") + " === 'Done.'")
    assert server.script.tokenized[-1]["prompt"].endswith("\n\nwhy\n"), server.script.tokenized[-1]
    browser.errors[:] = [e for e in browser.errors if "status of 400" not in e]


LUMINANCE = """((pairs) => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => { for (; node; node = node.parentElement) { const c = getComputedStyle(node).backgroundColor; if (c !== 'rgba(0, 0, 0, 0)') return c; } return 'rgb(255, 255, 255)'; };
  return pairs.map(([text, behind]) => {
    const node = document.querySelector(text), style = getComputedStyle(node);
    const a = light(node instanceof SVGElement ? style.fill : style.color);
    const b = light(behind ? getComputedStyle(document.querySelector(behind)).fill : ground(node));
    return [text, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  });
})([['h1'], ['header p'], ['label span'], ['#document'], ['#ask'], ['#status'], ['#path'], ['#answers h3'], ['#answers p'], ['#answers footer'],
    ['.facts'], ['.legend li'], ['#drawing .on', '.once'], ['#drawing .deep ~ .on', '.deep']])"""


def test_light_dark_wide_narrow(browser, server):
    for dark in (False, True):
        for width, height in ((1280, 800), (390, 844), (320, 600)):
            browser.show(width, height, dark)
            fresh(browser, server, NESTED)
            browser.evaluate("document.getElementById('ask').click()")
            browser.wait_for(TEXT.format("status") + " === 'Done.'")
            browser.wait_for("document.querySelector('#drawing .deep') !== null")
            scroll = browser.evaluate("document.documentElement.scrollWidth")
            assert scroll <= width, f"{width} wide, but {scroll} are needed"
            if width == 1280:
                for name, ratio in browser.evaluate(LUMINANCE):
                    assert ratio >= 4.5, f"{'dark' if dark else 'light'}: contrast of {name} is {ratio:.2f}"
    unnamed = [n for n in browser.call("Accessibility.getFullAXTree")["nodes"]
               if n.get("role", {}).get("value") in ("textbox", "spinbutton", "button", "image") and not n.get("name", {}).get("value") and not n.get("ignored")]
    equal(unnamed, [], "fields, buttons and images without a name")


def test_polls_only_while_it_is_looked_at(browser, server):
    fresh(browser, server, dict(EIGHT, running=0))
    before = server.script.paths.count("/v1/headwater/forest")
    time.sleep(1.5)
    assert server.script.paths.count("/v1/headwater/forest") - before <= 1, "an idle server is asked every two seconds"
    server.script.forest = EIGHT
    browser.evaluate("poll()")
    before = server.script.paths.count("/v1/headwater/forest")
    time.sleep(1.5)
    assert server.script.paths.count("/v1/headwater/forest") - before >= 3, "a busy one more often"


def main():
    program = find_chromium()
    if program is None:
        print("SKIPPED: no Chromium on PATH")
        return 77
    with open(os.path.join(ROOT, "server", "page", "index.html"), encoding="utf-8") as file:
        server = start(file.read())
    browser = Browser(program)
    try:
        for name, test in list(globals().items()):
            if not name.startswith("test_") or (len(sys.argv) > 1 and name not in sys.argv[1:]):
                continue
            browser.show(1280, 800)
            test(browser, server)
            assert not browser.errors, f"{name}: the browser complains: {browser.errors}"
            print(f"ok {name}")
        foreign = [u for u in browser.urls if not u.startswith((f"http://127.0.0.1:{server.server_port}/", "http://127.0.0.1:9/"))]
        equal(foreign, [], "requests to other places")
    finally:
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
