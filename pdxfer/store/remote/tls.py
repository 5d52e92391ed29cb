"""TLS of remote tiers, from the URL's settings: whom to trust, and who we are."""

import ssl

from pdxfer.core.errors import ConfigError
from pdxfer.store.remote.url import RemoteUrl

TLS_SETTINGS = ("tls_ca", "tls_cert", "tls_key", "tls_verify")
"""PEM files: the authority (default: the system's), our certificate and its key; `tls_verify=false` trusts anyone."""


def tls_context(url: RemoteUrl) -> ssl.SSLContext:
    """A client's context. Raises ConfigError naming the file that cannot be used."""
    ca, cert, key = url.text("tls_ca"), url.text("tls_cert"), url.text("tls_key")
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            context.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"store.tiers: {url.shown}: tls_ca={ca!r} tls_cert={cert!r} tls_key={key!r}: {error}"
        ) from error
    if not url.flag("tls_verify", True):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def tls_for_redis_py(url: RemoteUrl) -> dict[str, object]:
    """The same for redis-py."""
    verify = url.flag("tls_verify", True)
    return {
        "ssl": True,
        "ssl_ca_certs": url.text("tls_ca") or None,
        "ssl_certfile": url.text("tls_cert") or None,
        "ssl_keyfile": url.text("tls_key") or None,
        "ssl_cert_reqs": "required" if verify else "none",
        "ssl_check_hostname": verify,
    }
