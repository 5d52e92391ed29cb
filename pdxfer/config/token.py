"""The cluster's bearer token: one line in a file that only its owner may read."""

import stat
from pathlib import Path

from pdxfer.core.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MIN_CHARS = 16


def read_token(file: str) -> str:
    """The token in `security.token_file`; empty if none is set. Raises ConfigError with what to do."""
    if not file:
        return ""
    path = Path(file).expanduser()
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"security.token_file {path}: {getattr(error, 'strerror', None) or error}") from error
    if mode & _OTHERS:
        raise ConfigError(f"security.token_file {path} is open to others (mode {mode & 0o777:o}): chmod 600 {path}")
    if len(token) < _MIN_CHARS or not token.isascii() or any(c.isspace() for c in token):
        raise ConfigError(
            f"security.token_file {path}: expected one word of at least {_MIN_CHARS} ASCII characters; make one with "
            f"`openssl rand -hex 24 > {path}`"
        )
    return token
