"""The page to watch: what it asks for, what it shows, and that it looks right in a real browser.

With ``FAIRLEAD_PICTURES`` the screenshots of the documents are made anew in that folder.
"""

import base64
import hashlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.api_harness import fake_server, run
from support.browser import CHROMIUM, MISSING, Tab, tab
from support.serve_process import Process, serve, slow_device

RUNNING, WAITING = 5, 4  # requests of the load
SECRET = "my-own-words"
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason=MISSING)


def test_the_page_is_one_file_that_may_load_nothing_and_run_only_its_own_script() -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.admin() as admin:
            answer = await admin.get("/")
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            policy = dict(
                part.strip().split(" ", 1)
                for part in answer.headers["content-security-policy"].split(";")
            )
            assert policy.pop("default-src") == "'none'"
            assert policy.pop("connect-src") == "'self'"
            assert policy.pop("img-src") == "data:"
            for kind in ("script", "style"):
                (text,) = re.findall(f"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
                digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
                assert policy.pop(f"{kind}-src") == f"'sha256-{digest}'"
            assert policy == dict.fromkeys(("base-uri", "form-action", "frame-ancestors"), "'none'")
            outside = set(re.findall(r"https?://[^\s'\"]+", answer.text))
            assert outside == {"http://www.w3.org/2000/svg"}, "a name, which nobody loads"
            assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\b", answer.text)
            async with server.client() as client:
                assert (await client.get("/")).status_code == 404, "not on the public port"

    run(scenario())


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    flags = [
        "--num-blocks=160",
        "--block-size=8",
        f"--max-requests={RUNNING}",
        "--served-name=demo",
    ]
    with serve("demo:", *flags, prepare=slow_device) as process:
        process.until_logged("serving")
        yield process


@contextmanager
def load(server: Process) -> Iterator[None]:
    """More requests than may run, without end; some share a prompt."""
    ended = threading.Event()

    def send(number: int) -> None:
        turn = 0
        with server.client() as http:
            while not ended.is_set():
                turn += 1
                prompt = f"{SECRET} " + "Once upon a time there was a boat. " * (2 + number % 4)
                body = {
                    "model": "demo",
                    "prompt": prompt if number % 2 else f"{turn * number} {prompt}",
                    "max_tokens": 60 + 40 * ((number + turn) % 4),
                    "ignore_eos": True,
                    "user": SECRET,
                    "temperature": 0.8,
                }
                assert http.post("/v1/completions", json=body).status_code == 200

    threads = [threading.Thread(target=send, args=(number,)) for number in range(RUNNING + WAITING)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def opened(server: Process) -> Iterator[Tab]:
    with tab() as page:
        size = {"width": 1180, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.call("Page.navigate", url=server.ports["admin"] + "/")
        page.until("document.readyState === 'complete' && document.title === 'Fairlead'")
        yield page
        # The page shows that a server is not ready, which an engine without processor time is not.
        wrong = [
            event
            for event in page.events
            if event["method"] in {"Runtime.exceptionThrown", "Log.entryAdded"}
            and not event["params"].get("entry", {}).get("url", "").endswith("/readyz")
        ]
        assert wrong == [], "scripts that fail and what the policy forbids are logged"
        asked = {
            event["params"]["request"]["url"]
            for event in page.events
            if event["method"] == "Network.requestWillBeSent"
        }
        own = server.ports["admin"]
        paths = [
            "/",
            "/debug/startup",
            "/debug/cache?start=all",
            "/debug/requests",
            "/metrics",
            "/readyz",
        ]
        assert asked == {*(own + path for path in paths)} | {
            url for url in asked if url.startswith("data:")
        }


def endless_profile() -> None:
    """Let a start never end."""
    from fairlead_runtime.device.warmup import profiling

    def wait(*_: Any, **__: Any) -> Any:
        threading.Event().wait()

    profiling.profile = wait


@needs_chromium
def test_the_page_shows_the_parts_of_a_start_until_the_server_is_ready() -> None:
    with serve("demo:", prepare=endless_profile) as server, tab() as page:
        server.until_logged("starting: profile")
        page.call("Page.navigate", url=server.ports["admin"] + "/")
        page.until("document.readyState === 'complete' && document.title === 'Fairlead'")
        page.until("document.querySelector('#starting-parts tr.now td')?.textContent === 'profile'")
        assert text(page, "state") == "starting"
        assert page.value("getComputedStyle(document.querySelector('.tiles')).display") == "none"
        assert "until now" in text(page, "starting-more")
        page.value(
            "drawStart({ready: false, model: 'm', phase: 'weights', done: 2 ** 29, "
            "total: 2 ** 30, elapsed: 7, seconds: {imports: 5, download: 0, weights: 2}})"
        )
        assert text(page, "starting-more").startswith("0.50 of 1.00 GiB")
        assert text(page, "starting-parts") == (
            "importslibraries are imported5.0 sweightsweights are read2.0 s"
        )
        assert page.value("document.getElementById('starting-share').value") == 0.5


def text(page: Tab, element: str) -> str:
    shown: str = page.value(f"document.getElementById('{element}').textContent")
    return shown


@needs_chromium
def test_the_page_shows_the_batch_the_queue_the_blocks_and_the_rates(
    server: Process, tmp_path: Path
) -> None:
    with load(server), opened(server) as page:
        page.until(f"document.getElementById('running').textContent === '{RUNNING}'")
        page.until("document.getElementById('queue').tBodies[0].rows.length >= 1")
        page.until("scrapes.length > 2 && Number(document.getElementById('generated').textContent)")
        page.until("cells.some((run) => run.references > 1)")
        assert text(page, "state") == "serving"
        assert text(page, "model") == "demo"
        # On a busy machine the first scrapes come before any request is done.
        shown = "['held', 'hits', 'ttft', 'itl'].every((id) => /\\d/.test(at(id).textContent))"
        page.until(shown)
        for element in ("held", "hits"):
            assert re.fullmatch(r"[\d.]+ %", text(page, element))
        for element in ("ttft", "itl"):
            assert re.fullmatch(r"[\d.]+ m?s", text(page, element))
        page.until(
            "[...document.querySelectorAll('#queue tbody td:last-child')].some((cell) => "
            f"cell.textContent.includes('fewer than {RUNNING} requests'))"
        )
        assert text(page, "map-more") == "160 blocks, of 8 tokens"
        foot = "document.querySelector('footer')"
        foot_text = page.value(f"{foot}.textContent").strip()
        assert foot_text.startswith(f"Fairlead {version('fairlead')}, up ")
        page.until("/^\\d+ (s|min)$/.test(at('uptime').textContent)")
        links = page.value(f"[...{foot}.querySelectorAll('a')].map((link) => link.href)")
        assert [httpx.get(link).status_code for link in links] == [200] * 4
        assert page.value("cells.length") == 160
        lanes = "[...live.values()].map((bar) => bar.lane).sort().join()"
        page.until(f"{lanes} === '{','.join(map(str, range(RUNNING)))}'")
        point = (
            "(() => { const place = cells.findIndex((run) => run.references > 1);"
            "const event = new MouseEvent('mousemove');"
            "Object.defineProperties(event, { offsetX: { value: place % columns * side + 1 },"
            "  offsetY: { value: Math.floor(place / columns) * side + 1 } });"
            "at('map').dispatchEvent(event); return at('hint').textContent; })()"
        )
        page.until(
            f"/^\\d+: held by \\d sequences of [0-9a-f]{{8}}(, [0-9a-f]{{8}})*$/.test({point})"
        )
        for canvas in ("map", "lanes"):
            assert colors(page, canvas) > RUNNING, canvas
        assert SECRET not in page.value("document.documentElement.outerHTML")
        take_pictures(page, tmp_path)


def colors(page: Tab, canvas: str) -> int:
    """How many colors are drawn in at least 16 pixels."""
    found: int = page.value(
        f"(() => {{ const canvas = at('{canvas}');"
        "const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        "const counts = new Map();"
        "for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) {"
        "  const key = data.slice(i, i + 3).join(); counts.set(key, (counts.get(key) ?? 0) + 1); }"
        "return [...counts.values()].filter((count) => count >= 16).length; })()"
    )
    return found


def take_pictures(page: Tab, tmp_path: Path) -> None:
    """In both color schemes, which differ, and on a narrow screen, where nothing is cut off."""
    folder = Path(os.environ.get("FAIRLEAD_PICTURES") or tmp_path)
    page.until(f"seconds() > {40 if 'FAIRLEAD_PICTURES' in os.environ else 0}")
    backgrounds = set()
    for scheme in ("light", "dark"):
        picture = page.screenshot(1180, 680, scheme=scheme)
        assert picture.startswith(b"\x89PNG")
        (folder / f"page-{scheme}.png").write_bytes(picture)
        backgrounds.add(page.value("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    page.screenshot(400, 900, scheme="light")
    assert page.value("document.documentElement.scrollWidth") <= 400


@needs_chromium
def test_nothing_is_asked_while_nobody_looks_and_a_server_that_is_gone_is_shown() -> None:
    with serve("demo:", "--num-blocks=64", "--block-size=8") as server:
        server.until_logged("serving")
        with tab() as page:
            page.call("Page.navigate", url=server.ports["admin"] + "/")
            page.until("document.getElementById('state')?.textContent === 'serving'")
            hidden = (
                "Object.defineProperty(document, 'hidden', {{ value: {}, configurable: true }});"
                "let looks = 0; every(() => 0, async () => {{ looks++; }});"
                "new Promise((done) => {{ let turns = 0; const next = () =>"
                "  (turns++ === 20 ? done(looks) : setTimeout(next, 5)); next(); }})"
            )
            looks: Any = page.value(hidden.format("true"))
            assert looks == 0
            page.value("Object.defineProperty(document, 'hidden', { value: false })")
            page.until("looks > 0")
            server.kill()
            page.until("document.getElementById('state').textContent === 'no answer'")
            assert page.value("document.getElementById('state').className") == "bad"
