"""The page to chat: who gets it, what it may load, what it shows of others, and that it can be used
in a real browser, also by keyboard alone.

With ``FAIRLEAD_PICTURES`` the screenshots of the documents are made anew in that folder.
"""

import asyncio
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fairlead_runtime.api.ports import live
from fairlead_runtime.front.key_file import KeyRing
from fairlead_runtime.outputs import WHOLE_CACHE, BlockRun, BlockState, CacheView, RequestView
from fairlead_runtime.request.sequence import Status
from support.api_harness import FakeService, fake_server, is_error, run
from support.browser import CHROMIUM, MISSING, Tab, tab
from support.serve_process import Process, never_loads, serve, slow_device

KEY, OTHER = "k" * 40, "another-key-ü-0123456789"
ATTACK = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason=MISSING)


def view(name: str, tenant: str, status: Status = Status.DECODING) -> RequestView:
    waits = "next: needs blocks" if status is Status.PENDING else ""
    return RequestView(name, status, tenant, 0, 1.5, 30, (4,), 16, 2, 0, waits, 30, 16)


@dataclass
class BusyService(FakeService):
    """Runs requests of two keys; ``looks`` counts how often it was asked for them."""

    looks: int = 0
    starts: list[int] = field(default_factory=list)  # of the maps that were asked for
    views: list[RequestView] = field(
        default_factory=lambda: [
            view("our-one", "ours"),
            view("secret-a", "theirs"),
            view("secret-b", "theirs", Status.PENDING),
        ]
    )

    async def requests(self) -> list[RequestView]:
        self.looks += 1
        return self.views

    async def cache(self, start: int) -> CacheView:
        self.starts.append(start)
        held = BlockState.REFERENCED
        runs = (
            BlockRun(0, 2, held, 1, (0,)),
            BlockRun(2, 1, held, 2, (0, 2)),
            BlockRun(3, 2, held, 3, (1,)),
            BlockRun(5, 3, BlockState.FREE, 0, ()),
        )
        names = ("secret-a", "our-one", "secret-b")
        return CacheView(16, 1, 8, 3, 0, 0, 0, 0, 8, names, runs)


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    path = tmp_path / "keys"
    path.write_text(f"{KEY} name=ours requests_per_minute=4\n{OTHER} name=theirs\n")
    return KeyRing(str(path))


def bearer(key: str) -> dict[str, Any]:
    return {"headers": {"authorization": b"Bearer " + key.encode()}}


# -- who gets it


def test_a_server_without_the_page_answers_as_one_that_has_none(keys: KeyRing) -> None:
    async def scenario() -> None:
        async with fake_server() as (server, _), server.client() as client:
            for path in ("/", "/page/live"):
                answer = await client.get(path)
                assert (answer.status_code, is_error(answer.json())) == (404, True)
            assert "--page on" in (await client.get("/")).json()["error"]["message"]
        async with fake_server(keys=keys) as (server, _), server.client() as client:
            for path in ("/", "/page/live"):
                assert (await client.get(path)).status_code == 401

    run(scenario())


def test_the_page_is_open_and_the_same_for_all_and_what_it_shows_needs_a_key(keys: KeyRing) -> None:
    async def scenario() -> None:
        async with (
            fake_server(BusyService(), keys=keys, page=True) as (server, _),
            server.client() as client,
        ):
            page = await client.get("/")
            assert page.status_code == 200
            assert page.content == (await client.get("/", **bearer(KEY))).content
            head = await client.head("/")
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(page.content))
            assert (await client.post("/")).status_code == 405
            for name in ("tiny", "our-one", "secret"):
                assert not re.search(rf"\b{name}\b", page.text), "it holds no data"
            for path in ("/page/live", "/page", "/v1/models", "/index.html"):
                assert (await client.get(path)).status_code == 401
            for wrong in ("x", KEY[:-1]):
                assert (await client.get("/page/live", **bearer(wrong))).status_code == 401

    run(scenario())


