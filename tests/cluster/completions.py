"""A client of the pods' public port: one completion, from a pod's own address."""

import json
import urllib.request

from cluster.apiclient import Object


def complete(address: str, tokens: int = 4, model: str = "chat") -> Object:
    """The answer to one request for so many tokens; any failure is raised."""
    body = {"model": model, "prompt": "Once", "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{address}:8000/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: Object = json.load(answer)
    return found
