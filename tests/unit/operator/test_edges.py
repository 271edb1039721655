"""The operator's edges: settings, scraping, the hub, the probe port, the pace. Real sockets on
loopback.
"""

import asyncio
import errno
import http.client
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kubernetes.aio.client import ApiClient, Configuration

from fairlead_operator.__main__ import main
from fairlead_operator.cluster.cache import Store
from fairlead_operator.cluster.client import Cluster, Pace
from fairlead_operator.commands.operator_flags import read
from fairlead_operator.decide.children.upgrade import defaults_hash
from fairlead_operator.errors import ApiError, FencedError
from fairlead_operator.health import STALE_SECONDS, Health, serve
from fairlead_operator.metrics import Metrics
from fairlead_operator.probe.hub import KEEP_SECONDS, RETRY_SECONDS, Hub, HubError
from fairlead_operator.probe.pod_client import Pods, ScrapeError
from fairlead_operator.resource.kinds import DEPLOYMENT, EVENT
from fairlead_operator.resource.settings import SettingsError
from fairlead_operator.resource.spec import Source
from support.ip_families import loopbacks, without_ipv6

IMAGE = {"FAIRLEAD_RUNTIME_IMAGE": "r:1"}
Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def serving(answers: dict[str, Answer], trickle: float = 0.0) -> Iterator[tuple[int, list[str]]]:
    """A server on loopback: its port, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            code, headers, body = answers.get(self.path.partition("?")[0], (404, {}, b""))
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for byte in body if trickle else ():
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    time.sleep(trickle)
                if not trickle:
                    self.wfile.write(body)
            except OSError:
                pass

        do_POST = do_GET  # noqa: N815 - the name that http.server calls

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        server.server_close()


# -- settings


def test_settings_come_from_arguments_and_environment() -> None:
    environ = {
        **IMAGE,
        "POD_NAME": "op-1",
        "POD_NAMESPACE": "sys",
        "FAIRLEAD_ALLOWED_IMAGES": "a/.*\nb:1",
        "FAIRLEAD_ADMIN_PEERS": '[{"podSelector": {}}]',
        "HF_ENDPOINT": "https://mirror.test/",
    }
    settings = read(["--namespace=a", "--namespace=b", "--namespace=a"], environ, "host")
    assert settings.namespaces == ("a", "b")
    assert (settings.lease_namespace, settings.identity) == ("sys", "op-1")
    assert settings.hub == "https://mirror.test"
    assert settings.admin_peers == ({"podSelector": {}},)
    assert [settings.allows_image(i) for i in ("", "r:1", "a/x", "b:1", "b:12", "xa/x")] == [
        True
    ] * 4 + [False] * 2
    assert not settings.allows_image("docker.io/"), "no image for accelerators allows none"
    assert not settings.allows_service_account("x")
    assert settings.allows_priority_class("")


@pytest.mark.parametrize(
    ("argument", "message", "hint"),
    [
        ("--namespce=x", "unrecognized arguments: --namespce", "did you mean --namespace?"),
        ("--probe-port=abc", "--probe-port: invalid int value: 'abc'", "write a whole number"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line_with_the_nearest(
    argument: str, message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        read([argument, "--log-format=json"], IMAGE, "host")
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    words = json.loads(line)
    assert (words["message"], words["hint"]) == (message, hint)


@pytest.mark.parametrize(
    ("image", "allowed"),
    [
        ("docker.io/fairlead/runtime:1", True),
        ("fairlead/runtime:1", True),
        ("docker.io/fairlead/runtime:1-cuda", True),
        ("fairlead/runtime:1-cuda", True),
        ("docker.io/fairlead/runtime:1-rocm", False),
        ("mine/other:1", True),
        ("docker.io/mine/other:1", True),
        ("docker.io/full/name:1", True),
        ("full/name:1", True),
        ("alone:1", True),
        ("docker.io/fairlead/runtime:2", False),
        ("registry.test/fairlead/runtime:1", False),
        ("registry.test/mine/other:1", False),
        ("localhost/full/name:1", False),
        ("r:5000/full/name:1", False),
    ],
)
def test_an_image_of_docker_hub_is_allowed_by_either_of_its_names(
    image: str, *, allowed: bool
) -> None:
    environ = {
        "FAIRLEAD_RUNTIME_IMAGE": "docker.io/fairlead/runtime:1",
        "FAIRLEAD_ACCELERATOR_IMAGE": "docker.io/fairlead/runtime:1-cuda",
        "FAIRLEAD_ALLOWED_IMAGES": "mine/.*\ndocker\\.io/full/.*\ndocker\\.io/alone:1",
    }
    assert read(["--namespace=a"], environ, "host").allows_image(image) is allowed


def test_without_an_image_for_accelerators_one_image_serves_both() -> None:
    plain = read(["--namespace=a"], IMAGE, "host")
    both = read(["--namespace=a"], IMAGE | {"FAIRLEAD_ACCELERATOR_IMAGE": "r:1"}, "host")
    other = read(["--namespace=a"], IMAGE | {"FAIRLEAD_ACCELERATOR_IMAGE": "r:2"}, "host")
    assert (plain.image_for(0), plain.image_for(2)) == ("r:1", "r:1")
    assert (other.image_for(0), other.image_for(2)) == ("r:1", "r:2")
    assert defaults_hash(plain, "1") == defaults_hash(both, "1") != defaults_hash(other, "1")


def test_secrets_for_a_registry_come_from_the_environment_and_change_the_defaults() -> None:
    plain = read(["--namespace=a"], IMAGE, "host")
    settings = read(["--namespace=a"], IMAGE | {"FAIRLEAD_IMAGE_PULL_SECRETS": "x\ny\n"}, "host")
    assert (plain.image_pull_secrets, settings.image_pull_secrets) == ((), ("x", "y"))
    # Deployments take their turn for it, as for another image.
    assert defaults_hash(settings, "1") != defaults_hash(plain, "1")


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ([], IMAGE, "no namespace to serve: give --namespace"),
        (["--all-namespaces"], IMAGE, "no namespace for the Lease"),
        (["--namespace=a"], {}, "FAIRLEAD_RUNTIME_IMAGE is not set"),
        (["--namespace=A_b"], IMAGE, "'A_b' is not a namespace name"),
        (["--namespace=a", "--lease-namespace=.."], IMAGE, "'..' is not a namespace name"),
        (
            ["--namespace=a", "--probe-port=99999"],
            IMAGE,
            "--probe-port 99999 is not a port: choose one from 1",
        ),
        (
            ["--namespace=a"],
            {**IMAGE, "HF_ENDPOINT": "hub.test"},
            "HF_ENDPOINT must be http(s)://host",
        ),
        (["--namespace=a"], {**IMAGE, "HF_ENDPOINT": "ftp://hub.test"}, "HF_ENDPOINT must be"),
        (["--namespace=a"], {**IMAGE, "HF_ENDPOINT": "http://u@hub.test"}, "HF_ENDPOINT must be"),
        (["--namespace=a"], {**IMAGE, "HF_ENDPOINT": "http://hub.test:x"}, "HF_ENDPOINT must be"),
        (["--namespace=a"], {**IMAGE, "FAIRLEAD_ALLOWED_IMAGES": "("}, "not a regular expression"),
        (
            ["--namespace=a"],
            {**IMAGE, "FAIRLEAD_ALLOWED_REMOTE_CODE": "yes"},
            'must be "true" or "false"',
        ),
        (["--namespace=a"], {**IMAGE, "FAIRLEAD_ADMIN_PEERS": "{"}, "not JSON"),
        (["--namespace=a"], {**IMAGE, "FAIRLEAD_ADMIN_PEERS": "{}"}, "must be a JSON list"),
    ],
)
def test_settings_that_cannot_work_are_named(
    arguments: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError) as refusal:
        read(arguments, environ, "host")
    assert message in str(refusal.value)


@pytest.mark.parametrize("kubeconfig", ["", "/nowhere", "no yaml", "bad yaml"])
def test_without_a_cluster_the_command_says_what_to_set(
    kubeconfig: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "config"
    file.write_text("a: [" if kubeconfig == "bad yaml" else "a")
    monkeypatch.setenv("KUBECONFIG", str(file) if "yaml" in kubeconfig else kubeconfig)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("FAIRLEAD_RUNTIME_IMAGE", "r:1")
    with serving({}) as (taken, _):
        assert main(["--namespace=a", f"--probe-port={taken}"]) == 2
        assert (
            f"--probe-port {taken}: Address already in use: choose another"
            in capsys.readouterr().err
        )
        assert main(["--namespace=a", f"--probe-port={taken}", "--log-format=text"]) == 2
        assert capsys.readouterr().err.startswith(f"error: --probe-port {taken}")
    assert main(["--namespace=a", f"--probe-port={taken}"]) == 2
    refusal = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert refusal["message"].startswith("KUBECONFIG")


# -- pods


def ask(port: int, path: str, seconds: float = 2.0, address: str = "127.0.0.1") -> bytes:
    async def go() -> bytes:
        async with Pods(seconds, port) as pods:
            return await pods._read("GET", address, path)

    return asyncio.run(go())


def test_a_scrape_reads_a_bounded_answer_and_follows_nothing() -> None:
    answers: dict[str, Answer] = {
        "/metrics": (200, {}, b"fine"),
        "/big": (200, {}, b"x" * (2 << 20)),
        "/moved": (302, {"Location": "/metrics"}, b""),
        "/broken": (500, {}, b"secret"),
    }
    with serving(answers) as (port, asked):
        assert ask(port, "/metrics") == b"fine"
        for path, why in (
            ("/big", "more than"),
            ("/moved", "status 302"),
            ("/broken", "status 500"),
        ):
            with pytest.raises(ScrapeError, match=why) as refusal:
                ask(port, path)
            assert "secret" not in str(refusal.value)
        assert asked.count("/metrics") == 1


def test_a_pod_that_trickles_is_given_up_in_time() -> None:
    whole_answer = 300.0  # seconds
    with serving({"/metrics": (200, {}, b"x" * 3000)}, trickle=0.1) as (port, _):
        began = time.monotonic()
        with pytest.raises(ScrapeError, match="TimeoutError"):
            ask(port, "/metrics", seconds=0.5)
        assert time.monotonic() - began < whole_answer / 2


@pytest.mark.parametrize("address", ["", "localhost", "169.254.169.254/x", "127.0.0.1:80#"])
def test_only_addresses_are_asked(address: str) -> None:
    with pytest.raises(ScrapeError, match="no address"):
        ask(1, "/metrics", address=address)


@pytest.mark.parametrize(
    ("body", "good"), [(b'{"token": 5}', True), (b"{}", False), (b"[]", False), (b"x", False)]
)
def test_a_canary_is_a_token_and_nothing_else(body: bytes, *, good: bool) -> None:
    async def go(port: int) -> None:
        async with Pods(2.0, port) as pods:
            await pods.canary("127.0.0.1")

    with serving({"/canary": (200, {}, body)}) as (port, _):
        if good:
            asyncio.run(go(port))
        else:
            with pytest.raises(ScrapeError):
                asyncio.run(go(port))


# -- the hub

NAME = "owner/name"
CONFIG = f"/{NAME}/resolve/main/config.json"


def config(port: int, source: Source, times: int = 1) -> object:
    async def go() -> object:
        hub = Hub(f"http://127.0.0.1:{port}")
        try:
            for _ in range(times - 1):
                try:
                    await hub.config(source, "")
                except HubError:
                    continue
            return await hub.config(source, "")
        finally:
            await hub.close()

    return asyncio.run(go())


def test_the_hub_is_asked_for_one_file_once() -> None:
    with serving({CONFIG: (200, {}, b'{"model_type": "llama"}')}) as (port, asked):
        assert config(port, Source("hf", "owner/name"), times=5) == {"model_type": "llama"}
        assert asked == [CONFIG]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((401, {}, b""), "gated"),
        ((404, {}, b""), "check model.source and model.revision"),
        ((500, {}, b""), "answers 500 for config.json; planned once"),
        ((200, {}, b"[]"), "not a JSON object"),
        ((200, {}, b"{"), "not a JSON object: check the chart's hub.endpoint"),
        ((200, {}, b"[" * 100_000), "not a JSON object"),
        ((200, {}, b" " * (2 << 20)), "larger than"),
        ((302, {"Location": "http://evil.test/config.json"}, b""), "another host"),
        ((302, {"Location": CONFIG}, b""), "in circles"),
    ],
)
def test_what_is_no_config_is_an_answer_too_and_not_asked_for_again_at_once(
    answer: Answer, why: str
) -> None:
    async def go(port: int) -> tuple[int, int]:
        clock = [0.0]
        hub, source = Hub(f"http://127.0.0.1:{port}", clock=lambda: clock[0]), Source("hf", NAME)
        try:
            with pytest.raises(HubError, match=why):
                await hub.config(source, "")
            first = len(asked)
            clock[0] = RETRY_SECONDS - 1
            with pytest.raises(HubError, match=why):
                await hub.config(source, "")
            remembered = len(asked)
            clock[0] = RETRY_SECONDS
            with pytest.raises(HubError, match=why):
                await hub.config(source, "")
            assert len(asked) == 2 * first, "asked again after a while"
            return first, remembered
        finally:
            await hub.close()

    with serving({CONFIG: answer}) as (port, asked):
        first, remembered = asyncio.run(go(port))
    assert first == remembered > 0


def test_a_config_is_asked_for_again_after_an_hour() -> None:
    async def go(port: int) -> list[int]:
        clock, counts = [0.0], []
        hub, source = Hub(f"http://127.0.0.1:{port}", clock=lambda: clock[0]), Source("hf", NAME)
        try:
            for clock[0] in (0.0, KEEP_SECONDS - 1, KEEP_SECONDS):
                assert await hub.config(source, "") == {"model_type": "llama"}
                counts.append(len(asked))
        finally:
            await hub.close()
        return counts

    with serving({CONFIG: (200, {}, b'{"model_type": "llama"}')}) as (port, asked):
        assert asyncio.run(go(port)) == [1, 1, 2]


def test_other_sources_are_never_asked_for() -> None:
    with serving({}) as (port, asked):
        for source in (Source("pvc", "a", "claim"), Source("file", "/a")):
            with pytest.raises(HubError, match="once a pod has read it"):
                config(port, source)
        assert isinstance(config(port, Source("demo")), dict)
        assert asked == []


# -- probes and pace


def test_the_probe_port_tells_a_hung_loop_from_an_api_server_that_is_away() -> None:
    clock = [0.0]
    health = Health(Metrics().registry, clock=lambda: clock[0])
    assert health.answer("/healthz")[0] == 200
    assert health.answer("/readyz")[0] == 503
    health.ready = True
    assert health.answer("/readyz")[0] == 200
    clock[0] = STALE_SECONDS + 1
    assert health.answer("/healthz")[0] == health.answer("/readyz")[0] == 503
    health.beat()
    assert health.answer("/healthz")[0] == 200
    assert b"fairlead_operator_leader" in health.answer("/metrics")[2]
    assert health.answer("/secrets")[0] == 404


@pytest.mark.parametrize("reason", [0, errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_the_probe_port_answers_on_every_ip_family_of_the_machine(
    reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet asks the pod's own address, which is IPv6 in a cluster of IPv6 alone."""
    hosts = ["127.0.0.1"] if reason else loopbacks()
    if reason:
        without_ipv6(monkeypatch, reason)
    server = serve(Health(Metrics().registry), 0)
    try:
        for host in hosts:
            probe = http.client.HTTPConnection(host, server.server_address[1], timeout=10)
            probe.request("GET", "/healthz")
            assert probe.getresponse().status == 200
            probe.close()
    finally:
        server.shutdown()
        server.server_close()


