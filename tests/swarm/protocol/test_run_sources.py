import re

import pytest

from shoal.swarm.errors import RunFileError
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.run_sources import check_source, check_url, file_pattern, is_public


@pytest.mark.parametrize(
    "source",
    [
        "stdlib",
        "own",
        "text:a.txt",
        "text:books/**/*.txt",
        "text:**/[a-c]?.md",
        "text:with space/ünïcode ~.txt",
        "tokens:train.u16",
        "https://example.org/data.u16",
        "https://8.8.8.8:8443/data",
        "s3://bucket/folder/train.u16",
        "gs://bucket/a",
        "hf://datasets/owner/name/a.parquet",
    ],
)
def test_what_a_run_file_may_name(source: str) -> None:
    check_source(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("text:~/.secrets/*", "must be relative"),
        ("text:~root/x", "must be relative"),
        ("text:/etc/passwd", "must be relative"),
        ("text://etc/passwd", "not text:"),
        ("text:///etc/passwd", "not text:"),
        ("text:../x", "must be relative"),
        ("text:a/../../x", "must be relative"),
        ("text:./a", "must be relative"),
        ("text:a//b", "must be relative"),
        ("text:a/", "must be relative"),
        ("text:.ssh/id_ed25519", "hidden files"),
        ("text:a/.env", "hidden files"),
        ("text:C:/x", "no backslash, colon"),
        ("text:C:x", "no backslash, colon"),
        ("text:a\\..\\b", "no backslash, colon"),
        ("text:a\0b", "control character"),
        ("text:a\nb", "control character"),
        ("tokens:/data/train.u16", "must be relative"),
        ("tokens:~/train.u16", "must be relative"),
        ("text:zip://a.txt::/etc/x.zip", "no backslash, colon"),
        ("text:", "expected stdlib"),
        ("tokens:", "expected stdlib"),
        ("tokens", "expected stdlib"),
        ("stdlib:x", "expected stdlib"),
        ("TEXT:x", "expected stdlib"),
        ("/etc/passwd", "expected stdlib"),
        ("file:/etc/passwd", "expected stdlib"),
        ("file:///etc/passwd", "not file:"),
        ("FILE:///etc/passwd", "not file:"),
        ("local:///etc/passwd", "not local:"),
        ("http://example.org/x", "not http:"),
        ("ftp://example.org/x", "not ftp:"),
        ("memory://x", "not memory:"),
        ("simplecache::https://example.org/x", "not simplecache:"),
        ("zip://a.txt::https://example.org/x.zip", "not zip:"),
        ("https://example.org/x::file:///etc/passwd", "chained"),
        ("s3://bucket/a::file:///etc/passwd", "chained"),
        ("https://127.0.0.1:8000/x", "not the public name"),
        ("https://127.1/x", "not the public name"),
        ("https://2130706433/x", "not the public name"),
        ("https://0x7f000001/x", "not the public name"),
        ("https://0177.0.0.1/x", "not the public name"),
        ("https://0x7f.0.0.1/x", "not the public name"),
        ("https://[fe80:0:0:0:0:0:0:1]/x", "not the public name"),
        ("https://[::1]/x", "chained"),
        ("https://169.254.169.254/latest/meta-data", "not the public name"),
        ("https://10.0.0.1/x", "not the public name"),
        ("https://192.168.1.1/x", "not the public name"),
        ("https://100.64.0.1/x", "not the public name"),
        ("https://0.0.0.0/x", "not the public name"),
        ("https://224.0.0.1/x", "not the public name"),
        ("https://localhost/x", "not the public name"),
        ("https://LOCALHOST./x", "not the public name"),
        ("https://a.localhost/x", "not the public name"),
        ("https://printer.local/x", "not the public name"),
        ("https://metadata.google.internal/x", "not the public name"),
        ("https://router/x", "not the public name"),
        ("https://１２７.0.0.1/x", "outside of ASCII"),
        ("https://example.org\\@127.0.0.1/x", "backslashes"),
        ("https://example.org /x", "spaces"),
        ("https://user:secret@example.org/x", "no user or password"),
        ("https://%31%32%37.0.0.1/x", "not the public name"),
        ("https:///x", "not a whole URL"),
        ("https://:80/x", "not a whole URL"),
        ("https://example.org:99999/x", "not a URL"),
        ("https:example.org/x", "expected stdlib"),
        ("s3:///x", "not a whole URL"),
    ],
)
def test_what_it_may_not(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_source(source)


def test_the_run_file_says_which_field() -> None:
    toml = '[run]\nname = "r"\n[recipe]\nname = "gpt"\n[data]\nsource = "text:~/.secrets/*"\n[round]\ntokens = 1\n'
    with pytest.raises(RunFileError, match=r"data\.source: text:~/\.secrets/\*: must be relative.*--data FOLDER"):
        parse_run_file(toml)


def test_a_url_needs_its_slashes() -> None:
    with pytest.raises(ValueError, match="not a whole URL"):
        check_url("https:example.org")


def test_which_sources_are_files() -> None:
    assert file_pattern("text:a/*.txt") == ("text", "a/*.txt")
    assert file_pattern("tokens:a.u16") == ("tokens", "a.u16")
    for source in ("stdlib", "own", "text", "text://a", "https://example.org"):
        assert file_pattern(source) is None


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("255.255.255.255", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2002:7f00:1::", False),  # 6to4 of 127.0.0.1
        ("64:ff9b::7f00:1", False),  # NAT64 of 127.0.0.1
        ("64:ff9b::808:808", True),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize("text", ["", "127.1", "example.org", "0177.0.0.1", "1.2.3.4 "])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="does not appear to be"):
        is_public(text)
