"""The file of API keys: its form, its renewal, and the limits of a key."""

import logging
import os
from pathlib import Path

import pytest

from fairlead_runtime.front.errors import ApiError
from fairlead_runtime.front.key_file import (
    MAX_KEY,
    MAX_KEYS,
    KeyFileError,
    KeyRing,
    api_keys,
    parse,
)
from fairlead_runtime.front.key_limits import USUAL_PRIORITIES, KeyLimits, KeyUsage
from fairlead_runtime.settings.engine_config import ConfigError

SECRET = "sk-0123456789abcdef0123456789abcdef"


def test_a_line_is_a_key_with_its_name_and_limits() -> None:
    keys = parse(
        f"# of the team\n\n{SECRET} name=alice requests_per_minute=60 concurrent_requests=4 "
        "priority=-5..-1\n  second-key  \r\n"
    )
    (_, alice, limits), (digest, second, unlimited) = keys
    assert (alice, limits) == ("alice", KeyLimits(60, 4, range(-5, 0)))
    assert (second, unlimited) == (digest.hex()[:16], KeyLimits())


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (f"{SECRET} other", "no setting"),
        (f"{SECRET} {SECRET}", "no setting"),
        (f"{SECRET} size=3", "no setting"),
        (f"{SECRET} name=a name=b", "name is set twice"),
        (f"{SECRET} name=", "name: use"),
        (f"{SECRET} name=ä", "name: use"),
        (f"{SECRET} requests_per_minute=0", "requests_per_minute: use a whole number from 1"),
        (f"{SECRET} requests_per_minute=60001", "requests_per_minute"),
        (f"{SECRET} concurrent_requests=-1", "concurrent_requests"),
        (f"{SECRET} concurrent_requests=٣", "concurrent_requests"),
        (f"{SECRET} concurrent_requests={'9' * 5000}", "concurrent_requests"),
        (f"{SECRET} priority=5", "priority: use LOWEST..HIGHEST"),
        (f"{SECRET} priority=2..1", "priority: use"),
        (f"{SECRET} priority=1..{2**31}", "priority: use"),
        (f"{SECRET} priority={-(2**31) - 1}..1", "priority: use"),
        (f"{SECRET} priority=-٣..3", "priority: use"),
        (SECRET + "x" * MAX_KEY, "longer than"),
        (f"{SECRET}\n{SECRET} name=other", "line 3: an earlier line"),
        (f"{SECRET} name=same\nsecond name=same", "line 3: an earlier line"),
        ("\n".join(str(n) for n in range(MAX_KEYS)), f"more than {MAX_KEYS} keys"),
    ],
)
def test_a_wrong_line_is_named_and_not_quoted(line: str, what: str) -> None:
    with pytest.raises(KeyFileError, match=what) as raised:
        parse(f"first-line\n{line}\n")
    assert "sk-" not in str(raised.value)
    assert "line 2" in str(raised.value) or "line 3" in what or "keys" in what


