"""The two pages, ``/`` on each port: one to watch the engine, one to chat with it.

Owns how they are put together of the files in ``pages``, and their headers. A page is one file that
loads nothing from elsewhere; it is the same for everybody and holds no data but the model's name
and the version, on the admin port.
"""

import base64
import hashlib
import html
import re
from importlib.metadata import version
from importlib.resources import files

from starlette.responses import Response

WATCH, CHAT = "watch.html", "chat.html"
_PART = re.compile(r"\{\{([a-z]+\.[a-z]+)\}\}")
_MODEL, _VERSION = "{{model}}", "{{version}}"


class Page:
    """A page, put together once. ``model``: the name that it shows before the model is loaded."""

    def __init__(self, name: str, model: str = "") -> None:
        folder = files(__package__) / "pages"

        def text(part: str) -> str:
            return (folder / part).read_text("utf-8")

        content = _PART.sub(lambda found: text(found[1]), text(name))
        content = content.replace(_VERSION, version("fairlead"))
        self._content = content.replace(_MODEL, html.escape(model)).encode()
        self._headers = {
            "content-security-policy": _policy(self._content),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def __call__(self) -> Response:
        return Response(self._content, media_type="text/html", headers=self._headers)


def _policy(content: bytes) -> str:
    """Run the file's own script, with its own style; load and send nothing else."""
    hashes = {
        tag.decode(): " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
            for text in re.findall(b"<%b>(.*?)</%b>" % (tag, tag), content, re.DOTALL)
        )
        for tag in (b"script", b"style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
