"""What tools/soak_server.sh runs: bounded load on a server for a while, polite clients and rude ones, its memory and its own
account of pages watched. Python's standard library only."""
import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

WORDS = ("river stone mill bridge winter harbor letter window garden market salmon granite turbine village mountain evening "
         "paper clock school fire brigade sluice quarry raft vineyard").split()


PATIENCE = 180  # seconds; a machine that does much else takes long for a step


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def counters(port):
    """name{labels} -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line and not line.startswith("#")}


def total(values, name):
    return sum(v for k, v in values.items() if k == name or k.startswith(name + "{"))


def launches(now):
    return " and ".join(f"{total(now, launches_by(path)):.0f} {path}" for path in ("flat", "cascade")) + " launches"


def launches_by(path):
    return f'headwater_decode_launches_total{{path="{path}"}}'


def resident_mib(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read()).group(1)) / 1024


def words(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


class Clients:
    """`kinds` of clients, each a thread that does one thing after another until told to stop."""

    def __init__(self, port, model):
        self.port, self.model = port, model
        self.stop = threading.Event()
        self.done, self.slowest, self.failures = {}, {}, []
        self.lock = threading.Lock()

    def request(self, path, body, raw=False):
        data = body if raw else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}), timeout=PATIENCE)

    def complete(self, rng, document):
        """One answer, whole; sometimes several samples, sometimes chat."""
        body = {"model": self.model, "max_tokens": rng.randint(1, 48), "temperature": rng.choice([0, 0.8]), "n": rng.choice([1, 1, 1, 3]), "stream": True,
                "stream_options": {"include_usage": True}, "ignore_eos": True}
        if rng.random() < 0.5:
            path, body["prompt"] = "/v1/completions", document + words(rng, rng.randint(1, 40))
        else:
            path, body["messages"] = "/v1/chat/completions", [{"role": "system", "content": document}, {"role": "user", "content": words(rng, 12)}]
        with self.request(path, body) as answer:
            events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", events[-1]
        usage = json.loads(events[-2])["usage"]
        assert usage["completion_tokens"] == body["max_tokens"] * body["n"], usage

    def leave(self, rng, document):
        """Goes away in mid-stream."""
        body = json.dumps({"model": self.model, "prompt": document + words(rng, 8), "max_tokens": 400, "stream": True, "ignore_eos": True}).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            for _ in range(rng.randint(0, 3)):
                s.recv(512)
            if rng.random() < 0.5:  # not a close, a reset
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def misbehave(self, rng, _document):
        """Is refused, and only that."""
        bodies = [b"{", b"[]", b"{\"prompt\":", b"\xff\xfe", b"{\"prompt\": 1}", b"{\"prompt\": \"x\", \"max_tokens\": -1}", b"[" * 5000, b""]
        try:
            self.request("/v1/completions", rng.choice(bodies), raw=True).read()
            raise AssertionError("nonsense was accepted")
        except urllib.error.HTTPError as refusal:
            assert refusal.code == 400, refusal.code
            assert "error" in json.loads(refusal.read())

    def knock(self, rng, _document):
        """Opens connections and says little or nothing."""
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as s:
                if rng.random() < 0.5:
                    s.sendall(b"GET /v1/models HT")

    def look(self, _rng, _document):
        """The page's eyes."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/headwater/forest", timeout=PATIENCE) as answer:
            forest = json.loads(answer.read())
        assert forest["kv_bytes_read"] <= forest["kv_bytes_flat"], forest

    def loop(self, what, seed, pause):
        rng = random.Random(seed)
        documents = [words(random.Random(i), 250) + " " for i in range(3)]
        while not self.stop.is_set():
            begin = time.monotonic()
            try:
                what(rng, rng.choice(documents))
                with self.lock:
                    self.done[what.__name__] = self.done.get(what.__name__, 0) + 1
                    self.slowest[what.__name__] = max(self.slowest.get(what.__name__, 0), time.monotonic() - begin)
            except Exception as error:  # every kind is a finding
                with self.lock:
                    self.failures.append(f"{what.__name__}: {type(error).__name__}: {error}")
            self.stop.wait(pause)

    def start(self):
        kinds = [(self.complete, 0)] * 8 + [(self.leave, 0.2)] * 2 + [(self.misbehave, 0.2), (self.knock, 0.5), (self.look, 0.25)]
        self.threads = [threading.Thread(target=self.loop, args=(what, seed, pause)) for seed, (what, pause) in enumerate(kinds)]
        for thread in self.threads:
            thread.start()

    def finish(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()


def quiet(port, seconds):
    """Waits until nothing runs any more; the counters of that moment."""
    end = time.monotonic() + seconds
    while True:
        now = counters(port)
        if total(now, "headwater_samples_running") + total(now, "headwater_samples_waiting") + total(now, "headwater_requests_pending") == 0:
            return now
        if time.monotonic() > end:
            raise SystemExit(f"FAILED: still running {seconds} s after the last client: " + ", ".join(f"{k} {v:g}" for k, v in now.items() if "running" in k or "waiting" in k or "pending" in k))
        time.sleep(0.1)


def audit(now, findings):
    """The pages' account adds up, and nobody holds any."""
    pages = {state: now[f'headwater_kv_pages{{state="{state}"}}'] for state in ("used", "cached", "free")}
    if pages["used"] != 0:
        findings.append(f"{pages['used']:g} pages are still in use by nobody")
    return pages, sum(pages.values())


def main():
    parser = argparse.ArgumentParser(prog="tools/soak_server.sh", description=__doc__)
    parser.add_argument("command", help="the program headwater")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", help="GGUF file; default: the command's own")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--allow-mib", type=float, default=8, help="growth that is no finding (sanitizers keep freed memory for a while)")
    flags = parser.parse_args()

    port = free_port()
    log = tempfile.TemporaryFile()
    # A small cache, so that pages run out and prefixes are evicted.
    serve = [flags.command, "serve", "--port", str(port), "--kv-mib", "32", "--max-step-tokens", "256", "--threads", str(flags.threads)]
    server = subprocess.Popen(serve + (["--model", flags.model] if flags.model else []), stdout=log, stderr=log)

    def last_lines():
        log.seek(0)
        return b"".join(log.readlines()[-10:]).decode(errors="replace")

    try:
        for _ in range(600):
            if server.poll() is not None:
                print(last_lines())
                return 77 if server.returncode == 3 and not flags.model else 1
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5)
                break
            except OSError:
                time.sleep(0.1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
            model = json.loads(answer.read())["data"][0]["id"]
        findings = []
        _, pages_in_all = audit(counters(port), findings)
        clients = Clients(port, model)
        clients.start()
        samples = []
        begin = time.monotonic()
        while time.monotonic() - begin < flags.seconds and server.poll() is None:
            time.sleep(min(1.0, flags.seconds / 40))
            samples.append(resident_mib(server.pid))
            if sys.stderr.isatty():
                print(f"\r{time.monotonic() - begin:.0f} of {flags.seconds:.0f} s, {samples[-1]:.1f} MiB, {sum(clients.done.values())} done, {len(clients.failures)} failures ", end="", file=sys.stderr)
        clients.finish()
        if server.poll() is not None:
            print(f"FAILED: the server ended with status {server.returncode}\n{last_lines()}")
            return 1
        now = quiet(port, 60)
        pages, in_all = audit(now, findings)
        if in_all != pages_in_all:
            findings.append(f"{pages_in_all:g} pages at the start, {in_all:g} at the end")
        findings += sorted(set(clients.failures))[:20]
        # The first quarter fills caches and allocators; from then on memory must not grow.
        quarter = max(len(samples) // 4, 1)
        early, late = statistics.median(samples[quarter:2 * quarter]), statistics.median(samples[-quarter:])
        allowed = max(0.02 * early, flags.allow_mib)
        if late - early > allowed:
            findings.append(f"memory grew from {early:.1f} to {late:.1f} MiB, more than {allowed:.1f}")
        for kind in ("complete", "leave", "misbehave", "knock", "look"):
            if clients.done.get(kind, 0) == 0:
                findings.append(f"no client of the kind `{kind}` got anything done")
        for counter in (launches_by("cascade"), "headwater_prefix_cache_evicted_pages_total"):
            if total(now, counter) == 0:
                findings.append(f"{counter} is 0: the load did not reach it")
        server.send_signal(signal.SIGTERM)
        status = server.wait(90)
        if status != 0:
            findings.append(f"the server ended with status {status} after SIGTERM")
        print(f"{flags.seconds:.0f} s: " + ", ".join(f"{k} {v} (at most {clients.slowest[k]:.1f} s)" for k, v in sorted(clients.done.items())) + f"; {total(now, 'headwater_generated_tokens_total'):.0f} tokens, "
              f"{launches(now)}; "
              f"{total(now, 'headwater_preemptions_total'):.0f} pre-emptions, {total(now, 'headwater_prefix_cache_evicted_pages_total'):.0f} pages evicted; "
              f"memory {early:.1f} -> {late:.1f} MiB (most {max(samples):.1f}); pages used {pages['used']:.0f}, cached {pages['cached']:.0f}, free {pages['free']:.0f}")
        for finding in findings:
            print("FAILED: " + finding)
        return 1 if findings else 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
        log.close()


if __name__ == "__main__":
    sys.exit(main())
