"""Small token shards, and servers of them that can lie, hang or be away."""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from shoal.peer.data.manifest import BYTES, DTYPES, MANIFEST, Manifest, ShardFile, TokenizerAbout
from shoal.swarm.protocol.run_file import DataSection

BLOCK = 4096
URL = "shards:https://data.example.org/reef"


def tokens_at(positions: Any, vocab: int = 256) -> Any:
    """The token at each position; no two blocks are alike."""
    return (positions + positions // 251) % vocab


def make_shards(
    folder: Path, *sizes: int, dtype: str = "u16", tokenizer: TokenizerAbout = BYTES, block_bytes: int = BLOCK
) -> Manifest:
    """Write files with so many tokens each, whose values tell where they are, and their manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    files, digests, at = [], [], 0
    for number, size in enumerate(sizes):
        tokens = tokens_at(np.arange(at, at + size), tokenizer.vocab).astype(DTYPES[dtype])
        at += size
        data = tokens.tobytes()
        (folder / f"{number}.{dtype}").write_bytes(data)
        files.append(ShardFile(f"{number}.{dtype}", len(data)))
        digests += [blake3(data[start : start + block_bytes]).digest() for start in range(0, len(data), block_bytes)]
    table = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
    manifest = Manifest(dtype, block_bytes, tokenizer, tuple(files), table)
    (folder / MANIFEST).write_bytes(manifest.data)
    return manifest


def section(manifest: Manifest, **changes: Any) -> DataSection:
    return DataSection(**({"source": URL, "manifest": manifest.digest.hex(), "held_out": 0.1} | changes))


@dataclass
class Server:
    """``asked``: paths and ranges; ``lies``: whether it sends other bytes than the files have, in all but manifests;
    ``is_away``: whether it answers 503; ``cuts``: whether it closes the connection in the middle."""

    folder: Path
    url: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    lies: bool = False
    is_away: bool = False
    cuts: bool = False
    has_ranges: bool = True
    hangs: threading.Event | None = None

    @property
    def blocks_asked(self) -> int:
        return sum(bool(span) for _, span in self.asked)


@contextmanager
def serving(folder: Path, **how: Any) -> Iterator[Server]:
    """Serve a folder with ranges."""
    about = Server(folder, **how)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            span = self.headers.get("Range", "")
            about.asked.append((self.path, span))
            if about.hangs is not None:
                about.hangs.wait(30)
                return
            path = about.folder / self.path.lstrip("/")
            if about.is_away or not path.is_file():
                self.send_error(503 if about.is_away else 404)
                return
            data = path.read_bytes()
            if not about.has_ranges:
                span = ""
            if span:
                first, last = span.removeprefix("bytes=").split("-")
                data = data[int(first) : int(last) + 1]
                if about.lies:
                    data = bytes(len(data))
            self.send_response(206 if span else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data[: len(data) // 2] if about.cuts else data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    about.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield about
    finally:
        if about.hangs is not None:
            about.hangs.set()
        server.shutdown()
        server.server_close()
