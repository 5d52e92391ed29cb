"""The `s3`, `gs` and `az` tiers: object stores through opendal (pip install 'pdxfer[cloud]').

    s3://[ACCESS_KEY:SECRET@]BUCKET[/PATH][?region=...&endpoint=...]     also MinIO, SeaweedFS, Ceph ... by endpoint
    gs://BUCKET[/PATH][?credential_path=FILE]
    az://[ACCOUNT:KEY@]CONTAINER[/PATH][?endpoint=...]

Without keys in the URL or options, the clouds' usual sources are asked: environment, profile, instance role.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import Clock
from pdxfer.core.errors import ConfigError
from pdxfer.core.install import pip_install
from pdxfer.store.remote.cloud_session import CloudSession, SizeGuess
from pdxfer.store.remote.server import Server
from pdxfer.store.remote.tier import RemoteTier
from pdxfer.store.remote.url import RemoteUrl

_SERVICES = {
    "s3": ("s3", "bucket", ("access_key_id", "secret_access_key")),
    "gs": ("gcs", "bucket", ("", "")),
    "az": ("azblob", "container", ("account_name", "account_key")),
}
"""Scheme → opendal's service, what it calls the bucket, what user and password of the URL are there."""
_PASSED = (
    "endpoint",
    "region",
    "access_key_id",
    "secret_access_key",
    "session_token",
    "role_arn",
    "enable_virtual_host_style",
    "server_side_encryption",
    "default_storage_class",
    "credential",
    "credential_path",
    "service_account",
    "account_name",
    "account_key",
    "sas_token",
)
"""Settings that opendal takes under the same name."""
_HELPERS = 16
"""Questions of one lookup that run at the same time."""


class CloudTier(RemoteTier):
    """Implements base.Tier."""

    settings = (*_PASSED, "anonymous")
    default_prefix = "pdxfer/"
    default_connections = 8
    overruns = True

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
    ) -> None:
        super().__init__(config, clock, tenant_quota=tenant_quota, pin_fraction=pin_fraction)
        opendal = load_opendal()
        service, settings = operator_settings(self.url)
        try:
            operator = opendal.Operator(service, **settings)
        except Exception as error:  # its errors have no common base before the call has a kind
            raise ConfigError(f"store.tiers: {self.url.shown}: {str(error).splitlines()[0]}") from error
        self._reader = operator.layer(_timeouts(opendal, config.get_timeout_s))
        self._writer = operator.layer(_timeouts(opendal, config.put_timeout_s))
        self._helpers = ThreadPoolExecutor(_HELPERS, "pdxfer-cloud")
        self._guess = SizeGuess()
        self._server = self.server(self.url.shown, self._session)

    def servers(self) -> Iterable[Server]:
        """The one service."""
        return (self._server,)

    def place(self, key: bytes) -> Server | None:
        """The one service."""
        return self._server

    async def close(self) -> None:
        """Also ends the helpers."""
        await super().close()
        self._helpers.shutdown(wait=False, cancel_futures=True)

    def _session(self, end: float) -> CloudSession:
        return CloudSession(self._reader, self._writer, self._prefix, self._helpers, self._guess)


def operator_settings(url: RemoteUrl) -> tuple[str, dict[str, str]]:
    """opendal's name of the service, and its settings for this place. Raises ConfigError."""
    service, place, (user, password) = _SERVICES[url.scheme]
    if len(url.addresses) != 1 or url.addresses[0].port:
        raise ConfigError(f"store.tiers: {url.shown} must name one {place}: {url.scheme}://{place.upper()}/PATH")
    settings = {place: url.addresses[0].host, "root": "/" + url.path}
    settings |= {name: url.text(name) for name in _PASSED if url.text(name)}
    if url.user:
        if not user:
            raise ConfigError(f"store.tiers: {url.shown}: gs has no user and password; set credential_path")
        settings |= {user: url.user, password: url.password}
    if settings.get("secret_access_key"):
        settings |= {"disable_config_load": "true", "disable_ec2_metadata": "true"}
    if url.flag("anonymous"):
        settings |= {"allow_anonymous": "true", "disable_config_load": "true"}
        settings |= {"disable_vm_metadata": "true"} if service == "gcs" else {}
    if service == "azblob" and "endpoint" not in settings:
        account = settings.get("account_name")
        if not account:
            raise ConfigError(f"store.tiers: {url.shown} needs the account: az://ACCOUNT:KEY@CONTAINER, or endpoint")
        settings["endpoint"] = f"https://{account}.blob.core.windows.net"
    return service, settings


def load_opendal() -> Any:
    """opendal. Raises ConfigError saying what to install."""
    try:
        import opendal
        import opendal.layers
    except ImportError as error:
        raise ConfigError(f"store.tiers: s3, gs and az need opendal ({error}): {pip_install('cloud')}") from error
    return opendal


def _timeouts(opendal: Any, seconds: float) -> Any:
    return opendal.layers.TimeoutLayer(timeout=seconds, io_timeout=seconds)
