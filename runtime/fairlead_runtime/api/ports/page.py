"""The page to watch, ``/`` on the admin port: one file without outside assets.

Owns its headers. The page reads the admin port's own routes and shows no text of a user.
"""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response

_FILE = "page.html"


class Page:
    """The page, read once."""

    def __init__(self) -> None:
        content = (files(__package__) / _FILE).read_bytes()
        self._content = content
        self._headers = {
            "content-security-policy": _policy(content),
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