def test_requests_are_paced_beyond_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def go() -> None:
        pace = Pace(rate=100, burst=10, clock=lambda: 0.0)
        await asyncio.gather(*(pace.take() for _ in range(40)))

    monkeypatch.setattr("fairlead_operator.cluster.client.asyncio.sleep", sleep)
    asyncio.run(go())
    assert waits == pytest.approx([turn / 100 for turn in range(1, 31)])


def test_logs_are_one_json_object_a_line() -> None:
    import logging

    from fairlead_operator.logs import JsonLines

    record = logging.LogRecord("x", logging.INFO, "", 0, "evil\n\x1b[31m %s", ("text",), None)
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "evil [31m text"


# -- the API server

LIST = "/apis/apps/v1/deployments"
SLOW_DOWN = b'{"reason": "TooManyRequests", "message": "slow down"}'


def cluster_call(port: int) -> object:
    async def go() -> object:
        client = ApiClient(Configuration(host=f"http://127.0.0.1:{port}"))
        try:
            return await Cluster(client, Store(), Metrics()).list(DEPLOYMENT)
        finally:
            await client.close()  # type: ignore[no-untyped-call]

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("answer", "code", "reason"),
    [
        ((200, {}, b"[]"), 200, "BadAnswer"),
        ((200, {}, b"[" * 100_000), 200, "BadAnswer"),
        ((200, {}, b"{}"), 200, "BadAnswer"),
        ((200, {}, b'{"items": [], "metadata": {}}'), 200, "BadAnswer"),
        ((200, {}, b'{"items": [{"meta'), 200, "BadAnswer"),
        ((500, {}, b"oops"), 500, "BadAnswer"),
        ((429, {"Retry-After": "3"}, SLOW_DOWN), 429, "TooManyRequests"),
    ],
)
def test_what_is_no_good_answer_is_an_error_that_the_queue_can_retry(
    answer: Answer, code: int, reason: str
) -> None:
    with serving({LIST: answer}) as (port, _):
        with pytest.raises(ApiError) as refusal:
            cluster_call(port)
        assert (refusal.value.code, refusal.value.reason) == (code, reason)
        assert refusal.value.retry_after == (3.0 if code == 429 else 0.0)