def test_the_page_may_load_nothing_and_run_only_its_own_script() -> None:
    async def scenario() -> None:
        async with (
            fake_server(page=True) as (server, _),
            server.client() as client,
            server.admin() as admin,
        ):
            pages = [await client.get("/"), await admin.get("/")]
        for page in pages:
            policy = page.headers["content-security-policy"].split("; ")
            kinds = [re.sub("'sha256-[^']+'", "HASH", part) for part in policy]
            assert kinds == [
                *("default-src 'none'", "script-src HASH", "style-src HASH"),
                *("connect-src 'self'", "img-src data:", "base-uri 'none'"),
                *("form-action 'none'", "frame-ancestors 'none'"),
            ]
            assert page.headers["x-content-type-options"] == "nosniff"
            assert page.headers["referrer-policy"] == "no-referrer"
            assert "{{" not in page.text
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b"
                r"|localStorage|sessionStorage|cookie|\son[a-z]+=|\sstyle=",
                page.text,
            )
            assert set(re.findall(r"https?://[^\s'\"$]+", page.text)) == {
                "http://www.w3.org/2000/svg"
            }

    run(scenario())


# -- what it shows of others


def test_a_caller_sees_its_own_requests_and_of_others_counts(keys: KeyRing) -> None:
    async def scenario() -> None:
        async with (
            fake_server(BusyService(), keys=keys, page=True) as (server, _),
            server.client() as client,
        ):
            answer = await client.get("/page/live", **bearer(KEY))
            assert answer.headers["cache-control"] == "no-store"
            shown = answer.json()
            assert [request["id"] for request in shown["requests"]] == ["our-one"]
            assert shown["others"] == {"running": 1, "waiting": 1, "blocks": 4}
            assert shown["cache"]["requests"] == ["our-one"]
            # Neither how many hold a block nor where one request of theirs ends.
            assert [list(run.values()) for run in shown["cache"]["blocks"]] == [
                [0, 3, "held", 1, []],
                [3, 2, "held", 3, [0]],
                [5, 3, "free", 0, []],
            ]
            for word in ("secret", "ours", "theirs", "tenant"):
                assert word not in answer.text
            theirs = (await client.get("/page/live", **bearer(OTHER))).json()
            assert [r["id"] for r in theirs["requests"]] == ["secret-a", "secret-b"]
            assert theirs["requests"][1]["waits_for"] == "next: needs blocks"

    run(scenario())


def test_the_references_of_a_cell_are_none_of_the_callers() -> None:
    held = BlockState.REFERENCED
    runs = (BlockRun(0, 4, held, 7, (0, 1)), BlockRun(4, 4, held, 3, (1,)))
    cache = CacheView(16, 1, 8, 0, 0, 0, 0, 0, 8, ("a", "b"), runs, per_cell=4)
    views = [view("a", "theirs"), view("b", "ours")]
    (shown,) = live.picture(views, cache, "ours")["cache"]["blocks"]
    assert shown == BlockRun(0, 8, held, 1, (0,))
    assert [run.references for run in live.picture(views, cache, None)["cache"]["blocks"]] == [7, 3]


def test_a_large_cache_is_looked_at_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(BusyService):
        async def cache(self, start: int) -> CacheView:
            return replace(await super().cache(start), units=10**9)

    async def scenario() -> None:
        for service, looks in ((BusyService(), 2), (Large(), 1)):
            async with fake_server(service, page=True) as (server, _), server.client() as client:
                for _ in range(2):
                    await client.get("/page/live")
                    await asyncio.sleep(0.01)
            assert service.looks == looks

    monkeypatch.setattr(live, "FRESH_SECONDS", 0.005)
    run(scenario())


def test_a_server_without_keys_shows_all_requests_and_no_tenant() -> None:
    async def scenario() -> None:
        async with (
            fake_server(BusyService(), page=True) as (server, _),
            server.client() as client,
        ):
            answer = await client.get("/page/live")
            assert len(answer.json()["requests"]) == 3
            assert answer.json()["others"] == {"running": 0, "waiting": 0, "blocks": 0}
            assert answer.json()["cache"]["blocks"][2]["references"] == 3
            assert "theirs" not in answer.text

    run(scenario())


