import re

import pytest

from shoal.swarm.errors import RunFileError
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.run_sources import check_source, check_url, file_pattern


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
        ("https://127.0.0.1:8000/x", "not a public host"),
        ("https://127.1/x", "not a public host"),
        ("https://2130706433/x", "not a public host"),
        ("https://0x7f000001/x", "not a public host"),
        ("https://0177.0.0.1/x", "not a public host"),
        ("https://0x7f.0.0.1/x", "not a public host"),
        ("https://[fe80:0:0:0:0:0:0:1]/x", "not a public host"),
        ("https://[::1]/x", "chained"),
        ("https://169.254.169.254/latest/meta-data", "not a public host"),
        ("https://10.0.0.1/x", "not a public host"),
        ("https://192.168.1.1/x", "not a public host"),
        ("https://100.64.0.1/x", "not a public host"),
        ("https://0.0.0.0/x", "not a public host"),
        ("https://224.0.0.1/x", "not a public host"),
        ("https://localhost/x", "not a public host"),
        ("https://LOCALHOST./x", "not a public host"),
        ("https://a.localhost/x", "not a public host"),
        ("https://printer.local/x", "not a public host"),
        ("https://metadata.google.internal/x", "not a public host"),
        ("https://router/x", "not a public host"),
        ("https://１２７.0.0.1/x", "non-ASCII"),
        ("https://example.org\\@127.0.0.1/x", "backslashes"),
        ("https://example.org /x", "spaces"),
        ("https://user:secret@example.org/x", "contain a user or password"),
        ("https://%31%32%37.0.0.1/x", "not a public host"),
        ("https:///x", "not a complete URL"),
        ("https://:80/x", "not a complete URL"),
        ("https://example.org:99999/x", "not a URL"),
        ("https:example.org/x", "expected stdlib"),
        ("s3:///x", "not a complete URL"),
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
    with pytest.raises(ValueError, match="not a complete URL"):
        check_url("https:example.org")


def test_which_sources_are_files() -> None:
    assert file_pattern("text:a/*.txt") == ("text", "a/*.txt")
    assert file_pattern("tokens:a.u16") == ("tokens", "a.u16")
    for source in ("stdlib", "own", "text", "text://a", "https://example.org"):
        assert file_pattern(source) is None
