"""Object stores on this machine that the real clients talk to: gs://, and s3:// beside it.

They answer what gcsfs, google-cloud-storage and TensorStore ask of Google Cloud Storage, and s3fs
of S3, as far as the tests go: preconditions, ranges, listings, and uploads in one or several
requests. An object appears at the end of its upload, whole.
"""

import atexit
import functools
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import fsspec.config

_DATE = "2026-01-01T00:00:00.000Z"
_GS = re.compile(r"(?:/download|/upload)?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?")
_S3 = re.compile(r"/([^/]+)/?(.*)")


class ObjectStores(ThreadingHTTPServer):
    """The buckets of both kinds."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.RLock()
        self.buckets: dict[str, dict[str, tuple[int, bytes]]] = {}  # generation and content
        self.uploads: list[tuple[str, bytearray]] = []  # name and what has come so far
        self.read_only: set[str] = set()  # buckets that nobody may write to
        self.forbidden: set[str] = set()  # buckets that nobody may look at
        self.on_write: Callable[[str], None] = _nothing  # gets every name before it is made
        self.num_made = 0

    def add_bucket(self, name: str) -> dict[str, tuple[int, bytes]]:
        """Makes an empty bucket; returns its objects."""
        return self.buckets.setdefault(name, {})

    def make(self, objects: dict[str, tuple[int, bytes]], name: str, content: bytes) -> None:
        """Makes or replaces an object."""
        self.on_write(name)
        self.num_made += 1
        objects[name] = (self.num_made, content)

    def handle_error(self, request, client_address) -> None:
        """Says nothing of clients that have gone, as gcsfs does with half of its questions."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _nothing(name: str) -> None:
    pass


