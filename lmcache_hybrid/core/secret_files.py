# SPDX-License-Identifier: Apache-2.0
"""Tells the path of a file with a secret from a secret that stands in its place."""

import os


def is_path(text: str) -> bool:
    """Whether ``text`` is in a folder that exists, so that it may be shown.

    Base64 and passwords may begin with "/".
    """
    folder = os.path.dirname(text)
    return bool(folder.strip("/")) and os.path.isdir(folder)