def test_a_look_serves_all_who_ask_and_counts_in_no_limit(
    keys: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        service = BusyService()
        async with (
            fake_server(service, keys=keys, page=True) as (server, _),
            server.client() as client,
        ):
            asked = [client.get("/page/live", **bearer(key)) for key in (KEY, OTHER) * 10]
            answers = await asyncio.gather(*asked)
            assert {answer.status_code for answer in answers} == {200}
            assert service.looks == 1
            assert service.starts == [WHOLE_CACHE]
            monkeypatch.setattr(live, "FRESH_SECONDS", 0.0)
            await client.get("/page/live", **bearer(KEY))
            assert service.looks == 2
            models = [await client.get("/v1/models", **bearer(KEY)) for _ in range(5)]
            assert [answer.status_code for answer in models] == [200, 200, 200, 200, 429]

    monkeypatch.setattr(live, "FRESH_SECONDS", 1000.0)
    run(scenario())


# -- in a browser


@contextmanager
def opened(url: str) -> Iterator[Tab]:
    """The page; at its end, nothing was asked of anybody else, and no script failed."""
    with tab() as page:
        size = {"width": 1180, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.call("Page.navigate", url=url + "/")
        page.until("document.readyState === 'complete' && document.title === 'Fairlead'")
        yield page
        logged = [e for e in page.events if e["method"] == "Runtime.exceptionThrown"]
        logged += [
            event
            for event in page.events
            if event["method"] == "Log.entryAdded"
            and event["params"]["entry"]["source"] != "network"  # a 401, which the page shows
        ]
        assert logged == [], "scripts that fail and what the policy forbids are logged"
        asked = {
            event["params"]["request"]["url"]
            for event in page.events
            if event["method"] == "Network.requestWillBeSent"
        }
        paths = ("/", "/v1/models", "/v1/chat/completions", "/page/live")
        assert {u for u in asked if not u.startswith("data:")} <= {url + p for p in paths}


def in_browser(
    service: FakeService, drive: Callable[[Tab, FakeService], None], **settings: Any
) -> None:
    """Let ``drive`` use the page of a server with this service, in a thread of its own."""

    async def scenario() -> None:
        async with fake_server(service, page=True, **settings) as (server, _):

            def use() -> None:
                with opened(server.url) as page:
                    drive(page, service)

            await asyncio.to_thread(use)

    run(scenario())


def text(page: Tab, element: str) -> str:
    shown: str = page.value(f"document.getElementById('{element}').textContent")
    return shown


def press(page: Tab, key: str, *, shift: bool = False) -> None:
    codes = {"Enter": 13, "Escape": 27, "Tab": 9}
    pressed = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
    if key == "Enter":
        pressed["text"] = "\r"
    modifiers = 8 if shift else 0
    page.call("Input.dispatchKeyEvent", type="keyDown", modifiers=modifiers, **pressed)
    page.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **pressed)


def write(page: Tab, words: str) -> None:
    page.call("Input.insertText", text=words)


def focused(page: Tab) -> str:
    return str(page.value("document.activeElement.id || document.activeElement.tagName"))


def until_ready(page: Tab) -> None:
    page.until("!at('talk').hidden && at('state').textContent === 'serving'")


@needs_chromium
def test_words_of_a_model_are_never_markup_and_its_reasoning_is_folded() -> None:
    def drive(page: Tab, _: FakeService) -> None:
        until_ready(page)
        write(page, ATTACK)
        press(page, "Enter")
        page.until("at('progress').textContent === 'the answer is complete'")
        said = page.value("[...document.querySelectorAll('#log .said')].map((e) => e.textContent)")
        assert said == [ATTACK, f"because {ATTACK}", f"so {ATTACK}"]
        tags = page.value("[...at('log').querySelectorAll('*')].map((e) => e.tagName)")
        assert set(tags) == {"ARTICLE", "H3", "DIV", "DETAILS", "SUMMARY", "P"}
        assert page.value("document.querySelector('#log details').open") is False
        assert page.value("document.title") == "Fairlead"
        # The policy holds also where the page itself would err.
        page.value(
            "new Promise((done) => { addEventListener('securitypolicyviolation', done);"
            "const made = document.createElement('div');"
            f"made['inner' + 'HTML'] = {ATTACK!r}; document.body.append(made); made.remove(); }}"
            ").then(() => 1)"
        )
        assert page.value("document.title") == "Fairlead"
        del page.events[:]

    says = f"<think>because {ATTACK}</think>so {ATTACK}"
    in_browser(FakeService(says=says, reasoning_parser="qwen3"), drive)


@needs_chromium
def test_calls_of_tools_are_shown_and_their_results_go_back() -> None:
    says = '<tool_call>{"name": "weather", "arguments": {"city": "<b>Oslo</b>"}}</tool_call>'

    def drive(page: Tab, fake: FakeService) -> None:
        until_ready(page)
        page.value("at('tools').value = '{\"not\": \"a list\"}'")
        write(page, "How cold is it?")
        press(page, "Enter")
        page.until("at('tools-fault').textContent === 'is no JSON list'")
        assert not fake.seen
        assert page.value("at('message').value") == "How cold is it?", "what was not sent is kept"
        tool = "{type: 'function', function: {name: 'weather', parameters: {type: 'object'}}}"
        page.value(f"at('tools').value = JSON.stringify([{tool}])")
        press(page, "Enter")
        page.until("document.querySelector('#log .call')")
        assert page.value("document.querySelector('#log .call b').textContent") == "Calls weather"
        arguments = "document.querySelector('#log .call pre').textContent"
        assert "<b>Oslo</b>" in page.value(arguments)
        fake.says = "freezing"
        page.value("document.querySelector('#log .call textarea').value = '-3'")
        page.value("document.querySelector('#log article button').click()")
        page.until("conversation.length === 4")
        roles = page.value("conversation.map((message) => message.role)")
        assert roles == ["user", "assistant", "tool", "assistant"]
        assert page.value("conversation[2].content") == "-3"
        assert page.value("conversation[2].tool_call_id === conversation[1].tool_calls[0].id")

    in_browser(FakeService(says=says, tool_call_parser="hermes"), drive)


@needs_chromium
def test_the_keyboard_alone_writes_sends_and_stops() -> None:
    def drive(page: Tab, fake: FakeService) -> None:
        until_ready(page)
        assert focused(page) == "message"
        write(page, "one")
        press(page, "Enter", shift=True)
        write(page, "two")
        press(page, "Enter")
        page.until("at('log').textContent.includes('naï')")
        assert page.value("at('log').getAttribute('aria-busy')") == "true"
        assert page.value("at('send').disabled") is True
        assert page.value("conversation[0].content") == "one\ntwo"
        assert fake.live
        press(page, "Escape")
        page.until("at('progress').textContent === 'stopped'")
        assert page.value("at('log').getAttribute('aria-busy')") == "false"
        assert page.value("conversation.map((message) => message.role)") == ["user", "assistant"]
        order = []
        for _ in range(10):
            press(page, "Tab")
            order.append(focused(page))
        assert order[:2] == ["send", "anew"], "what cannot be pressed is passed over"
        assert order[2:6] == ["temperature", "length", "SUMMARY", "SUMMARY"]
        unnamed = page.value(
            "[...document.querySelectorAll('input, textarea, canvas, [tabindex]')]"
            ".filter((e) => !e.labels?.length && !e.ariaLabel).map((e) => e.id)"
        )
        assert unnamed == []
        assert page.value("at('log').getAttribute('aria-live')") == "polite"

    service = FakeService(hang=True)
    in_browser(service, drive)
    assert not service.live, "the request ended with its connection"


@needs_chromium
def test_a_key_is_asked_for_and_kept_in_the_tab_alone(keys: KeyRing) -> None:
    def drive(page: Tab, _: FakeService) -> None:
        page.until("!at('key-section').hidden")
        assert focused(page) == "key"
        assert page.value("at('talk').hidden && at('picture').hidden")
        write(page, "wrong")
        press(page, "Enter")
        page.until("at('key-fault').textContent === 'The server does not take this key.'")
        write(page, OTHER)
        press(page, "Enter")
        until_ready(page)
        page.until("at('queue').tBodies[0].rows.length === 1")
        assert text(page, "running-more") == "1 of others"
        page.until("live.size === 1 && cells.length === 8")
        point = (
            "(() => { const event = new MouseEvent('mousemove');"
            "Object.defineProperties(event, { offsetX: { value: 1 }, offsetY: { value: 1 } });"
            "const before = cacheView; cacheView = { ...before, per_cell: %d }; drawMap();"
            "at('map').dispatchEvent(event); cacheView = before; drawMap();"
            "return at('hint').textContent; })()"
        )
        assert page.value(point % 1) == "0: held by 1 sequence of secret-a"
        assert page.value(point % 2) == "0 to 1: held by secret-a"
        write(page, "hi")
        press(page, "Enter")
        page.until("at('progress').textContent === 'the answer is complete'")
        shown = page.value("document.documentElement.outerHTML")
        assert OTHER not in shown
        assert "our-one" not in page.value("document.documentElement.outerHTML")
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert page.value(kept) == '[{},{},""]'
        page.value("at('code-details').open = true")
        page.until("at('python').textContent.includes('api_key=\"YOUR_KEY\"')")
        assert "Bearer YOUR_KEY" in text(page, "curl")
        assert OTHER not in text(page, "curl") + text(page, "python")
        page.value("at('forget').click()")
        assert page.value("at('talk').hidden && !at('log').textContent && !key && !live.size")
        page.call("Page.reload")
        page.until("!document.getElementById('key-section')?.hidden")

    in_browser(BusyService(), drive, keys=keys)


@needs_chromium
def test_a_server_that_loads_is_no_fault() -> None:
    with tab() as page, serve("demo:", "--page=on", prepare=never_loads) as server:
        server.until_logged("admin port: ")
        for port, state in (("public", "still loading"), ("admin", "starting")):
            page.call("Page.navigate", url=server.ports[port] + "/")
            page.until(f"document.getElementById('state')?.textContent.includes('{state}')")
            assert page.value("document.getElementById('state').className") == "wait"
        assert page.value("document.getElementById('model').textContent") == "demo:"


@pytest.fixture(scope="module")
def demo() -> Iterator[Process]:
    flags = ("--page=on", "--num-blocks=160", "--block-size=8", "--served-name=demo")
    slow = functools.partial(slow_device, 0.05)  # the picture is drawn twice a second
    with serve("demo:", *flags, "--max-requests=3", prepare=slow) as process:
        process.until_logged("serving")
        yield process


@needs_chromium
def test_an_answer_streams_beside_the_live_batch(demo: Process, tmp_path: Path) -> None:
    with opened(demo.ports["public"]) as page:
        until_ready(page)
        assert text(page, "model") == "demo"
        page.value("at('temperature').value = 0; at('length').value = 120")
        write(page, "What is a KV cache?")
        press(page, "Enter")
        page.until("conversation.length === 1 && at('log').textContent.length > 40")
        page.until("[...live.keys()].some((id) => mine.has(id))")
        page.until("at('progress').textContent === 'the answer is complete'")
        answer = page.value("conversation[1].content")
        assert len(answer) > 20
        write(page, "What is a KV cache?")
        page.value("at('code-details').open = true")
        page.until("at('curl').textContent.startsWith('curl ')")
        code, command = text(page, "python"), text(page, "curl")
        # Their conversation ends with the same question: both are of one greedy answer.
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        page.value("at('code-details').open = false")
        press(page, "Enter")
        page.until("conversation.length === 4")
        assert done.stdout.decode() == page.value("conversation[3].content")
        if shutil.which("curl"):
            raw = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
            assert raw.stdout.rstrip().endswith(b"data: [DONE]")
        assert re.search(r"prompt \d+ tokens, [1-9]\d* from the cache", text(page, "log"))
        assert re.fullmatch(r"[1-9]\d* %", text(page, "hits"))
        take_pictures(page, tmp_path)


def take_pictures(page: Tab, tmp_path: Path) -> None:
    """In both color schemes, and on a narrow screen, where nothing is cut off."""
    folder = Path(os.environ.get("FAIRLEAD_PICTURES") or tmp_path)
    page.value("newChat(); at('length').value = 200")
    # A browser has six connections to a server; the page needs one for its picture.
    others = (
        "for (let i = 0; i < 4; i++) fetch('/v1/chat/completions', { method: 'POST', headers:"
        " { 'content-type': 'application/json' }, body: JSON.stringify({ messages:"
        " [{ role: 'user', content: 'Tell me about boats, ' + i }], model: 'demo',"
        " max_tokens: 300, ignore_eos: true }) }); null"
    )
    write(page, "What is a KV cache?")
    press(page, "Enter")
    page.value(others)
    page.until("at('queue').tBodies[0].rows.length >= 1 && live.size === 3")
    page.until("conversation.length === 2")
    backgrounds = set()
    for scheme in ("light", "dark"):
        picture = page.screenshot(1180, 860, scheme=scheme)
        assert picture.startswith(b"\x89PNG")
        (folder / f"chat-{scheme}.png").write_bytes(picture)
        backgrounds.add(page.value("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    for details in ("code-details", "tools-details"):
        page.value(f"at('{details}').open = true")
    for width in (420, 320):
        page.screenshot(width, 900, scheme="light")
        wide = page.value(
            "[...document.querySelectorAll('body *')].filter((e) =>"
            " e.getBoundingClientRect().right > innerWidth).map((e) => e.tagName + e.id)"
        )
        assert (page.value("document.documentElement.scrollWidth") <= width, wide) == (True, [])
