"""Serves the page with the server's own policy and answers what the page asks for, by a script.

The forest's shapes are those of a real server; an answer is a few words per stream.
"""
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EVIL = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script>"


def request(index, prompt, tokens, rows=1):
    return {"id": f"cmpl-{index:04x}", "sample": 0, "prompt_tokens": prompt, "tokens": tokens, "rows": rows}


def forest(requests, spans, **changes):
    flat = sum(r["tokens"] for r in requests)
    read = flat - sum(s["tokens"] * (s["members"] - 1) for s in spans if s["split"])
    out = {"step": 412, "path": "cascade" if any(s["split"] for s in spans) else "flat", "cascade": "auto", "running": len(requests),
           "waiting": 0, "num_requests": len(requests), "requests": requests[:64], "spans": spans, "kv_bytes_read": read * 23040,
           "kv_bytes_flat": flat * 23040, "kv_bytes_unique": read * 23040, "decode_rows": len(requests), "prefill_rows": 0,
           "step_seconds": 0.0184, "pages": {"total": 728, "used": 178, "cached": 199, "free": 351}, "page_size": 16}
    out.update(changes)
    return out


def span(begin, tokens, first, members, depth=0, split=True):
    return {"begin": begin, "tokens": tokens, "first": first, "members": members, "depth": depth, "split": split}


EMPTY = forest([], [], step=0, running=0, path="flat", kv_bytes_read=0, kv_bytes_flat=0, step_seconds=0)
EIGHT = forest([request(i, 640 + 7 * i, 668 + 11 * i) for i in range(8)], [span(0, 624, 0, 8)])
# Two documents, one with samples of two questions; a span too short to be worth it; an outsider.
NESTED = forest([request(i, 1300 if i < 4 else 1290 if i < 8 else 900 if i < 11 else 420, (1300 if i < 4 else 1290 if i < 8 else 900 if i < 11 else 420) + 60 + 5 * i)
                 for i in range(12)],
                [span(0, 1024, 0, 8), span(1024, 272, 0, 4, 1), span(1024, 256, 4, 4, 1), span(0, 848, 8, 3), span(848, 32, 8, 2, 1, False)], waiting=3)
WIDE = forest([request(i, 2080, 2090 + i % 7) for i in range(80)], [span(0, 2048, 0, 80)])
FORESTS = {"empty": EMPTY, "eight": EIGHT, "nested": NESTED, "wide": WIDE}


class Script:
    """What the next requests get, and what was asked."""

    def __init__(self):
        self.forest = EMPTY
        self.key = None
        self.refuse = None       # message of a 400 to the next completion
        self.answer = "The weir was built by Marta Holl, a miller's widow, in 1786 and again in granite, since the ice broke the first one."
        self.gap = 0.01
        self.chat_template = True
        self.completions, self.tokenized, self.paths = [], [], []
        self.gone = threading.Event()  # a client went away in mid-stream


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, status, body, kind="application/json", headers=()):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def refused(self):
        key = self.server.script.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self.send(401, {"error": {"message": "a key is needed", "type": "invalid_request_error", "param": None, "code": None}})
        return True

    def do_GET(self):
        script = self.server.script
        script.paths.append(self.path)
        if self.path == "/":
            nonce = "c0ffee"
            page = re.sub(r"<(script|style)", rf'<\1 nonce="{nonce}"', self.server.page)
            policy = (f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src 'self' data:; "
                      "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
            self.send(200, page, "text/html; charset=utf-8", [("Content-Security-Policy", policy)])
        elif self.refused():
            pass
        elif self.path == "/v1/models":
            self.send(200, {"object": "list", "data": [{"id": "SmolLM2-135M-Instruct.Q4_1", "object": "model"}]})
        elif self.path == "/v1/headwater/forest":
            self.send(200, script.forest)
        else:
            self.send(404, {"error": {"message": "no such path"}})

    def do_POST(self):
        script = self.server.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        if self.path == "/tokenize":
            script.tokenized.append(body)
            if "messages" in body and not script.chat_template:
                self.send(400, {"error": {"message": "this model has no chat template"}})
                return
            text = body.get("prompt") or " ".join(m["content"] for m in body["messages"])
            self.send(200, {"count": len(text.split()), "max_model_len": 8192, "tokens": [len(w) for w in text.split()]})
        elif self.path == "/v1/completions":
            script.completions.append(body)
            if script.refuse:
                self.send(400, {"error": {"message": script.refuse, "type": "invalid_request_error", "param": "max_tokens", "code": None}})
                script.refuse = None
            else:
                self.stream(body)
        else:
            self.send(404, {"error": {"message": "no such path"}})

    def stream(self, body):
        script = self.server.script
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        choices = len(body["prompt"]) * body["n"]
        words = script.answer.split(" ")
        count = 0
        try:
            for i, word in enumerate(words):
                for choice in range(choices):
                    last = i + 1 == len(words)
                    self.event({"choices": [{"index": choice, "text": (" " if i else "") + word, "finish_reason": None}]})
                    if last:
                        self.event({"choices": [{"index": choice, "text": "", "finish_reason": "length" if choice % 2 else "stop"}]})
                    count += 1
                time.sleep(script.gap)
            self.event({"choices": [], "usage": {"prompt_tokens": 640 * choices, "completion_tokens": count,
                                                 "prompt_tokens_details": {"cached_tokens": 624 * choices}}})
            self.piece(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            script.gone.set()
            self.close_connection = True

    def event(self, value):
        self.piece(b"data: " + json.dumps(value).encode() + b"\n\n")

    def piece(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A page that is left goes away in mid-answer; anything else is a defect of this script."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def start(page):
    """A server on a port of its own; `.script` is what it follows."""
    server = Server(("127.0.0.1", 0), Handler)
    server.page = page
    server.script = Script()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
