"""Chats through the official openai package, told what to do by a JSON object on the first line of stdin.

{"bases": [...],            base URLs of agents; each request takes the next
 "resolve": {name: [...]},  host names and the addresses they have; clients try them in random order, as with DNS
 "model": "...", "streams": [true, false], "max_tokens": [8, 32],
 "count": 10,               how many chats; 0: until stdin ends
 "concurrency": 4, "max_retries": 2}

One JSON object per chat on stdout: {"n", "base", "stream", "content", "finish", "error", "opened", "first_ms", "total_ms"}.
"error" is what the package raised, or null.
"""

import itertools
import json
import random
import socket
import sys
import threading
import time

import openai

job = json.loads(sys.stdin.readline())

lookup = socket.getaddrinfo


def resolve(host, port, *args, **kwargs):
    name = host.decode() if isinstance(host, bytes) else host
    addresses = job.get("resolve", {}).get(name)
    if addresses is None:
        return lookup(host, port, *args, **kwargs)
    return [found for a in random.sample(addresses, len(addresses)) for found in lookup(a, port, *args, **kwargs)]


socket.getaddrinfo = resolve

numbers = itertools.count()
lock = threading.Lock()
over = threading.Event()


def chat(clients, n):
    base = job["bases"][n % len(job["bases"])]
    stream = job["streams"][n // len(job["bases"]) % len(job["streams"])]
    low, high = job["max_tokens"]
    result = {"n": n, "base": base, "stream": stream, "content": "", "finish": None, "error": None, "opened": False, "first_ms": None}
    request = {
        "model": job["model"],
        "messages": [{"role": "user", "content": f"Python, request {n}: count to ten."}],
        "max_tokens": low + n % (high - low + 1),
    }
    start = time.monotonic()
    try:
        if stream:
            chunks = clients[base].chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
            result["opened"] = True  # the head is here: from now on the package repeats nothing
            for chunk in chunks:
                for choice in chunk.choices:
                    if choice.delta.content:
                        result["first_ms"] = result["first_ms"] or 1000 * (time.monotonic() - start)
                        result["content"] += choice.delta.content
                    result["finish"] = choice.finish_reason or result["finish"]
        else:
            answer = clients[base].chat.completions.create(**request)
            result["content"] = answer.choices[0].message.content or ""
            result["finish"] = answer.choices[0].finish_reason
    except Exception as e:  # whatever is raised is the finding
        result["error"] = f"{type(e).__name__}: {e}"
    result["total_ms"] = 1000 * (time.monotonic() - start)
    with lock:
        print(json.dumps(result), flush=True)


def work():
    clients = {
        base: openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=job["max_retries"], timeout=120)
        for base in job["bases"]
    }
    while not over.is_set():
        with lock:
            n = next(numbers)
        if job["count"] and n >= job["count"]:
            return
        chat(clients, n)


workers = [threading.Thread(target=work) for _ in range(job["concurrency"])]
for w in workers:
    w.start()
if not job["count"]:
    sys.stdin.read()
    over.set()
for w in workers:
    w.join()
