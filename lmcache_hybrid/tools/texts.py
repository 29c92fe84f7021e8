# SPDX-License-Identifier: Apache-2.0
"""Makes long texts from the docstrings of Python's standard library, as on every machine."""

import importlib

# Modules whose documentation is long enough to fill several blocks.
MODULES = (
    "decimal", "typing", "argparse", "statistics", "difflib", "fractions", "random",
    "doctest", "inspect", "ast", "asyncio.events", "logging", "unittest.mock", "datetime",
)  # fmt: skip


LENGTHS = (1500, 3000, 5000, 8000, 12000)


def texts(count: int) -> list[str]:
    """Return ``count`` long texts from the docstrings of Python's standard library."""
    made = []
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        text = f"Document {index}. "
        for step in range(len(MODULES)):
            text += documentation(MODULES[(index + step) % len(MODULES)])
            if len(text) >= length:
                break
        made.append(text[:length])
    return made


def documentation(module_name: str) -> str:
    """Join all docstrings of a module, its classes and functions."""
    module = importlib.import_module(module_name)
    owners = [module]
    for value in vars(module).values():
        if getattr(value, "__module__", None) == module_name:
            owners.append(value)
            owners += [v for v in getattr(value, "__dict__", {}).values() if callable(v)]
    docs = (getattr(owner, "__doc__", None) for owner in owners)
    return "\n\n".join(doc for doc in docs if isinstance(doc, str)) + "\n"