@functools.cache
def object_stores() -> ObjectStores:
    """Starts the stores once for the process, and turns its clients to them."""
    server = ObjectStores()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    os.environ |= {
        "STORAGE_EMULATOR_HOST": address,  # gcsfs and google-cloud-storage
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",  # TensorStore looks for no other
        "FSSPEC_GS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which speaks another protocol
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }
    cache = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["RECMODELS_CACHE"] = cache
    fsspec.config.set_conf_env(fsspec.config.conf)  # which has read the environment already
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and content in one packet: two would wait for each other
    server: ObjectStores

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()  # the client sends nothing before it has this
        return True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self._query = {
            name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()
        }
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = _GS.fullmatch(url.path)
        self._is_gs = found is not None
        found = found or _S3.fullmatch(url.path)
        assert found is not None, self.path
        bucket, name = found[1], unquote(found[2] or "")
        with self.server.lock:
            refusal = self._refusal(bucket)
            if refusal is not None:
                self._refuse(*refusal)
            elif url.path.startswith("/upload/"):
                self._upload(bucket)
            elif name:
                self._object(bucket, name)
            elif url.path.endswith("/o") or "list-type" in self._query:
                self._list(bucket)
            else:
                self._send(200, {"name": bucket})

    def __getattr__(self, name: str) -> Callable[[], None]:
        if not name.startswith("do_"):  # do_GET and the like
            raise AttributeError(name)
        return self._answer

    def _refusal(self, bucket: str) -> tuple[int, str] | None:
        is_write = self.command not in ("GET", "HEAD")
        if bucket in self.server.forbidden or (is_write and bucket in self.server.read_only):
            return 403, "AccessDenied"
        return None if bucket in self.server.buckets else (404, "NoSuchBucket")

    def _object(self, bucket: str, name: str) -> None:
        objects = self.server.buckets[bucket]
        if self.command == "PUT":
            self._make(bucket, name, self._body)
        elif name not in objects:
            self._refuse(404, "NoSuchKey")
        elif not self._has_generation(objects[name][0]):
            pass
        elif self.command == "DELETE":
            del objects[name]
            self._send(204, b"")
        elif self._is_gs and self._query.get("alt") != "media":
            self._send(200, self._description(bucket, name))
        else:
            self._content(*objects[name])

    def _content(self, generation: int, content: bytes) -> None:
        headers = {
            "X-Goog-Generation": str(generation),
            "ETag": f'"{generation}"',
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        }
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self._send(200, content, headers)
            return
        size = len(content)
        first = int(asked[1]) if asked[1] else max(size - int(asked[2]), 0)
        stop = min(int(asked[2]) + 1, size) if asked[1] and asked[2] else size
        if first >= size:
            self._refuse(416, "InvalidRange")
            return
        headers["Content-Range"] = f"bytes {first}-{stop - 1}/{size}"
        self._send(206, content[first:stop], headers)

    def _make(self, bucket: str, name: str, content: bytes) -> None:
        objects = self.server.buckets[bucket]
        if self._has_generation(objects[name][0] if name in objects else 0):
            self.server.make(objects, name, content)
            self._send(200, self._description(bucket, name) if self._is_gs else b"")

    def _has_generation(self, generation: int) -> bool:
        wanted = self._query.get("ifGenerationMatch", str(generation)) == str(generation)
        known = self._query.get("ifGenerationNotMatch") == str(generation)
        if not wanted:
            self._refuse(412, "PreconditionFailed")
        elif known:
            self._send(304, b"")
        return wanted and not known

    def _upload(self, bucket: str) -> None:
        kind = self._query["uploadType"]
        if kind == "media":
            self._make(bucket, self._query["name"], self._body)
        elif kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])
            assert boundary is not None
            _, description, rest = self._body.split(b"--" + boundary[1].encode() + b"\n", 2)
            content = rest.split(b"\n\n", 1)[1].removesuffix(b"--" + boundary[1].encode() + b"--")
            name = json.loads(description.split(b"\n\n", 1)[1])["name"]
            self._make(bucket, name, content.removesuffix(b"\n"))
        elif "upload_id" not in self._query:
            self.server.uploads.append((self._query["name"], bytearray()))
            place = f"http://{self.headers['Host']}{urlsplit(self.path).path}?uploadType=resumable"
            number = len(self.server.uploads) - 1
            self._send(200, b"", {"Location": f"{place}&upload_id={number}"})
        else:
            self._continue_upload(bucket, *self.server.uploads[int(self._query["upload_id"])])

    def _continue_upload(self, bucket: str, name: str, content: bytearray) -> None:
        content += self._body
        if self.headers["Content-Range"].endswith("/*"):
            self._send(308, b"", {"Range": f"bytes=0-{len(content) - 1}"})
        else:
            self._make(bucket, name, bytes(content))

    def _list(self, bucket: str) -> None:
        prefix, delimiter = self._query.get("prefix", ""), self._query.get("delimiter")
        names, prefixes = [], set()
        for name in sorted(self.server.buckets[bucket]):
            rest = name.removeprefix(prefix)
            if not name.startswith(prefix) or name < self._query.get("startOffset", ""):
                continue
            if "endOffset" in self._query and name >= self._query["endOffset"]:
                continue
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                names.append(name)
        if self._is_gs:
            items = [self._description(bucket, name) for name in names]
            self._send(200, {"items": items, "prefixes": sorted(prefixes)})
        else:
            self._send(200, self._xml_list(bucket, names, sorted(prefixes)))

    def _xml_list(self, bucket: str, names: list[str], prefixes: list[str]) -> bytes:
        objects = self.server.buckets[bucket]
        parts = [
            f"<Contents><Key>{escape(name)}</Key><LastModified>{_DATE}</LastModified>"
            f'<ETag>"{objects[name][0]}"</ETag><Size>{len(objects[name][1])}</Size></Contents>'
            for name in names
        ]
        parts += [
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in prefixes
        ]
        inner = f"<IsTruncated>false</IsTruncated>{''.join(parts)}"
        return f"<ListBucketResult>{inner}</ListBucketResult>".encode()

    def _description(self, bucket: str, name: str) -> dict[str, str]:
        generation, content = self.server.buckets[bucket][name]
        return {
            "bucket": bucket,
            "name": name,
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "timeCreated": _DATE,
            "updated": _DATE,
        }

    def _refuse(self, status: int, code: str) -> None:
        if self._is_gs:
            self._send(status, {"error": {"code": status, "message": code}})
        else:
            text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
            self._send(status, text.encode())

    def _send(
        self, status: int, content: bytes | dict, headers: dict[str, str] | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(data)
