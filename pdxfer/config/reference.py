"""docs/configuration.md, made from the schema: `python -m pdxfer.config.reference > docs/configuration.md`."""

import json
from typing import Any

from pdxfer.config.shape import json_schema

_HEAD = """# Configuration

Made from the schema by `python -m pdxfer.config.reference`; do not edit. One YAML file, overlaid by further files,
`PDXFER_SECTION__KEY` variables and `--set section.key=value`, in this order. `pdxfer config show` prints every value
and where it came from; an unknown key is an error that names the nearest one.

```bash
pdxfer config show --section router
pdxfer config check --set router.port=5571
pdxfer config list
```
"""


def render() -> str:
    """The whole page."""
    schema: dict[str, Any] = json_schema()
    defs: dict[str, Any] = schema["$defs"]
    sections: dict[str, Any] = defs["Config"]["properties"]
    parts = [_HEAD]
    for name, field in sections.items():
        struct = _struct(field)
        parts.append(f"## {name}\n\n{_line(defs[struct]['description'])}\n\n{_table(defs[struct], defs)}")
    for struct in ("EnginePlace", "TierConfig"):
        parts.append(f"## {struct}\n\n{_line(defs[struct]['description'])}\n\n{_table(defs[struct], defs)}")
    return "\n".join(parts)


def _struct(field: dict[str, Any]) -> str:
    """Name of a section's type."""
    choices = [field, *field.get("allOf", ()), *field.get("anyOf", ())]
    return str(next(one["$ref"] for one in choices if "$ref" in one)).rpartition("/")[2]


def _table(struct: dict[str, Any], defs: dict[str, Any]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in struct["properties"].items():
        default = f"`{json.dumps(field['default'])}`" if "default" in field else "required"
        rows.append(f"| `{key}` | {_type(field)} | {default} | {_line(field.get('description', ''))} |")
    return "\n".join(rows) + "\n"


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(one) for one in field["anyOf"]))
    kind = str(field.get("type", "any"))
    if kind == "array" and "items" in field:
        return f"list of {_type(field['items'])}" if field["items"] else "list"
    bounds = [f"≥ {field['minimum']}"] if field.get("minimum") else []
    bounds += [f"> {field['exclusiveMinimum']}"] if "exclusiveMinimum" in field else []
    bounds += [f"≤ {field['maximum']}"] if "maximum" in field else []
    return f"{kind} {', '.join(bounds)}".strip()


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(render())
