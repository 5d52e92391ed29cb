"""`pdxfer config show|check|schema|list|import-lmcache`."""

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pdxfer.cli.options import AsJson, ConfigFiles, Sets, load_settings, new_app, print_json, print_table, say
from pdxfer.config import lmcache
from pdxfer.config.load import find_config, packaged_configs
from pdxfer.config.network import router_endpoint
from pdxfer.config.schema import Config
from pdxfer.config.shape import json_schema
from pdxfer.config.show import rows
from pdxfer.core.errors import ConfigError

app = new_app()


@app.callback()
def config() -> None:
    """Show, check and describe the configuration.

    Example: pdxfer config show --config cpu-1p1d --set router.port=5571
    """


@app.command()
def show(
    config: ConfigFiles = None,
    set_: Sets = None,
    section: Annotated[str, typer.Option(help="Only this section.")] = "",
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not the default.")] = False,
    as_json: AsJson = False,
) -> None:
    """Every value and where it came from; secrets are ***.

    Example: pdxfer config show --config cpu-1p1d --changed
    """
    found = [row for row in rows(load_settings(config, set_)) if row.key.startswith(section)]
    if not found:
        raise ConfigError(f"--section {section}: there is none; sections are {', '.join(Config.__struct_fields__)}")
    shown = [row for row in found if not (changed and row.origin == "default")]
    if as_json:
        print_json(shown)
        return
    print_table(["KEY", "VALUE", "ORIGIN"], [[r.key, msgspec.json.encode(r.value).decode(), r.origin] for r in shown])


@app.command()
def check(config: ConfigFiles = None, set_: Sets = None, as_json: AsJson = False) -> None:
    """Exit 0 if the configuration is good, 2 with the reason if not.

    Example: pdxfer config check --config my.yaml
    """
    from pdxfer.cli.checks.access import require_secrets
    from pdxfer.launcher.names import check_names

    settings = load_settings(config, set_).config
    check_names(settings)
    router_endpoint(settings)
    require_secrets(settings)
    files = [str(find_config(name)) for name in config or []]
    if as_json:
        print_json({"ok": True, "files": files})
    else:
        print(f"ok: {', '.join(files) or 'defaults, environment and --set'}")


@app.command()
def schema() -> None:
    """JSON Schema of a configuration file, with the meaning of every key.

    Example: pdxfer config schema > pdxfer.schema.json
    """
    print_json(json_schema())


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Names of the configs that came with pdxfer.

    Example: pdxfer config list
    """
    found = {name: str(find_config(name)) for name in packaged_configs()}
    if as_json:
        print_json(found)
    else:
        print_table(["NAME", "FILE"], [[name, file] for name, file in found.items()])


@app.command("import-lmcache")
def import_lmcache(
    file: Annotated[
        Path | None, typer.Argument(help="LMCache's YAML; default: what LMCACHE_CONFIG_FILE names.", show_default=False)
    ] = None,
) -> None:
    """LMCache's settings (its YAML and LMCACHE_* of the environment) as a configuration of ours, on stdout.

    What has no counterpart is listed on stderr. Example: pdxfer config import-lmcache lmcache.yaml > pdxfer.yaml
    """
    given = file or Path(os.environ.get("LMCACHE_CONFIG_FILE", ""))
    try:
        text = given.read_text(encoding="utf-8") if str(given) != "." else ""
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{given}: {why}; name LMCache's YAML file") from error
    converted = lmcache.convert(lmcache.read(text, str(given), os.environ))
    try:
        msgspec.convert(converted.tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{given}: a value of LMCache's is not one of ours: {error}") from error
    print(converted.to_yaml(), end="")
    for note in converted.notes:
        say(f"not taken over: {note}")
