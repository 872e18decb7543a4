"""Answers as vLLM's server with our connector would, so that the demo's own conduct can be tested in seconds.

STAND_IN names what goes wrong: `nothing`, `dies_at_start`, `dies_when_asked`, `hangs_when_asked`,
`answers_differently`. It starts a child, as vLLM does, and leaves both process ids beside the KV directory.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FAULT = os.environ["STAND_IN"]
LONG, SHORT, HIT = 6043, 33, 6016


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/reset_prefix_cache":
            self.server.engine_has_it = False
            self.do_GET()
        else:
            self.answer(json.loads(body))

    def answer(self, asked):
        server = self.server
        server.asked += 1
        identity = f"chatcmpl-{server.asked}"
        is_long = len(asked["messages"][0]["content"]) > 10_000
        cached, text = 0, "Hello."
        if is_long:
            if FAULT == "dies_when_asked":
                print("stand-in: out of memory", flush=True)
                os._exit(1)
            if FAULT == "hangs_when_asked":
                print("stand-in: hanging", flush=True)
                threading.Event().wait()
            cached, text = self.long_answer(identity)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        usage = {"prompt_tokens": LONG if is_long else SHORT, "prompt_tokens_details": {"cached_tokens": cached}}
        for event in (
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": text}}]},
            {"choices": [], "usage": usage},
        ):
            self.wfile.write(b"data: " + json.dumps({"id": identity, **event}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def long_answer(self, identity):
        server = self.server
        tiers = {"cpu": 0, "disk": 0}
        engine = HIT if server.engine_has_it else 0
        if server.cpu_has_it:
            tiers["cpu"] = HIT
        elif (server.kv / "chunk").exists():
            tiers["disk"] = HIT
        hit = sum(tiers.values())
        load = 0 if engine else hit
        counts = ", ".join(f"{tier}: {tokens}" for tier, tokens in tiers.items())
        print(
            f"INFO [tiercache.vllm] Reqid: {identity}-ab12, Total tokens {LONG}, engine computed tokens: {engine}, "
            f"hit tokens: {hit} ({counts}), need to load: {load}"
        )
        for part in (4096, 1920) if not (engine or hit) else ():
            print(f"INFO [tiercache.vllm] Stored {part} out of total {LONG} tokens for request {identity}-ab12")
        sys.stdout.flush()
        (server.kv / "chunk").touch()
        server.engine_has_it = server.cpu_has_it = True
        wrong = FAULT == "answers_differently" and tiers["disk"]
        return engine or hit, "A lie." if wrong else "It is about Python."


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    arguments, _ = parser.parse_known_args()
    if FAULT == "dies_at_start":
        sys.exit("stand-in: no such model")
    config = Path(os.environ["TIERCACHE_CONFIG_FILE"]).read_text()
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    server.daemon_threads = True
    server.kv = Path(re.search(r'local_disk: "(.*)"', config)[1])
    server.kv.mkdir(exist_ok=True)
    server.asked, server.engine_has_it, server.cpu_has_it = 0, False, False
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with (server.kv.parent / "processes").open("a") as processes:
        processes.write(f"{os.getpid()}\n{child.pid}\n")
    server.serve_forever()


main()