@pytest.mark.parametrize(
    ("priorities", "unset", "allowed", "refused"),
    [
        (USUAL_PRIORITIES, 0, (0, 2**31 - 1), (-1, -(2**31))),
        (range(-5, 6), 0, (-5, 0, 5), (-6, 6)),
        (range(10, 21), 10, (10, 20), (0, 9, 21)),
        (range(-20, -9), -10, (-20, -10), (0, -9)),
    ],
)
def test_a_key_has_a_range_of_priorities(
    priorities: range, unset: int, allowed: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    limits = KeyLimits(priorities=priorities)
    assert limits.priority(None) == unset, "without the field a request has the one nearest to 0"
    assert tuple(map(limits.priority, allowed)) == allowed
    for sent in refused:
        with pytest.raises(ApiError, match=f"{priorities[0]} to {priorities[-1]}") as raised:
            limits.priority(sent)
        assert (raised.value.status, raised.value.param) == (400, "priority")


def salts(content: str, path: Path, keys: tuple[str, ...], text: bytes = b"") -> list[bytes]:
    path.write_text(content)
    ring = KeyRing(str(path))
    found = [ring.find(key.encode()) for key in keys]
    return [key.salt(text) for key in found if key is not None]


def test_pods_with_the_same_file_salt_alike_and_keys_apart(tmp_path: Path) -> None:
    both, other = (SECRET, "second"), "other"
    content = f"{SECRET} name=alice\nsecond name=bob\n"
    here, there = (salts(content, tmp_path / pod, both) for pod in "ab")
    assert here == there
    more = salts(content, tmp_path / "a", both, b"salt")
    assert len({*here, *more}) == 4
    # What changes in the file changes no salt of a key that stays; a new key of an old name has
    # one of its own.
    changed = f"{other} name=bob\n# a comment\n{SECRET} requests_per_minute=5\n"
    renewed = salts(changed, tmp_path / "a", (SECRET, other))
    assert renewed[0] == here[0]
    assert renewed[1] not in here


def test_a_key_shows_neither_itself_nor_its_salt(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(SECRET)
    key = KeyRing(str(tmp_path / "keys")).find(SECRET.encode())
    assert key is not None
    assert key.salt(b"") != key.digest
    assert repr(key.digest) not in repr(key)


def test_only_the_names_in_the_file_are_names(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{SECRET} name=alice\nsecond-key\nthird-key name=carol\n")
    assert KeyRing(str(path)).names == ("alice", "carol")


@pytest.mark.parametrize("content", [b"fresh key with words", b"\xff\xfe", b"x" * 3_000_000])
def test_a_wrong_new_file_keeps_the_old_keys_and_says_so_once(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(SECRET)
    ring = KeyRing(str(path))
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert ring.find(SECRET.encode()) is not None
            assert ring.broken
    assert len(caplog.messages) == 1
    assert "the last keys stay valid" in caplog.text
    assert "fresh" not in caplog.text
    path.write_text("renewed")
    assert ring.find(b"renewed") is not None
    assert ring.find(SECRET.encode()) is None
    assert not ring.broken


def test_kubernetes_way_of_replacing_a_mounted_file_is_seen(tmp_path: Path) -> None:
    """A Secret's volume: keys -> ..data/keys, ..data -> a directory per version, renamed over."""
    for version in ("first", "second"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys").write_text(f"{version}-key")
        os.utime(tmp_path / version / "keys", (1, 1))
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "keys").symlink_to("..data/keys")
    ring = KeyRing(str(tmp_path / "keys"))
    assert ring.find(b"first-key") is not None
    (tmp_path / "..data_tmp").symlink_to("second")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    assert ring.find(b"first-key") is None
    assert ring.find(b"second-key") is not None


def test_a_file_that_may_be_read_again_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text(SECRET)
    ring = KeyRing(str(path))
    path.write_text("renewed")

    def refused(*_args: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refused)
        assert ring.find(SECRET.encode()) is not None
        assert ring.broken
    assert ring.find(b"renewed") is not None
    assert not ring.broken


def test_a_key_that_stays_keeps_its_usage(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{SECRET} requests_per_minute=1")
    ring = KeyRing(str(path), now=lambda: 0.0)
    key = ring.find(SECRET.encode())
    assert key is not None
    with key.usage.request(key.limits):
        pass
    path.write_text(f"{SECRET} name=alice requests_per_minute=1")
    renewed = ring.find(SECRET.encode())
    assert renewed is not None
    assert renewed.tenant == "alice"
    with pytest.raises(ApiError), renewed.usage.request(renewed.limits):
        pass


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def refused_for(usage: KeyUsage, limits: KeyLimits) -> int:
    """Seconds of Retry-After; 0 when a request is allowed, which it then counts."""
    try:
        with usage.request(limits):
            return 0
    except ApiError as error:
        return int(error.headers["retry-after"])


def test_no_sixty_seconds_have_more_requests_than_the_limit() -> None:
    clock = Clock()
    usage, limits = KeyUsage(clock), KeyLimits(requests_per_minute=2)
    assert refused_for(usage, limits) == 0
    clock.time = 50.0
    assert refused_for(usage, limits) == 0
    clock.time = 50.5
    assert refused_for(usage, limits) == 10, "rounded up: earlier than that would be refused"
    clock.time = 59.9
    assert refused_for(usage, limits) == 1
    clock.time = 60.0
    assert refused_for(usage, limits) == 0, "Retry-After is true, and a refusal does not count"
    assert refused_for(usage, limits) == 50


def test_a_lowered_limit_waits_for_the_right_request() -> None:
    clock = Clock()
    usage = KeyUsage(clock)
    for clock.time in (0.0, 10.0, 20.0):
        assert refused_for(usage, KeyLimits(requests_per_minute=3)) == 0
    lowered = KeyLimits(requests_per_minute=1)
    assert refused_for(usage, lowered) == 60
    clock.time = 80.0
    assert refused_for(usage, lowered) == 0


def test_concurrent_requests_are_counted_until_they_end() -> None:
    clock = Clock()
    usage, limits = KeyUsage(clock), KeyLimits(concurrent_requests=2)
    with usage.request(limits):
        clock.time = 30.0
    with usage.request(limits), usage.request(limits):
        # Two of 30 s run: one of them ends after 15 s, as far as is known.
        assert refused_for(usage, limits) == 15
    assert refused_for(usage, limits) == 0
    with pytest.raises(ZeroDivisionError), usage.request(limits), usage.request(limits):
        raise ZeroDivisionError
    assert refused_for(usage, limits) == 0


def test_one_key_may_come_from_the_environment(tmp_path: Path) -> None:
    ring = api_keys("", {"FAIRLEAD_API_KEY": f"  {SECRET}\n"})
    assert ring is not None
    found = ring.find(SECRET.encode())
    assert found is not None
    assert ring.find(b"another") is None
    ring.refresh()
    assert (len(ring), ring.broken, ring.names) == (1, False, ())
    # The same tenant, and the same salt of its cached blocks, as by a file.
    path = tmp_path / "keys"
    path.write_text(SECRET)
    by_file = api_keys(str(path), {"FAIRLEAD_API_KEY": ""})
    assert by_file is not None
    same = by_file.find(SECRET.encode())
    assert same is not None
    assert (same.tenant, same.salt(b"")) == (found.tenant, found.salt(b""))
    assert api_keys("", {}) is None


@pytest.mark.parametrize(
    "key", ["two words", "#comment", "   ", "a\tb", "a\x00b", "x" * 1025, "\udcff"]
)
def test_what_is_no_key_in_the_environment_is_refused_and_not_quoted(key: str) -> None:
    with pytest.raises(ConfigError, match="FAIRLEAD_API_KEY is no key") as refusal:
        api_keys("", {"FAIRLEAD_API_KEY": key})
    assert not key.strip() or key not in str(refusal.value)


def test_a_key_and_a_file_of_keys_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(SECRET)
    with pytest.raises(ConfigError, match="--api-key-file: FAIRLEAD_API_KEY is set, too") as both:
        api_keys(str(path), {"FAIRLEAD_API_KEY": SECRET})
    assert SECRET not in str(both.value)