def test_no_answer_is_an_error_too() -> None:
    with pytest.raises(ApiError) as refusal:
        cluster_call(1)
    assert refusal.value.code == 0


def test_without_the_lease_nothing_is_written() -> None:
    async def go() -> None:
        client = ApiClient(Configuration(host="http://127.0.0.1:1"))
        cluster = Cluster(client, Store(), Metrics())
        body = {"metadata": {"name": "x", "namespace": "ns", "uid": "1", "resourceVersion": "1"}}
        for write in (
            cluster.apply(DEPLOYMENT, body, None),
            cluster.patch(DEPLOYMENT, body, []),
            cluster.delete(DEPLOYMENT, body),
            cluster.set_status(body, {}),
            cluster.post_event(EVENT, body),
        ):
            with pytest.raises(FencedError):
                await write
        await client.close()  # type: ignore[no-untyped-call]

    asyncio.run(go())


def test_a_write_that_waited_for_its_turn_is_not_sent_once_the_lease_is_lost() -> None:
    holds = True

    class SlowPace(Pace):
        async def take(self) -> None:
            nonlocal holds
            holds = False

    async def go(port: int) -> None:
        client = ApiClient(Configuration(host=f"http://127.0.0.1:{port}"))
        cluster = Cluster(client, Store(), Metrics(), SlowPace(1, 1))
        cluster.may_write = lambda: holds
        with pytest.raises(FencedError):
            await cluster.apply(DEPLOYMENT, {"metadata": {"name": "x", "namespace": "ns"}}, None)
        await client.close()  # type: ignore[no-untyped-call]

    with serving({}) as (port, asked):
        asyncio.run(go(port))
    assert asked == []
