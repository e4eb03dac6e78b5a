#!/usr/bin/env python3
"""End to end: the official `openai` client against `headwater serve` with a real model.

  openai_test.py --headwater build/cli/headwater [--model FILE]

Ends with 77 (which CTest shows as skipped) where the package `openai` or the model is missing; prints why.
"""
import argparse
import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

SKIPPED = 77
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ARGS = None

try:
    import openai
except ImportError:
    openai = None


class Server:
    """A running `headwater serve` on a free port."""

    def __init__(self, *flags, key=None, env=None):
        self.log = tempfile.NamedTemporaryFile("r", suffix=".log")
        environment = {**os.environ, **(env or {})}
        if key:
            environment["HEADWATER_API_KEY"] = key
        command = [ARGS.headwater, "serve", "--model", ARGS.model, "--port", "0", "--log-file", self.log.name, *flags]
        self.process = subprocess.Popen(command, env=environment)
        self.url = None
        for _ in range(1200):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}: {self.text()}")
            found = re.search(r"ready model=(\S+) address=(\S+)", self.text())
            if found:
                self.model, self.url = found[1], "http://" + found[2]
                break
            time.sleep(0.1)
        else:
            raise RuntimeError("the server was not ready within two minutes")
        # The client's own retries would hide what the server said.
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key=key or "none", max_retries=0, timeout=120)

    def text(self):
        with open(self.log.name, encoding="utf-8") as file:
            return file.read()

    def metric(self, name):
        with urllib.request.urlopen(self.url + "/metrics") as page:
            for line in page.read().decode().splitlines():
                if line.startswith(name + " "):
                    return float(line.rsplit(" ", 1)[1])
        return 0.0

    def stop(self, signals=1):
        for _ in range(signals):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                time.sleep(0.05)
        return self.process.wait(timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def wait_until(condition, seconds=20):
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


class Client(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.client = cls.server.client

    @classmethod
    def tearDownClass(cls):
        code = cls.server.stop()
        cls.server.__exit__()
        assert code == 0, f"the server ended with {code}"

    def chat(self, text="Name the capital of France.", **fields):
        fields = {"max_tokens": 16, "temperature": 0, **fields}
        return self.client.chat.completions.create(
            model=self.server.model, messages=[{"role": "user", "content": text}], **fields)

    def complete(self, prompt="The capital of France is", **fields):
        fields = {"max_tokens": 12, "temperature": 0, **fields}
        return self.client.completions.create(model=self.server.model, prompt=prompt, **fields)

    def test_models(self):
        self.assertEqual([m.id for m in self.client.models.list()], [self.server.model])
        self.assertEqual(self.client.models.list().data[0].owned_by, "headwater")

    def test_chat(self):
        answer = self.chat()
        self.assertEqual(answer.choices[0].message.role, "assistant")
        self.assertIn("Paris", answer.choices[0].message.content)
        self.assertIn(answer.choices[0].finish_reason, ("stop", "length"))
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)

    def test_chat_stream_is_the_whole_answer_in_pieces(self):
        whole = self.chat(max_tokens=40)
        text, finish, usage, roles = "", None, None, []
        for chunk in self.chat(max_tokens=40, stream=True, stream_options={"include_usage": True}):
            if chunk.usage:
                usage = chunk.usage
                self.assertEqual(chunk.choices, [])
                continue
            self.assertIsNone(finish)
            text += chunk.choices[0].delta.content or ""
            roles += [chunk.choices[0].delta.role] if chunk.choices[0].delta.role else []
            finish = chunk.choices[0].finish_reason
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(finish, whole.choices[0].finish_reason)
        self.assertEqual(roles, ["assistant"])
        self.assertEqual(usage.completion_tokens, whole.usage.completion_tokens)
        self.assertGreater(usage.prompt_tokens_details.cached_tokens, 0)

    def test_completions(self):
        answer = self.complete()
        self.assertIn("Paris", answer.choices[0].text)
        pieces = "".join(c.choices[0].text for c in self.complete(stream=True))
        self.assertEqual(pieces, answer.choices[0].text)

    def test_lists_of_prompts_and_tokens(self):
        both = self.complete(["The capital of France is", "One, two, three,"])
        self.assertEqual([c.index for c in both.choices], [0, 1])
        self.assertIn("Paris", both.choices[0].text)
        self.assertIn("four", both.choices[1].text)
        request = urllib.request.Request(self.server.url + "/tokenize", b'{"prompt": "The capital of France is"}',
                                         {"Content-Type": "application/json"})
        tokens = json.load(urllib.request.urlopen(request))["tokens"]
        self.assertIn("Paris", self.complete(tokens).choices[0].text)
        self.assertEqual(len(self.complete([tokens, tokens]).choices), 2)

    def test_n(self):
        first = self.chat("Tell me a story.", n=4, temperature=1.2, seed=7)
        self.assertEqual([c.index for c in first.choices], [0, 1, 2, 3])
        self.assertGreater(len({c.message.content for c in first.choices}), 1)
        unseeded = {self.chat("Tell me a story.", temperature=1.2).choices[0].message.content for _ in range(3)}
        self.assertGreater(len(unseeded), 1)

    def test_logprobs(self):
        answer = self.chat(logprobs=True, top_logprobs=3)
        places = answer.choices[0].logprobs.content
        text = b"".join(bytes(p.bytes) for p in places).decode()
        self.assertEqual(text, answer.choices[0].message.content)
        for place in places:
            self.assertEqual(len(place.top_logprobs), 3)
            self.assertAlmostEqual(place.logprob, place.top_logprobs[0].logprob, places=5)
        answer = self.complete(logprobs=2, echo=True, max_tokens=4)
        told = answer.choices[0].logprobs
        self.assertEqual("".join(told.tokens), answer.choices[0].text)
        self.assertIsNone(told.token_logprobs[0])
        self.assertTrue(all(p < 0 for p in told.token_logprobs[1:]))

    def test_stop(self):
        full = self.complete("One, two, three,", max_tokens=24).choices[0].text
        self.assertIn("six", full)
        for stream in (False, True):
            answer = self.complete("One, two, three,", max_tokens=24, stop=["six", "nothing"], stream=stream)
            chunks = list(answer) if stream else [answer]
            self.assertEqual("".join(c.choices[0].text for c in chunks), full[: full.index("six")])
            self.assertEqual(chunks[-1].choices[0].finish_reason, "stop")

    def test_characters_are_whole(self):
        # Tokens that end inside a character are common in what this asks for; a piece cut there would hold U+FFFD.
        asked = "Repeat: 日本語 🌊🌊 ñandú"
        whole = self.chat(asked, max_tokens=80).choices[0].message.content
        pieces = [c.choices[0].delta.content or "" for c in self.chat(asked, max_tokens=80, stream=True)]
        self.assertEqual("".join(pieces), whole)
        self.assertGreater(len(whole.encode()), len(whole), "nothing but ASCII: the test tests nothing")

    def test_penalties_and_bias(self):
        plain = self.complete("la la la la la la", max_tokens=16).choices[0].text
        other = self.complete("la la la la la la", max_tokens=16, frequency_penalty=2, presence_penalty=2)
        self.assertNotEqual(other.choices[0].text, plain)
        self.assertEqual(set(self.complete(max_tokens=5, logit_bias={"28": 100}).choices[0].text), {","})

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(temperature=9)
        self.assertEqual(caught.exception.param, "temperature")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(tools=[{"type": "function", "function": {"name": "f"}}])
        self.assertEqual(caught.exception.code, "unsupported_parameter")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat("word " * 9000)
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.completions.create(model="another", prompt="x")
        self.assertEqual(caught.exception.code, "model_not_found")

    def test_a_client_that_leaves_is_cancelled(self):
        before = self.server.metric('headwater_requests_total{endpoint="chat",outcome="cancelled"}')
        stream = self.chat("Tell me a long story.", max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        self.assertTrue(wait_until(lambda: self.server.metric(
            'headwater_requests_total{endpoint="chat",outcome="cancelled"}') == before + 1))
        self.assertTrue(wait_until(lambda: self.server.metric("headwater_samples_running") == 0))
        self.assertEqual(self.server.metric('headwater_kv_pages{state="used"}'), 0)


class Servers(unittest.TestCase):
    """What needs a server of its own."""

    @staticmethod
    def ask(server, question, **fields):
        document = "The river rises in the hills and runs to the sea. " * 60
        answer = server.client.chat.completions.create(
            model=server.model, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}, **fields,
            messages=[{"role": "system", "content": document}, {"role": "user", "content": question}])
        return answer.choices[0].message.content

    def test_greedy_answers_do_not_depend_on_the_batch(self):
        questions = [f"Question {i}: where does it end?" for i in range(16)]
        with Server("--batch-invariant", "--cascade", "on") as server:
            alone = [self.ask(server, q) for q in questions]
            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                together = list(pool.map(lambda q: self.ask(server, q), questions))
            self.assertEqual(together, alone)
            self.assertGreater(server.metric('headwater_decode_launches_total{path="cascade"}'), 0)
            self.assertEqual(server.metric('headwater_cascade_failures_total'), 0)
            self.assertIn('cascade launch (batch', server.text())
            self.assertNotIn("river", server.text(), "the log holds a prompt")
            self.assertEqual(server.stop(), 0)

    def test_off_means_flat(self):
        with Server(env={"HEADWATER_CASCADE_ATTENTION": " OFF "}) as server:
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda i: self.ask(server, f"Question {i}?"), range(4)))
            self.assertEqual(server.metric('headwater_decode_launches_total{path="cascade"}'), 0)
            self.assertGreater(server.metric('headwater_decode_launches_total{path="flat"}'), 0)
            self.assertEqual(server.metric('headwater_cascade_off{reason="HEADWATER_CASCADE_ATTENTION=off"}'), 1)

    def test_key(self):
        with Server(key="secret") as server:
            self.assertEqual(len(server.client.models.list().data), 1)
            with self.assertRaises(openai.AuthenticationError):
                server.client.with_options(api_key="wrong").models.list()

    def test_sigterm_finishes_what_was_begun(self):
        with Server() as server:
            stream = server.client.chat.completions.create(
                model=server.model, max_tokens=60, stream=True, extra_body={"ignore_eos": True},
                messages=[{"role": "user", "content": "Count to a hundred."}])
            chunks = [next(iter(stream))]
            server.process.send_signal(signal.SIGTERM)
            chunks += list(stream)
            self.assertEqual(chunks[-1].choices[0].finish_reason, "length")
            self.assertEqual(server.process.wait(timeout=60), 0)

    def test_a_second_sigterm_ends_it_at_once(self):
        with Server() as server:
            stream = server.client.chat.completions.create(
                model=server.model, max_tokens=4000, stream=True, extra_body={"ignore_eos": True},
                messages=[{"role": "user", "content": "Count to a million."}])
            next(iter(stream))
            self.assertEqual(server.stop(signals=2), 130)


def main():
    global ARGS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headwater", required=True, help="the command")
    parser.add_argument("--model", default="", help="GGUF file; default: the example model in the cache folder")
    ARGS, rest = parser.parse_known_args()
    cache = os.environ.get("HEADWATER_CACHE") or os.path.expanduser("~/.cache/headwater")
    ARGS.model = ARGS.model or os.path.join(cache, MODEL_FILE)
    if openai is None:
        print(f"skipped: {sys.executable} has no package openai (tools/install_deps.sh client)")
        return SKIPPED
    if not os.path.exists(ARGS.model):
        print(f"skipped: {ARGS.model} does not exist (tools/fetch_model.sh)")
        return SKIPPED
    result = unittest.main(argv=[sys.argv[0], *rest], exit=False, verbosity=2).result
    return 0 if result.wasSuccessful() and result.testsRun > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
